"""Values read from Redis by our own reader: however the reply is cut, whatever goes wrong in the middle of it."""

from __future__ import annotations

import shutil
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="torch is not installed: make setup")
redis = pytest.importorskip("redis", reason="the package redis is not installed: make setup")

from bagua.torch_api.contrib.utils.redis_server import RedisServer  # noqa: E402
from bagua.torch_api.contrib.utils.redis_store import RedisStore  # noqa: E402
from bagua.torch_api.contrib.utils.redis_values import Reader, _Reply  # noqa: E402

MIB = 1 << 20


class Pieces:
    """A connection on which bytes arrive in pieces of these sizes in turn, and which then is closed."""

    def __init__(self, data: bytes, sizes: list[int]) -> None:
        self.data, self.sizes, self.turn = memoryview(data), sizes, 0

    def recv_into(self, place: memoryview) -> int:
        assert len(place), "no room was offered"
        piece = self.data[: min(len(place), self.sizes[self.turn % len(self.sizes)])]
        place[: len(piece)] = piece
        self.data, self.turn = self.data[len(piece) :], self.turn + 1
        return len(piece)


def reply(values: list[bytes | None]) -> bytes:
    """As the protocol has it."""
    parts = [b"$-1\r\n" if value is None else b"$%d\r\n%b\r\n" % (len(value), value) for value in values]
    return b"*%d\r\n" % len(values) + b"".join(parts)


@given(
    st.lists(st.none() | st.binary(max_size=100), max_size=12),
    st.lists(st.integers(1, 70), min_size=1, max_size=5),
    st.integers(16, 64),
)
def test_a_reply_is_read_however_it_is_cut(values: list[bytes | None], sizes: list[int], room: int) -> None:
    connection: Any = Pieces(reply(values), sizes)
    assert _Reply(connection, bytearray(room), redis.exceptions).values(len(values)) == values
    assert len(connection.data) == 0


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (b"", redis.exceptions.ConnectionError),
        (b"*2\r\n$3\r\nab", redis.exceptions.ConnectionError),
        (b"*3\r\n", redis.exceptions.InvalidResponse),
        (b":5\r\n", redis.exceptions.InvalidResponse),
        (b"*2\r\n$1\r\na\r\n:5\r\n", redis.exceptions.InvalidResponse),
        (b"*2\r\n$x\r\n", ValueError),
        (b"*2\r\n$-2\r\n", redis.exceptions.InvalidResponse),
        (b"*2\r\n$536870913\r\n", redis.exceptions.InvalidResponse),
        (b"*2\r\n$4611686018427387904\r\n", redis.exceptions.InvalidResponse),
        (b"x" * 100, redis.exceptions.InvalidResponse),
        (b"-OOM full\r\n", redis.exceptions.ResponseError),
        (b"-LOADING soon\r\n", redis.exceptions.BusyLoadingError),
    ],
)
def test_what_is_no_reply_of_two_values_is_an_error(said: bytes, error: type[Exception]) -> None:
    connection: Any = Pieces(said, [7])
    with pytest.raises(error):
        _Reply(connection, bytearray(32), redis.exceptions).values(2)


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    """A client of a server that starts for these tests."""
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed: tools/system_packages test")
    server = RedisServer("127.0.0.1", 64 * MIB, password="secret")
    found = redis.Redis(host=server.host, port=server.port, password="secret", protocol=2, socket_timeout=5)
    yield found
    found.close()
    server.stop()


def test_values_of_every_size_come_back_in_order(client: Any) -> None:
    values = {"empty": b"", "small": b"\r\n$1\r\n", "large": bytes(range(256)) * (3 * MIB // 256), "last": b"x"}
    client.mset(values)
    reader = Reader(client, redis.exceptions)
    for _ in range(2):
        assert reader.mget([*values, "absent", "small", "ünïcode"]) == [*values.values(), None, values["small"], None]
    # A value of its own, which nobody else holds or changes.
    assert type(reader.mget(["large"])[0]) is bytes


def test_a_connection_that_the_server_closed_is_opened_again(client: Any) -> None:
    reader = Reader(client, redis.exceptions)
    client.set("k", b"1")
    for _ in range(3):
        assert reader.mget(["k"]) == [b"1"]
        for other in client.client_list():
            client.client_kill_filter(_id=other["id"], skipme=True)


def test_a_refusal_leaves_a_connection_that_works(client: Any) -> None:
    reader = Reader(client, redis.exceptions)
    client.set("k", b"1")
    client.execute_command("ACL", "SETUSER", "poor", "on", ">word", "~k", "+mget", "+client", "+hello")
    poor = redis.Redis(
        host=client.connection_pool.connection_kwargs["host"],
        port=client.connection_pool.connection_kwargs["port"],
        username="poor",
        password="word",
        protocol=2,
    )
    reader = Reader(poor, redis.exceptions)
    for _ in range(2):
        with pytest.raises(redis.exceptions.ResponseError, match=r"(?i)noperm"):
            reader.mget(["k", "other"])
        assert reader.mget(["k"]) == [b"1"]
    assert poor.connection_pool.get_connection() is not None
    poor.close()


def test_threads_read_their_own_values(client: Any) -> None:
    reader = Reader(client, redis.exceptions)
    client.mset({f"t{number}": b"%d" % number * 1000 for number in range(100)})
    wrong: list[int] = []

    def read(start: int) -> None:
        for step in range(100):
            number = (start * 31 + step) % 100
            if reader.mget([f"t{number}", "absent"]) != [b"%d" % number * 1000, None]:
                wrong.append(number)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_server_that_stops_in_the_middle_of_a_reply_is_lost_and_the_rest_is_no_later_reply() -> None:
    """The first question gets half a reply at once, and the rest before the next reply on that connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        asked = 0

        def answer(connection: socket.socket) -> None:
            nonlocal asked
            rest = b""
            with connection:
                while command := connection.recv(4096):
                    if b"MGET" not in command:
                        connection.sendall(b"+OK\r\n" * max(1, command.count(b"*")))
                        continue
                    asked += 1
                    if asked == 1:
                        connection.sendall(b"*1\r\n$19\r\nwr")
                        rest = b"*1\r\n$5\r\nwrong\r\n\r\n"
                    else:
                        connection.sendall(rest + b"*1\r\n$5\r\nright\r\n")

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        store = RedisStore([{"host": "127.0.0.1", "port": listener.getsockname()[1]}], timeout=0.3)
        (node,) = store.stores
        assert node.get("k") is None
        assert node.lost  # type: ignore[attr-defined]
        node._again = 0.0  # type: ignore[attr-defined]
        assert node.get("k") == b"right"
        store.shutdown()
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(10)
