"""The Rust core, by address: the only file that imports the extension.

What is here speaks in addresses, element counts and codes, and trusts its caller to keep memory alive and in place;
`bagua.group` and `bagua.torch_api` are the callers that do.
"""

from __future__ import annotations

from bagua._bagua import (
    ALGORITHMS,
    DTYPES,
    MAX_STREAMS,
    OPS,
    PEER_SELECTION_MODES,
    VERBS,
    Arena,
    AsyncModelAverage,
    Averager,
    Bootstrap,
    Bucket,
    Codec,
    Communicator,
    Door,
    Engine,
    Handle,
    RendezvousServer,
    TensorReader,
    Tls,
    WeightLock,
    check_peer_selection,
    flight_recorder,
    listen_for_interrupts,
    local_address_towards,
    present,
    read_array,
    rendezvous_at,
    rendezvous_file,
    rendezvous_tcp,
    set_recording,
    version,
    wait_for_callbacks,
)

__all__ = [
    "ALGORITHMS",
    "ALL_GATHER",
    "ALL_REDUCE",
    "ALL_TO_ALL",
    "BARRIER",
    "BROADCAST",
    "DTYPES",
    "GATHER",
    "MAX_STREAMS",
    "OPS",
    "PEER_SELECTION_MODES",
    "REDUCE",
    "REDUCE_SCATTER",
    "SCATTER",
    "VERBS",
    "Arena",
    "AsyncModelAverage",
    "Averager",
    "Bootstrap",
    "Bucket",
    "Codec",
    "Communicator",
    "Door",
    "Engine",
    "Handle",
    "RendezvousServer",
    "TensorReader",
    "Tls",
    "WeightLock",
    "check_peer_selection",
    "flight_recorder",
    "listen_for_interrupts",
    "local_address_towards",
    "present",
    "read_array",
    "rendezvous_at",
    "rendezvous_file",
    "rendezvous_tcp",
    "set_recording",
    "version",
    "wait_for_callbacks",
]

# Codes of the verbs. Every name is one of the extension's table.
ALL_REDUCE, REDUCE, BROADCAST = VERBS["all_reduce"], VERBS["reduce"], VERBS["broadcast"]
ALL_GATHER, GATHER, SCATTER = VERBS["all_gather"], VERBS["gather"], VERBS["scatter"]
REDUCE_SCATTER, ALL_TO_ALL, BARRIER = VERBS["reduce_scatter"], VERBS["all_to_all"], VERBS["barrier"]
