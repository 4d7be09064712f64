"""The Rust core, by address: the only file that imports the extension.

What is here speaks in addresses, element counts and codes, and trusts its caller to keep memory alive and in place;
`bagua.group` and `bagua.torch_api` are the callers that do.
"""

from __future__ import annotations

from bagua._bagua import (
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
    wait_for_callbacks,
)

__all__ = [
    "DTYPES",
    "OPS",
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
    "wait_for_callbacks",
]

#: Code of each element type; the code is what travels.
DTYPES = {
    "float16": 0,
    "bfloat16": 1,
    "float32": 2,
    "float64": 3,
    "uint8": 4,
    "int8": 5,
    "int32": 6,
    "int64": 7,
    "bool": 8,
}

#: Number of each reduce operation, as in the original's ReduceOp.
OPS = {"sum": 0, "product": 1, "min": 2, "max": 3, "bor": 7, "band": 8, "bxor": 9, "avg": 10}
