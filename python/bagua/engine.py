"""The Rust core, by address: the only file that imports the extension, all names of which are here.

Its functions take addresses, element counts and codes, and rely on their caller to keep memory alive and in place;
`bagua.group` and `bagua.torch_api` are the callers that do. `_bagua.pyi` has the signatures.
"""

from __future__ import annotations

from bagua._bagua import *  # noqa: F403 - the stub lists them
from bagua._bagua import VERBS as VERBS

# Codes of the verbs that have a path of their own for small calls. The others are in `bagua.verbs`.
ALL_REDUCE, REDUCE, BROADCAST, BARRIER = VERBS["all_reduce"], VERBS["reduce"], VERBS["broadcast"], VERBS["barrier"]
ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL = VERBS["all_gather"], VERBS["reduce_scatter"], VERBS["all_to_all"]
