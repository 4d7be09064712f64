"""The original's reduce operations."""

from __future__ import annotations

from enum import IntEnum

from bagua import engine, verbs


class ReduceOp(IntEnum):
    """The reduction of the elements of several ranks. The numbers are those of the original."""

    SUM = engine.OPS["sum"]
    """The sum; not of bool."""
    PRODUCT = engine.OPS["product"]
    """The product."""
    MIN = engine.OPS["min"]
    """The least; not of complex numbers."""
    MAX = engine.OPS["max"]
    """The greatest; not of complex numbers."""
    BOR = engine.OPS["bor"]
    """Bitwise or; of integers and bool."""
    BAND = engine.OPS["band"]
    """Bitwise and; of integers and bool."""
    BXOR = engine.OPS["bxor"]
    """Bitwise exclusive or; of integers and bool."""
    AVG = engine.OPS["avg"]
    """The mean; of floating-point and complex numbers."""


_NAMES = {code: name for name, code in engine.DTYPES.items()}


def check_op(op: ReduceOp | int, dtype: int) -> int:
    """The core's number of a reduction, if it is defined for the dtype with this code."""
    # By class: torch.distributed's ReduceOp compares equal by number, but its numbers mean other operations.
    if type(op) is ReduceOp and verbs.is_defined(op, dtype):
        return op
    if not isinstance(op, int):
        raise TypeError(f"op must be a bagua.torch_api.ReduceOp, not {op!r}")
    op = ReduceOp(op)
    if not verbs.is_defined(op, dtype):
        raise TypeError(f"{op.name} of {_NAMES[dtype]} is not defined")
    return op
