"""Reads many values from a Redis server: redis-py connects, and the reply is taken from its socket.

redis-py's own reader (without hiredis) copies each value four times and its packer looks at each key's type: 64 values
of 4 KiB took 5.0 us each, as raw bytes, and take 2.6 us here (``benchmarks/cache.py``). Only the reply to MGET is read
here, in the second version of the protocol: https://redis.io/docs/latest/develop/reference/protocol-spec/
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

__all__ = ["Reader"]

# What a batch of small values needs at a time. A value that has no room in it is read into memory of its own.
_ROOM = 1 << 18

# Bytes of a value: the most that Redis stores in a string, https://redis.io/docs/latest/develop/data-types/strings/
_MOST = 512 << 20


class Reader:
    """MGET through a redis-py client. Threads may share it: each call has a connection and a buffer of its own."""

    def __init__(self, client: Any, errors: Any) -> None:
        self._pool = client.connection_pool
        self._errors = errors
        #: Buffers that no call is using.
        self._free: list[bytearray] = []

    def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        """The values in the order of ``keys``. redis-py's exceptions."""
        names = [key.encode() for key in keys]
        words = [b"*%d\r\n$4\r\nMGET\r\n" % (len(names) + 1), *[b"$%d\r\n%b\r\n" % (len(name), name) for name in names]]
        command = [b"".join(words)]
        try:
            return self._ask(command, len(names))
        except self._errors.ConnectionError:
            # Once more for a connection that the server had closed meanwhile, never for a server that hangs.
            return self._ask(command, len(names))

    def _ask(self, command: list[bytes], count: int) -> list[bytes | None]:
        connection = self._pool.get_connection()
        buffer = self._free.pop() if self._free else bytearray(_ROOM)
        whole = False
        try:
            connection.send_packed_command(command)
            values = _Reply(connection._sock, buffer, self._errors).values(count)
            whole = True
            return values
        except self._errors.ResponseError:
            # A refusal is a whole reply.
            whole = True
            raise
        except ValueError as strange:
            raise self._errors.InvalidResponse(f"not the protocol of Redis: {strange}") from strange
        except TimeoutError as late:
            raise self._errors.TimeoutError("timeout while reading values") from late
        except OSError as failure:
            raise self._errors.ConnectionError(f"{failure} while reading values") from failure
        finally:
            if not whole:
                # What is left of the reply must not be taken for the next one.
                connection.disconnect()
            self._pool.release(connection)
            self._free.append(buffer)


class _Reply:
    """One reply, as it comes in."""

    def __init__(self, connection: socket.socket, buffer: bytearray, errors: Any) -> None:
        self._socket = connection
        self._errors = errors
        self._buffer = buffer
        self._view = memoryview(buffer)
        # What is read and not yet looked at.
        self._begin = self._end = 0

    def values(self, count: int) -> list[bytes | None]:
        """An array of so many values."""
        kind, text = self._line()
        if kind == b"-":
            words = text.decode(errors="replace")
            # As redis-py has it: a server that is still starting counts as one that is away.
            raise (self._errors.BusyLoadingError if words.startswith("LOADING") else self._errors.ResponseError)(words)
        if kind != b"*" or int(text) != count:
            raise self._errors.InvalidResponse(f"{bytes(kind + text)!r} instead of {count} values")
        return [self._value() for _ in range(count)]

    def _value(self) -> bytes | None:
        kind, text = self._line()
        if kind != b"$":
            raise self._errors.InvalidResponse(f"{bytes(kind + text)!r} instead of a value")
        length = int(text)
        if length == -1:
            return None
        if not 0 <= length <= _MOST:
            raise self._errors.InvalidResponse(f"a value of {length} bytes; it must have from 0 to {_MOST}")
        begin, end = self._begin, self._begin + length
        if end + 2 <= self._end:
            self._begin = end + 2
            return bytes(self._view[begin:end])
        value = bytearray(length + 2)
        place = memoryview(value)
        have = self._end - begin
        place[:have] = self._view[begin : self._end]
        self._begin = self._end = 0
        while have < len(value):
            have += self._receive(place[have:])
        return bytes(place[:length])

    def _line(self) -> tuple[bytearray, bytearray]:
        """A line's first byte, and the rest of it."""
        buffer = self._buffer
        while (stop := buffer.find(b"\r\n", self._begin, self._end)) < 0:
            if self._end == len(buffer):
                rest = self._end - self._begin
                if rest == len(buffer):
                    raise self._errors.InvalidResponse("a line without an end")
                buffer[:rest] = buffer[self._begin : self._end]
                self._begin, self._end = 0, rest
            self._end += self._receive(self._view[self._end :])
        begin, self._begin = self._begin, stop + 2
        return buffer[begin : begin + 1], buffer[begin + 1 : stop]

    def _receive(self, place: memoryview) -> int:
        count = self._socket.recv_into(place)
        if not count:
            raise self._errors.ConnectionError("the server closed the connection")
        return count
