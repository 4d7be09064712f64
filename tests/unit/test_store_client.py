"""Connecting to a store of torch.distributed, and giving up requests to one that does not answer."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistError

from bagua.tcp_store_requests import ask
from bagua.torch_api.membership.torch_store_connection import connect
from tests.waits import until
from tests.world import free_port

HOST = "127.0.0.1"

#: Seconds for what takes milliseconds on an idle machine.
PATIENCE = 20.0


@contextmanager
def silent() -> Iterator[int]:
    """A port where connections are accepted and nothing is ever said."""
    with socket.create_server((HOST, 0), backlog=64) as server:
        yield server.getsockname()[1]


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "bagua-store"]


def test_a_store_that_never_answers_is_given_up() -> None:
    with silent() as port:
        with pytest.raises((OSError, DistError)):
            connect(HOST, port, 2, 0.5)
        assert threads(), "torch itself would have given up"
    until(lambda: not threads(), "the request ends with its connection")


def test_a_port_without_a_listener_is_a_plain_error() -> None:
    with free_port() as port, pytest.raises((OSError, DistError)):
        connect(HOST, port, 2, 0.3)
    until(lambda: not threads(), "the request goes on")


def test_a_cause_ends_the_attempts() -> None:
    calls: list[int] = []

    def cause() -> None:
        calls.append(1)
        if len(calls) > 3:
            raise RuntimeError("rank 1 is gone")

    with free_port() as port, pytest.raises(RuntimeError, match="rank 1 is gone"):
        connect(HOST, port, 2, 60.0, cause)


def test_a_store_that_is_served_late_is_reached() -> None:
    served = []

    def serve() -> None:
        served.append(TCPStore(HOST, port, 2, True, timedelta(seconds=10), wait_for_workers=False))

    late = threading.Timer(0.3, serve)
    with free_port() as port:
        late.start()
        client = connect(HOST, port, 2, PATIENCE)
        late.join()
    client.store.set("key", "value")
    assert served[0].get("key") == b"value"


SERVER = """
import sys
from torch._C._distributed_c10d import TCPStore
store = TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_a_request_to_a_frozen_server_is_given_up_and_answered_later() -> None:
    with subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        client = connect(HOST, int(server.stdout.readline()), 2, PATIENCE)
        server.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, server.pid, os.WSTOPPED)
        with pytest.raises(TimeoutError):
            ask(lambda: client.store.add("count", 1), 0.2)
        server.send_signal(signal.SIGCONT)
        assert ask(lambda: client.store.add("count", 1), PATIENCE) == 2
        server.communicate(b"")


GIVES_UP = """
import sys
from bagua.tcp_store_requests import ask
from bagua.torch_api.membership.torch_store_connection import _open
try:
    ask(lambda: _open("127.0.0.1", int(sys.argv[1]), 2, 30.0), 0.3)
except TimeoutError:
    print("gave up", flush=True)
"""


@pytest.mark.slow
def test_a_process_ends_properly_although_it_gave_a_request_up() -> None:
    with silent() as port:
        command = [sys.executable, "-c", GIVES_UP, str(port)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "gave up\n"
