"""The original's reduce operations."""

from __future__ import annotations

from enum import IntEnum

from bagua import engine, verbs


class ReduceOp(IntEnum):
    """The reduction of the elements of several ranks. The numbers are those of the original."""

    SUM = engine.OPS["sum"]
    PRODUCT = engine.OPS["product"]
    MIN = engine.OPS["min"]
    MAX = engine.OPS["max"]
    BOR = engine.OPS["bor"]
    BAND = engine.OPS["band"]
    BXOR = engine.OPS["bxor"]
    AVG = engine.OPS["avg"]


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
