"""The Rust core, by memory address. This is the only module that imports the extension, and has all of its names.

Addresses are in host memory. Counts are elements (of one rank's part, in verbs that have parts). `dtype` and `op` are
codes from `DTYPES` and `OPS`. Ranks are ranks of the group. Timeouts are seconds. The caller promises that memory stays
valid until a verb has returned or its handle is done; the core holds the object passed as `keep` until then. The
signatures are in `_bagua.pyi`, which `make setup` generates with PyO3.
"""

from __future__ import annotations

from typing import Any

from bagua._bagua import *  # noqa: F403 - all that the core binds
from bagua._bagua import tables

_tables: dict[str, Any] = tables()
#: Name -> code of each element type, reduction and verb.
DTYPES: dict[str, int] = _tables["DTYPES"]
OPS: dict[str, int] = _tables["OPS"]
VERBS: dict[str, int] = _tables["VERBS"]
#: Codes (op, dtype) of every defined reduction.
DEFINED: frozenset[tuple[int, int]] = _tables["DEFINED"]
CODECS: list[str] = _tables["CODECS"]
TRANSPORTS: list[str] = _tables["TRANSPORTS"]
#: Algorithms of all_reduce between hosts.
ALGORITHMS: list[str] = _tables["ALGORITHMS"]
#: Ways in which a rank chooses its peers in decentralized averaging.
PEER_SELECTION_MODES: list[str] = _tables["PEER_SELECTION_MODES"]
#: Largest number of TCP streams to one peer.
MAX_STREAMS: int = _tables["MAX_STREAMS"]
#: Names of the CUDA kernels, by program.
CUDA_KERNELS: dict[str, list[str]] = _tables["CUDA_KERNELS"]
#: True in an optimized build. Test builds, and `maturin develop` without `--release`, are many times slower.
IS_OPTIMIZED: bool = _tables["IS_OPTIMIZED"]

# Codes of the verbs with a short path for small calls. `bagua.verbs` has the codes of all verbs.
ALL_REDUCE, REDUCE, BROADCAST, BARRIER = VERBS["all_reduce"], VERBS["reduce"], VERBS["broadcast"], VERBS["barrier"]
ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL = VERBS["all_gather"], VERBS["reduce_scatter"], VERBS["all_to_all"]
