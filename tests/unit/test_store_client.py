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
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistError

from bagua.tcp_store_requests import Connection, StoreRequests
from bagua.torch_api.membership.store_client import connect
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


def connections(port: int) -> int:
    """How many established connections of this process lead to a port."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as stream:
                if stream.family in (socket.AF_INET, socket.AF_INET6):
                    found += stream.getpeername()[1] == port
        except OSError:
            continue
    return found


def test_a_store_that_never_answers_is_given_up_and_nothing_is_left() -> None:
    with silent() as port:
        with pytest.raises((OSError, DistError)):
            connect(HOST, port, 2, 0.5)
        until(lambda: not threads(), "the request goes on")
        until(lambda: connections(port) == 0, "a connection is left")


def test_a_connection_that_a_given_up_request_opens_later_is_ended_too() -> None:
    given_up = threading.Event()

    def late() -> bytes:
        given_up.wait()
        with socket.create_connection((HOST, port)) as stream:
            return stream.recv(1)

    with silent() as port:
        requests = StoreRequests(connection=Connection(port))
        with pytest.raises(TimeoutError):
            requests.ask(late, 0.05)
        requests.abandon()
        given_up.set()
        until(lambda: not threads(), "the request goes on")


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
    assert client.usable


SERVER = """
import sys, time
from datetime import timedelta
from torch._C._distributed_c10d import TCPStore
store = TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=10), wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_a_frozen_server_costs_only_the_store_that_gave_up() -> None:
    with subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        other = connect(HOST, port, 2, PATIENCE)
        client = connect(HOST, port, 2, PATIENCE)
        requests = StoreRequests(connection=client.connection)
        server.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, server.pid, os.WSTOPPED)
        try:
            with pytest.raises(TimeoutError):
                requests.ask(lambda: client.store.add("count", 1), 0.2)
            assert client.usable
            assert threads()
            requests.abandon()
            until(lambda: not threads(), "the request goes on")
            assert not client.usable
        finally:
            server.send_signal(signal.SIGCONT)
        other.store.set("key", "value")
        assert other.usable
        server.communicate(b"")


GIVES_UP = """
import sys, threading
from bagua.tcp_store_requests import Connection, StoreRequests
from bagua.torch_api.membership.store_client import _open
port = int(sys.argv[1])
given_up = threading.Event()
def late():
    # A refused connection fails at once: it begins when the request was given up.
    if sys.argv[2] == "absent":
        given_up.wait()
    # Until long after the time to give it up, however late the threads run.
    return _open("127.0.0.1", port, 2, 30.0)
try:
    StoreRequests(None, Connection(port)).ask(late, 0.3)
except TimeoutError:
    print("gave up", flush=True)
    given_up.set()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["silent", "absent"])
def test_a_process_ends_properly_although_it_gave_a_request_up(how: str, tmp_path: Path) -> None:
    with silent() if how == "silent" else free_port() as port:
        command = [sys.executable, "-c", GIVES_UP, str(port), how]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "gave up\n"


def test_a_connection_is_of_its_own_port_alone() -> None:
    with silent() as port, silent() as elsewhere:
        before = socket.create_connection((HOST, port))
        connection = Connection(port)
        own, other = socket.create_connection((HOST, port)), socket.create_connection((HOST, elsewhere))
        connection.opened()
        later = socket.create_connection((HOST, port))
        connection.shut()
        assert own.recv(1) == b""
        for stream in (before, other, later):
            stream.setblocking(False)
            with pytest.raises(BlockingIOError):
                stream.recv(1)
        for stream in (before, own, other, later):
            stream.close()
