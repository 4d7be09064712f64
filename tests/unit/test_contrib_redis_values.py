"""Values read from Redis: however the reply is cut, whatever goes wrong in the middle of it, whatever it announces."""

from __future__ import annotations

import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="torch is not installed: make setup")
pytest.importorskip("hiredis", reason="the package hiredis is not installed: make setup")
redis = pytest.importorskip("redis", reason="the package redis is not installed: make setup")

from bagua.torch_api.contrib.utils import redis_values  # noqa: E402
from bagua.torch_api.contrib.utils.redis_server import RedisServer  # noqa: E402
from bagua.torch_api.contrib.utils.redis_store import RedisNode, RedisStore  # noqa: E402
from tests.waits import on_threads  # noqa: E402

MIB = 1 << 20


class Pieces:
    """A connection on which bytes arrive in pieces of these sizes in turn, and which then is closed."""

    def __init__(self, data: bytes, sizes: list[int]) -> None:
        self.data, self.sizes, self.turn = memoryview(data), sizes, 0

    def recv_into(self, place: bytearray) -> int:
        piece = self.data[: min(len(place), self.sizes[self.turn % len(self.sizes)])]
        place[: len(piece)] = piece
        self.data, self.turn = self.data[len(piece) :], self.turn + 1
        return len(piece)


def bounded(connection: Any, room: int) -> redis_values.BoundedParser:
    parser = redis_values.BoundedParser(socket_read_size=room)
    encoder = SimpleNamespace(encoding="utf-8", encoding_errors="strict", decode_responses=False)
    parser.on_connect(SimpleNamespace(_sock=connection, socket_timeout=1.0, encoder=encoder))
    return parser


def read(connection: Any, keys: int, room: int) -> list[bytes | None]:
    """The reply to MGET of so many keys, read as redis-py's connection does."""
    parser = bounded(connection, room)

    def read_response() -> Any:
        response = parser.read_response()
        if isinstance(response, redis.exceptions.ResponseError):
            raise response
        return response

    known = SimpleNamespace(send_command=lambda *_: None, read_response=read_response, disconnect=lambda: None)
    pool = SimpleNamespace(get_connection=lambda: known, release=lambda _: None)
    return redis_values._mget(pool, ["key"] * keys)


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
    connection = Pieces(reply(values), sizes)
    assert read(connection, len(values), room) == values
    assert len(connection.data) == 0


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (b"", redis.exceptions.ConnectionError),
        (b"*2\r\n$3\r\nab", redis.exceptions.ConnectionError),
        (b"*2\r\n$536870913\r\n", redis.exceptions.InvalidResponse),
        (b"*2\r\n$4611686018427387904\r\n", redis.exceptions.InvalidResponse),
        (b"*2\r\n$536870912\r\n", redis.exceptions.ConnectionError),
        (b"*2\r\n", redis.exceptions.ConnectionError),
        (b"*1\r\n$1\r\na\r\n", redis.exceptions.InvalidResponse),
        (b"*-1\r\n", redis.exceptions.InvalidResponse),
        (b"*4194305\r\n", redis.exceptions.InvalidResponse),
        (b"*2\r\n*4194303\r\n", redis.exceptions.InvalidResponse),
        (b"%1\r\n$1\r\na\r\n$1\r\na\r\n", redis.exceptions.InvalidResponse),
        (b"+a\nb\r\n", redis.exceptions.InvalidResponse),
        (b":5\r\n", redis.exceptions.InvalidResponse),
        (b"*2\r\n$1\r\na\r\n:5\r\n", redis.exceptions.InvalidResponse),
        (b"*2\r\n$1\r\na\r\n-ERR\r\n", redis.exceptions.InvalidResponse),
        (b"*2\r\n$1\r\na\r\n*1\r\n$1\r\na\r\n", redis.exceptions.InvalidResponse),
        (b"*1\r\n" * 100 + b"$1\r\na\r\n", redis.exceptions.InvalidResponse),
        (b"*2\r\n$x\r\n", redis.exceptions.InvalidResponse),
        (b"*2\r\n$-2\r\n", redis.exceptions.InvalidResponse),
        (b"+" + b"x" * (1 << 17), redis.exceptions.InvalidResponse),
        (b"x" * 100, redis.exceptions.InvalidResponse),
        (b"-OOM full\r\n", redis.exceptions.ResponseError),
        (b"-LOADING soon\r\n", redis.exceptions.BusyLoadingError),
    ],
)
def test_what_is_no_reply_of_two_values_is_an_error(said: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        read(Pieces(said, [7]), 2, 32)


def test_the_limits_are_for_each_value_and_for_each_array(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_values, "_STRING", 3000)
    monkeypatch.setattr(redis_values, "_ELEMENTS", 3)
    parser = bounded(Pieces(reply([bytes(3000)] * 3) * 3, [1000]), 256)
    for _ in range(3):
        assert parser.read_response() == [bytes(3000)] * 3
    with pytest.raises(redis.exceptions.InvalidResponse, match="beyond 3"):
        read(Pieces(reply([b""] * 4), [4096]), 4, 256)
    with pytest.raises(redis.exceptions.InvalidResponse, match="beyond 3000"):
        read(Pieces(reply([b"", bytes(3001)]), [4096]), 2, 256)


@pytest.fixture(scope="module")
def node() -> Iterator[RedisNode]:
    """A store on a server that starts for these tests."""
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed: tools/system_packages test")
    server = RedisServer("127.0.0.1", 64 * MIB, password="secret")
    found = RedisNode("a", {"host": server.host, "port": server.port, "password": "secret", "socket_timeout": 5})
    yield found
    found.shutdown()
    server.stop()


def test_values_of_every_size_come_back_in_order(node: RedisNode) -> None:
    values = {"empty": b"", "small": b"\r\n$1\r\n", "large": bytes(range(256)) * (3 * MIB // 256), "last": b"x"}
    node.mset(values)
    for _ in range(2):
        assert node.mget([*values, "absent", "small", "ünïcode"]) == [*values.values(), None, values["small"], None]
    # A value of its own, which no other code holds or changes.
    assert type(node.mget(["large"])[0]) is bytes


def test_a_connection_that_the_server_closed_is_opened_again(node: RedisNode) -> None:
    node.set("k", b"1")
    for _ in range(3):
        assert node.mget(["k"]) == [b"1"]
        for other in node.client().client_list():
            node.client().client_kill_filter(_id=other["id"], skipme=True)
    assert not node.lost


def test_a_refusal_leaves_a_connection_that_works(node: RedisNode) -> None:
    node.set("k", b"1")
    node.client().execute_command("ACL", "SETUSER", "poor", "on", ">word", "~k", "+mget", "+client", "+hello")
    poor = RedisNode("poor", {**node._options, "username": "poor", "password": "word"})
    for _ in range(2):
        with pytest.raises(redis.exceptions.ResponseError, match=r"(?i)no permission"):
            poor._read(["k", "other"])
        assert poor.mget(["k"]) == [b"1"]
    assert poor.client().connection_pool.get_connection() is not None
    poor.shutdown()


def test_values_are_bytes_whatever_the_options_say(node: RedisNode) -> None:
    node.set("k", b"\xff")
    text = RedisNode("text", {**node._options, "decode_responses": True})
    assert text.mget(["k"]) == [b"\xff"]
    text.shutdown()


def test_threads_read_their_own_values(node: RedisNode) -> None:
    node.mset({f"t{number}": b"%d" % number * 1000 for number in range(100)})
    wrong: list[int] = []

    def look(start: int) -> None:
        for step in range(100):
            number = (start * 31 + step) % 100
            if node.mget([f"t{number}", "absent"]) != [b"%d" % number * 1000, None]:
                wrong.append(number)

    on_threads(look, range(4))
    assert wrong == []


@contextmanager
def served(answer: Callable[[int, int], bytes], timeout: float) -> Iterator[Any]:
    """A store on a server that replies to MGET by ``answer(number of the MGET, its number on this connection)``."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        numbers = count()

        def talk(connection: socket.socket) -> None:
            mine = count()
            # The store may have closed it.
            with connection, suppress(ConnectionError):
                while command := connection.recv(4096):
                    others = b"+OK\r\n" * max(1, command.count(b"*"))
                    connection.sendall(answer(next(numbers), next(mine)) if b"MGET" in command else others)

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=talk, args=(connection,), daemon=True).start()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        store = RedisStore([{"host": "127.0.0.1", "port": listener.getsockname()[1]}], timeout=timeout)
        yield store.stores[0]
        store.shutdown()
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(10)


def test_a_server_that_stops_in_the_middle_of_a_reply_is_lost_and_the_rest_is_no_later_reply() -> None:
    """The first question gets half a reply at once, and the rest before the next reply on that connection."""

    def answer(number: int, of_connection: int) -> bytes:
        if number == 0:
            return b"*1\r\n$19\r\nwr"
        rest = b"*1\r\n$5\r\nwrong\r\n\r\n" if of_connection else b""
        return rest + b"*1\r\n$5\r\nright\r\n"

    with served(answer, timeout=2.0) as node:
        assert node.get("k") is None
        assert node.lost
        node._again = 0.0
        assert node.get("k") == b"right"


@pytest.mark.parametrize(
    "announced", [b"*1000000000\r\n", b"*4294967295\r\n", b"*1\r\n" * 1000, b"*1\r\n$1000000000\r\n", b"-" * 100000]
)
def test_a_server_that_announces_more_than_the_limits_is_lost(announced: bytes) -> None:
    # hiredis would wait for the rest, until the timeout, or run out of memory.
    with served(lambda *_: announced, timeout=60.0) as node:
        with pytest.raises(redis.exceptions.InvalidResponse):
            node._read(["k"])
        assert node.get("k") is None
        assert node.lost
