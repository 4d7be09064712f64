"""Reductions of torch.distributed as codes of the core."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from bagua import extension, verbs
from bagua.torch_operand import DTYPES

from .torch_bindings import c10d

__all__ = ["CODES_BY_HASH", "Reduction", "reduction"]


class Reduction(NamedTuple):
    """A reduction of the core."""

    code: int
    #: True if the sum is divided by the number of ranks afterwards: AVG of integers, truncated towards zero as in NCCL.
    divides: bool = False


#: torch's reduction -> code of the core, for reductions that both have.
CODES = {
    kind: extension.OPS[name.lower()]
    for name, kind in c10d.ReduceOp.RedOpType.__members__.items()
    if name.lower() in extension.OPS
}
#: Hash of a ReduceOp -> code. The hash is the number of its kind; a lookup by the kind takes three times as long.
CODES_BY_HASH = {hash(c10d.ReduceOp(kind)): code for kind, code in CODES.items()}
_NAMES = {code: name for name, code in extension.OPS.items()}


def reduction(op: Any, dtype: torch.dtype) -> Reduction:
    """Returns the reduction for a dtype. Raises NotImplementedError for PREMUL_SUM, TypeError if it is undefined."""
    kind = getattr(op, "op", op)
    code = CODES.get(kind)
    if code is None:
        raise NotImplementedError(f"the backend 'bagua' has no {kind}: scale the tensor and use SUM")
    name = _NAMES[code]
    if dtype not in DTYPES:
        known = ", ".join(extension.DTYPES)
        raise TypeError(f"{name} of {dtype} is not defined; it is for {known}")
    divides = name == "avg" and not (dtype.is_floating_point or dtype.is_complex)
    code = extension.OPS["sum"] if divides else code
    if not verbs.is_defined(code, DTYPES[dtype]):
        raise TypeError(f"{name} of {dtype} is not defined")
    return Reduction(code, divides)
