"""The Rust core, by address: the only file that imports the extension.

What is here speaks in addresses, element counts and codes, and trusts its caller to keep memory alive and in place;
`bagua.group` and `bagua.torch_api` are the callers that do.
"""

from __future__ import annotations

from bagua._bagua import (
    ALGORITHMS,
    DTYPES,
    MOST_STREAMS,
    OPS,
    VERBS,
    Arena,
    Bucket,
    Communicator,
    Engine,
    Handle,
    TensorReader,
    Bootstrap,
    RendezvousServer,
    listen_for_interrupts,
    local_address_towards,
    read_array,
    present,
    rendezvous_at,
    rendezvous_file,
    rendezvous_tcp,
    version,
)

__all__ = [
    "ALGORITHMS",
    "DTYPES",
    "MOST_STREAMS",
    "OPS",
    "VERBS",
    "Arena",
    "Bucket",
    "Communicator",
    "Engine",
    "Handle",
    "TensorReader",
    "Bootstrap",
    "RendezvousServer",
    "listen_for_interrupts",
    "local_address_towards",
    "read_array",
    "present",
    "rendezvous_at",
    "rendezvous_file",
    "rendezvous_tcp",
    "version",
]
