"""MGET by redis-py and hiredis, with limits to what a Redis server can make its client hold.

hiredis reserves memory for as many elements as an array announces, nests a thousand arrays, and collects strings and
lines of any length. So what a reply announces is checked before hiredis gets it, in version 2 of the protocol:
https://redis.io/docs/latest/develop/reference/protocol-spec/
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis.connection import DefaultParser
from redis.exceptions import ConnectionError, InvalidResponse

__all__ = ["BoundedParser", "mget"]

# Bytes of a string: the most that Redis stores in one, https://redis.io/docs/latest/develop/data-types/strings/
_STRING = 512 << 20
_ELEMENTS = 1 << 22
# Bytes of a line: a length, a number, a status or an error.
_LINE = 1 << 16
_DOLLAR = ord("$")
# For mypy the type depends on whether redis-py is installed.
_Parser: Any = DefaultParser


class BoundedParser(_Parser):  # type: ignore[misc]
    """redis-py's parser by hiredis. Raises InvalidResponse for a reply beyond the limits."""

    _reader: Any

    def on_connect(self, connection: Any, **kwargs: Any) -> None:
        """See redis-py."""
        super().on_connect(connection, **kwargs)
        self._reader = _BoundedReader(self._reader)


class _BoundedReader:
    """A reader of hiredis with the limits. Arrays hold only strings: no command of the cache returns others."""

    def __init__(self, reader: Any) -> None:
        self.gets, self.has_data, self._feed = reader.gets, reader.has_data, reader.feed
        # Bytes of the present string that are still to come.
        self._rest = 0
        # The beginning of a line whose end is still to come.
        self._line = b""
        # Strings of the present array that are still to come.
        self._strings = 0

    def feed(self, buffer: bytearray, begin: int, count: int) -> None:
        """See hiredis."""
        at, end = begin + self._rest, begin + count
        while at < end:
            stop = buffer.find(b"\n", at, end) + 1
            # Almost every line is the whole of this kind.
            if self._strings and stop and buffer[at] == _DOLLAR and not self._line:
                self._strings -= 1
                at = stop + _bytes_of_string(buffer[at:stop])
                continue
            self._line += buffer[at : stop or end]
            if len(self._line) > _LINE:
                raise InvalidResponse("a line without an end")
            at = stop + self._bytes_after(self._line) if stop else end
            if stop:
                self._line = b""
        self._rest = at - end
        self._feed(buffer, begin, count)

    def _bytes_after(self, line: bytes) -> int:
        """Of the string that this line announces."""
        kind = line[:1]
        if kind not in (b"$" if self._strings else b"$*:+-") or line[-2:] != b"\r\n":
            raise InvalidResponse(f"{line[:40]!r} is not an answer of the protocol")
        if kind == b"*":
            self._strings = max(0, _length(line, _ELEMENTS))
            return 0
        self._strings -= self._strings > 0
        return _bytes_of_string(line) if kind == b"$" else 0


def _bytes_of_string(line: bytes | bytearray) -> int:
    """With the end of its line; 0 for a null."""
    length = _length(line, _STRING)
    return length + 2 if length >= 0 else 0


def _length(line: bytes | bytearray, most: int) -> int:
    """-1 for a null."""
    try:
        length = int(line[1:])
    except ValueError as strange:
        raise InvalidResponse(f"{bytes(line[:40])!r} has no length") from strange
    if not -1 <= length <= most:
        raise InvalidResponse(f"{bytes(line[:40])!r} has a length beyond {most}")
    return length


def mget(client: Any, keys: Sequence[str]) -> list[bytes | None]:
    """The values in the order of ``keys``. redis-py's exceptions.

    On a connection of the client's pool: for one value, ``client.mget`` takes a quarter longer.
    """
    try:
        return _mget(client.connection_pool, keys)
    except ConnectionError:
        # Once more for a connection that the server had closed meanwhile, never for a server that hangs.
        return _mget(client.connection_pool, keys)


def _mget(pool: Any, keys: Sequence[str]) -> list[bytes | None]:
    connection = pool.get_connection()
    try:
        connection.send_command("MGET", *keys)
        values: list[bytes | None] = connection.read_response()
        if type(values) is list and len(values) == len(keys):
            return values
        raise InvalidResponse(f"not an array of {len(keys)} values")
    except BaseException:
        # What is left of the reply must not be taken for the next one.
        connection.disconnect()
        raise
    finally:
        pool.release(connection)
