"""The Rust core, by address: the only file that imports the extension, all names of which are here.

Addresses are those of host memory, counts are elements (of one rank's chunk in the verbs that have chunks), `dtype`
and `op` are codes (`DTYPES`, `OPS`), ranks are ranks of the group, timeouts are seconds. The caller promises that
memory stays valid until a verb has returned or its handle is done; `keep` holds any object until then: `bagua.group`
and `bagua.torch_api` are the callers that do. The signatures are in `_bagua.pyi`, which `make setup` has PyO3 write.
"""

from __future__ import annotations

from typing import Any

from bagua._bagua import *  # noqa: F403 - all that the core binds
from bagua._bagua import tables

_tables: dict[str, Any] = tables()
#: Codes by name: of element types, reductions and operations.
DTYPES: dict[str, int] = _tables["DTYPES"]
OPS: dict[str, int] = _tables["OPS"]
VERBS: dict[str, int] = _tables["VERBS"]
#: (op, dtype) of every reduction that is defined, by their codes.
DEFINED: frozenset[tuple[int, int]] = _tables["DEFINED"]
CODECS: list[str] = _tables["CODECS"]
TRANSPORTS: list[str] = _tables["TRANSPORTS"]
#: How all_reduce goes between hosts.
ALGORITHMS: list[str] = _tables["ALGORITHMS"]
#: How a member chooses its peers.
PEER_SELECTION_MODES: list[str] = _tables["PEER_SELECTION_MODES"]
#: The most streams to one peer.
MAX_STREAMS: int = _tables["MAX_STREAMS"]
#: Names of the kernels for devices, by program.
CUDA_KERNELS: dict[str, list[str]] = _tables["CUDA_KERNELS"]
#: Those that kernels are compiled for in advance, where NVRTC knows them.
CUDA_ARCHITECTURES: list[int] = _tables["CUDA_ARCHITECTURES"]
#: False in a build for tests or of `maturin develop` without `--release`, which is many times slower.
IS_OPTIMIZED: bool = _tables["IS_OPTIMIZED"]

# Codes of the verbs that have a path of their own for small calls. The others are in `bagua.verbs`.
ALL_REDUCE, REDUCE, BROADCAST, BARRIER = VERBS["all_reduce"], VERBS["reduce"], VERBS["broadcast"], VERBS["barrier"]
ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL = VERBS["all_gather"], VERBS["reduce_scatter"], VERBS["all_to_all"]
