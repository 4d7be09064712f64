"""MGET through redis-py and hiredis, with limits on the memory that a Redis server can make its client use.

hiredis reserves memory for the number of elements that an array announces, nests a thousand arrays, and collects
strings and lines of any length. This module therefore checks each announced length before hiredis gets the bytes.
Replies are in version 2 of the protocol: https://redis.io/docs/latest/develop/reference/protocol-spec/
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis.connection import DefaultParser
from redis.exceptions import ConnectionError, InvalidResponse

__all__ = ["BoundedParser", "mget"]

# Longest string that Redis stores, in bytes: https://redis.io/docs/latest/develop/data-types/strings/
_STRING = 512 << 20
_ELEMENTS = 1 << 22
# Longest line (a length, number, status or error), in bytes.
_LINE = 1 << 16
_DOLLAR = ord("$")
# Any, because mypy may run without redis-py.
_Parser: Any = DefaultParser


class BoundedParser(_Parser):  # type: ignore[misc]
    """redis-py's hiredis parser, with limits. Raises InvalidResponse for a reply beyond them."""

    _reader: Any

    def on_connect(self, connection: Any, **kwargs: Any) -> None:
        """Called by redis-py."""
        super().on_connect(connection, **kwargs)
        self._reader = _BoundedReader(self._reader)


class _BoundedReader:
    """A hiredis reader with limits. Arrays may hold only strings, because the cache's commands return no other
    arrays.
    """

    def __init__(self, reader: Any) -> None:
        self.gets, self.has_data, self._feed = reader.gets, reader.has_data, reader.feed
        # Bytes of the current string that have not arrived yet.
        self._rest = 0
        # Start of a line whose end has not arrived yet.
        self._line = b""
        # Strings of the current array that have not arrived yet.
        self._strings = 0

    def feed(self, buffer: bytearray, begin: int, count: int) -> None:
        """Checks received bytes and passes them to hiredis. Raises InvalidResponse for a reply beyond the limits."""
        at, end = begin + self._rest, begin + count
        while at < end:
            stop = buffer.find(b"\n", at, end) + 1
            # Fast path: almost every line announces a string of the current array.
            if self._strings and stop and buffer[at] == _DOLLAR and not self._line:
                self._strings -= 1
                at = stop + _bytes_of_string(buffer[at:stop])
                continue
            self._line += buffer[at : stop or end]
            if len(self._line) > _LINE:
                raise InvalidResponse(f"a line of more than {_LINE} bytes")
            at = stop + self._bytes_after(self._line) if stop else end
            if stop:
                self._line = b""
        self._rest = at - end
        self._feed(buffer, begin, count)

    def _bytes_after(self, line: bytes) -> int:
        """Checks a line, and returns the number of bytes of the string that it announces."""
        kind = line[:1]
        if kind not in (b"$" if self._strings else b"$*:+-") or line[-2:] != b"\r\n":
            raise InvalidResponse(f"{line[:40]!r} is not an answer of the protocol")
        if kind == b"*":
            self._strings = max(0, _length(line, _ELEMENTS))
            return 0
        self._strings -= self._strings > 0
        return _bytes_of_string(line) if kind == b"$" else 0


def _bytes_of_string(line: bytes | bytearray) -> int:
    """Returns the bytes of a string with its line end; 0 for a null."""
    length = _length(line, _STRING)
    return length + 2 if length >= 0 else 0


def _length(line: bytes | bytearray, most: int) -> int:
    """Returns the length that a line announces; -1 for a null."""
    try:
        length = int(line[1:])
    except ValueError as strange:
        raise InvalidResponse(f"{bytes(line[:40])!r} has no length") from strange
    if not -1 <= length <= most:
        raise InvalidResponse(f"{bytes(line[:40])!r} has a length beyond {most}")
    return length


def mget(client: Any, keys: Sequence[str]) -> list[bytes | None]:
    """Returns the values in the order of ``keys``. Raises redis-py's errors.

    Uses a connection of the client's pool directly: for one value, ``client.mget`` takes a quarter longer.
    """
    try:
        return _mget(client.connection_pool, keys)
    except ConnectionError:
        # Retries once, because the server may have closed an idle connection. A server that hangs is not retried.
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
        # Otherwise the rest of this reply would be read as the next one.
        connection.disconnect()
        raise
    finally:
        pool.release(connection)
