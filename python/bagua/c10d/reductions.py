"""Reductions of torch.distributed as codes of the core."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from bagua import engine, verbs
from bagua.torch_operand import DTYPES

from .torch_bindings import c10d

__all__ = ["CODES_BY_HASH", "Reduction", "reduction"]


class Reduction(NamedTuple):
    """How the core combines elements."""

    code: int
    #: Whether the sum is divided by the number of ranks afterwards: AVG of integers, cut towards zero as NCCL does.
    divides: bool = False


#: torch's reduction -> code of the core, of those that both have.
CODES = {
    kind: engine.OPS[name.lower()]
    for name, kind in c10d.ReduceOp.RedOpType.__members__.items()
    if name.lower() in engine.OPS
}
#: The same by the hash of a ReduceOp, which is the number of its kind. A lookup by the kind takes three times as long.
CODES_BY_HASH = {hash(c10d.ReduceOp(kind)): code for kind, code in CODES.items()}
_NAMES = {code: name for name, code in engine.OPS.items()}


def reduction(op: Any, dtype: torch.dtype) -> Reduction:
    """The reduction of a dtype. NotImplementedError for PREMUL_SUM, TypeError for one that is not defined."""
    kind = getattr(op, "op", op)
    code = CODES.get(kind)
    if code is None:
        raise NotImplementedError(f"the backend 'bagua' has no {kind}: scale the tensor and use SUM")
    name = _NAMES[code]
    if dtype not in DTYPES:
        known = ", ".join(engine.DTYPES)
        raise TypeError(f"{name} of {dtype} is not defined; it is for {known}")
    divides = name == "avg" and not (dtype.is_floating_point or dtype.is_complex)
    code = engine.OPS["sum"] if divides else code
    if not verbs.is_defined(code, DTYPES[dtype]):
        raise TypeError(f"{name} of {dtype} is not defined")
    return Reduction(code, divides)
