"""The classes of bagua.errors, and the one match in Rust that raises them."""

from __future__ import annotations

import errno
import os
import pickle
import re
import socket
from pathlib import Path
from typing import Any

import pytest

import bagua
from bagua import errors, extension

ROOT = Path(__file__).resolve().parents[2]
CLASSES = [getattr(errors, name) for name in errors.__all__]

FIELDS: dict[str, dict[str, Any]] = {
    "PeerLostError": {"rank": 2, "host": "node7", "reason": "no heartbeat for 5.0 s", "noticed_by": 0},
    "BaguaTimeoutError": {"missing": (1, 3), "after": 5.0, "noticed_by": 2},
    "PeerRaisedError": {"rank": 1, "host": "node7", "kind": "ValueError", "message": "bad"},
}
PROGRESS: dict[str, Any] = {"during": "all_reduce(sum)", "bucket": "b0", "done_bytes": 3, "total_bytes": 10}


def test_every_error_is_a_bagua_error_and_a_runtime_error() -> None:
    for cls in CLASSES:
        assert issubclass(cls, bagua.BaguaError)
        assert issubclass(cls, RuntimeError)
        assert getattr(bagua, cls.__name__) is cls


def test_a_timeout_is_a_timeout_error() -> None:
    assert issubclass(bagua.BaguaTimeoutError, TimeoutError)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_errors_keep_text_and_fields_in_another_process(cls: type[bagua.BaguaError]) -> None:
    fields = dict(FIELDS.get(cls.__name__, {}))
    if cls.__name__ in ("PeerLostError", "BaguaTimeoutError"):
        fields |= PROGRESS
    error = pickle.loads(pickle.dumps(cls("what happened", **fields)))
    assert type(error) is cls
    assert str(error) == "what happened"
    assert {name: getattr(error, name) for name in fields} == fields


def test_the_error_of_the_operating_system_is_the_cause_of_the_exception() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(bagua.BaguaError, match="listening") as raised:
        extension.RendezvousServer(*taken.getsockname())
    cause = raised.value.__cause__
    assert type(cause) is OSError
    assert (cause.errno, cause.strerror) == (errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def test_an_error_without_one_has_no_cause() -> None:
    server = extension.RendezvousServer("127.0.0.1", 0)
    assert server.serve(1, b"address", b"secret", 1.0) == [b"address"]
    with pytest.raises(bagua.BaguaError, match="already") as raised:
        server.serve(1, b"address", b"secret", 1.0)
    assert raised.value.__cause__ is None


def test_every_core_error_is_matched_and_every_class_is_used() -> None:
    core = (ROOT / "rust/bagua-kernels/src/error.rs").read_text()
    source = (ROOT / "rust/bagua-py/src/errors.rs").read_text()
    body = re.search(r"pub enum Error \{(.*?)\n\}", core, re.S)
    assert body is not None
    variants = re.findall(r"^    (\w+)(?: \{|\(|,)", body[1], re.M)
    assert len(variants) >= 9
    for variant in variants:
        assert f"Error::{variant}" in source, variant
    for cls in CLASSES:
        assert f'"{cls.__name__}"' in source, cls
