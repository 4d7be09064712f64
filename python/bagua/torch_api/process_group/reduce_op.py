"""The reduce operations, with the numbers of the original Bagua."""

from __future__ import annotations

from enum import IntEnum

from bagua import extension, verbs


class ReduceOp(IntEnum):
    """Reductions of elements over ranks. The numbers are those of the original Bagua."""

    SUM = extension.OPS["sum"]
    """Sum. Not defined for bool."""
    PRODUCT = extension.OPS["product"]
    """Product."""
    MIN = extension.OPS["min"]
    """Minimum. Not defined for complex numbers."""
    MAX = extension.OPS["max"]
    """Maximum. Not defined for complex numbers."""
    BOR = extension.OPS["bor"]
    """Bitwise or. Defined for integers and bool."""
    BAND = extension.OPS["band"]
    """Bitwise and. Defined for integers and bool."""
    BXOR = extension.OPS["bxor"]
    """Bitwise exclusive or. Defined for integers and bool."""
    AVG = extension.OPS["avg"]
    """Mean. Defined for floating-point and complex numbers."""


_NAMES = {code: name for name, code in extension.DTYPES.items()}


def check_op(op: ReduceOp | int, dtype: int) -> int:
    """Returns the core's number of a reduction. Raises TypeError if it is not defined for the dtype with this code."""
    # Compared by class, because torch.distributed's ReduceOp compares equal by number but gives numbers other meanings.
    if type(op) is ReduceOp and verbs.is_defined(op, dtype):
        return op
    if not isinstance(op, int):
        raise TypeError(f"op must be a bagua.torch_api.ReduceOp, not {op!r}")
    op = ReduceOp(op)
    if not verbs.is_defined(op, dtype):
        raise TypeError(f"{op.name} of {_NAMES[dtype]} is not defined")
    return op
