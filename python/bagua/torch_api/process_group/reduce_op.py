"""The reduce operations, with the numbers of the original Bagua."""

from __future__ import annotations

from enum import IntEnum

from bagua import engine, verbs


class ReduceOp(IntEnum):
    """Reductions of elements over ranks. The numbers are those of the original Bagua."""

    SUM = engine.OPS["sum"]
    """Sum. Not defined for bool."""
    PRODUCT = engine.OPS["product"]
    """Product."""
    MIN = engine.OPS["min"]
    """Minimum. Not defined for complex numbers."""
    MAX = engine.OPS["max"]
    """Maximum. Not defined for complex numbers."""
    BOR = engine.OPS["bor"]
    """Bitwise or. Defined for integers and bool."""
    BAND = engine.OPS["band"]
    """Bitwise and. Defined for integers and bool."""
    BXOR = engine.OPS["bxor"]
    """Bitwise exclusive or. Defined for integers and bool."""
    AVG = engine.OPS["avg"]
    """Mean. Defined for floating-point and complex numbers."""


_NAMES = {code: name for name, code in engine.DTYPES.items()}


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
