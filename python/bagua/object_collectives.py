"""The verbs of a group on picklable objects. Each consists of two verbs on arrays: one for the sizes, one for the
bytes.

A rank that cannot pickle its object still takes part, and sends the reason instead, so that no other rank waits for it.
"""

from __future__ import annotations

import io
import pickle
import socket
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from bagua.collectives import Collectives
from bagua.errors import PeerRaisedError
from bagua.verbs import starts

__all__ = ["ObjectCollectives"]

T = TypeVar("T")
Bytes = np.ndarray[Any, np.dtype[np.uint8]]

#: Pickle protocol, which every supported Python reads.
_PROTOCOL = 5

#: Objects of at most this many bytes are padded to the length of the longest.
_SHORT = 64 << 10


class _Failure(NamedTuple):
    """The message that replaces an object that cannot be pickled."""

    host: str
    """Name of the rank's host."""
    kind: str
    """Class name of the exception."""
    message: str
    """Text of the exception."""


class ObjectCollectives(Collectives):
    """Verbs on Python objects, in host memory and synchronous: the base of `Group`."""

    def all_gather_object(self, obj: T, *, timeout: float | None = None) -> list[T]:
        """Gathers all ranks' objects on every rank. Returns them as a list, in rank order.

        `obj`: anything that can be pickled, including None. Size and type may differ between ranks. The objects in the
        list are copies, including this rank's own.

        `timeout`: seconds for the sizes, and again for the bytes, until BaguaTimeoutError; None uses the group's.

        Unpickling runs code that the sender chooses: as with torch.distributed, a rank trusts every rank of the job.
        For numbers in arrays, `all_gather` is faster.

        Every rank of the group must call it, in the same order as the group's other verbs.

        On the rank whose object cannot be pickled, raises what pickle raises; the ranks that would have received it
        raise PeerRaisedError. An error in unpickling is raised on the receiving rank. The group stays usable in these
        cases. It does not after MismatchError, BaguaTimeoutError, PeerLostError and AbortedError, which are as in
        `all_reduce`.
        """
        found = self._gathered(obj, None, timeout)
        assert found is not None, "every rank receives"
        return found

    def gather_object(self, obj: T, dst: int = 0, *, timeout: float | None = None) -> list[T] | None:
        """Gathers all ranks' objects on rank `dst`. Returns them there as a list, in rank order, and None on other
        ranks.

        `obj`, `timeout`, errors and trust are as in `all_gather_object`. Raises ValueError for a `dst` outside the
        group, before anything is sent.
        """
        return self._gathered(obj, self._rank(dst, "dst"), timeout)

    def broadcast_object(self, obj: Any, src: int = 0, *, timeout: float | None = None) -> Any:
        """Sends rank `src`'s object to every rank. Returns `obj` itself on `src`, and a copy on other ranks.

        Other ranks' `obj` is ignored. `timeout`, errors and trust are as in `all_gather_object`. Raises ValueError for
        a `src` outside the group, before anything is sent.
        """
        root = self._rank(src, "src")
        (data,), failure = _pickled([obj] if self.rank == root else [None])
        size = int(self.broadcast(np.array(len(data)), root, timeout=timeout))
        if self.rank != root:
            data = np.empty(size, np.uint8)
        self.broadcast(data, root, timeout=timeout)
        if failure is not None:
            raise failure
        return obj if self.rank == root else self._unpickled(data, root)

    def scatter_object(self, objs: Sequence[Any] | None = None, src: int = 0, *, timeout: float | None = None) -> Any:
        """Returns to rank r a copy of the r-th of rank `src`'s objects.

        `objs`: on `src`, one object for each rank (else ValueError, before anything is sent); ignored on other ranks.
        If one object cannot be pickled, no rank gets any. `timeout`, errors and trust are as in `all_gather_object`.
        Raises ValueError for a `src` outside the group.
        """
        root, ranks = self._rank(src, "src"), self.size
        parts: list[Bytes] = []
        failure: Exception | None = None
        table = np.zeros(ranks, np.int64)
        if self.rank == root:
            if objs is None or len(objs) != ranks:
                given = "no objects" if objs is None else f"{len(objs)} objects"
                raise ValueError(f"scatter_object: rank {root} is the source and has {given} for {ranks} ranks")
            parts, failure = _pickled(objs)
            table[:] = [len(part) for part in parts]
        sizes = self.broadcast(table, root, timeout=timeout).tolist()
        mine = sizes[self.rank]
        if _is_padded(sizes):
            rows = np.stack([_padded(part, max(sizes)) for part in parts]) if parts else None
            data = self.scatter(rows, root, out=np.empty(max(sizes), np.uint8), timeout=timeout)[:mine]
        else:
            whole = np.concatenate(parts) if parts else np.empty(0, np.uint8)
            sends = sizes if parts else [0] * ranks
            data = self.all_to_all_v(whole, sends, _only(root, mine, ranks), timeout=timeout)
        if failure is not None:
            raise failure
        return self._unpickled(data, root)

    def _gathered(self, obj: Any, dst: int | None, timeout: float | None) -> list[Any] | None:
        """Returns all ranks' objects on rank `dst`, or on every rank if `dst` is None. Returns None elsewhere."""
        ranks, receives = self.size, dst in (None, self.rank)
        (mine,), failure = _pickled([obj])
        sizes = self.all_gather(np.array(len(mine)), timeout=timeout).tolist()
        if _is_padded(sizes):
            row = _padded(mine, max(sizes))
            rows = self.all_gather(row, timeout=timeout) if dst is None else self.gather(row, dst, timeout=timeout)
            parts = [] if rows is None else [row[:size] for row, size in zip(rows, sizes, strict=True)]
        else:
            sends = [len(mine)] * ranks if dst is None else _only(dst, len(mine), ranks)
            recvs = sizes if receives else [0] * ranks
            # Send the same bytes to every rank.
            whole = self.all_to_all_v(mine, sends, recvs, send_displs=[0] * ranks, timeout=timeout)
            parts = np.split(whole, starts(recvs)[1:])
        if failure is not None:
            raise failure
        return [self._unpickled(part, rank) for rank, part in enumerate(parts)] if receives else None

    def _unpickled(self, data: Bytes, sender: int) -> Any:
        """Returns the object in another rank's bytes. Raises PeerRaisedError if that rank could not pickle it."""
        found = pickle.loads(data.data)
        if type(found) is not _Failure:
            return found
        rank = self._communicator.ranks[sender]
        raise PeerRaisedError(
            f"rank {rank} on {found.host} raised {found.kind}: {found.message}", rank=rank, **found._asdict()
        )


def _pickled(objs: Sequence[Any]) -> tuple[list[Bytes], Exception | None]:
    """Returns each object's bytes, and None. If pickling fails, returns a `_Failure` for each, and the exception."""
    try:
        return [_bytes(obj) for obj in objs], None
    except Exception as error:
        report = _bytes(_Failure(socket.gethostname(), type(error).__name__, str(error)))
        return [report] * len(objs), error


def _bytes(obj: Any) -> Bytes:
    stream = io.BytesIO()
    pickle.dump(obj, stream, _PROTOCOL)
    return np.frombuffer(stream.getbuffer(), np.uint8)


def _is_padded(sizes: Sequence[int]) -> bool:
    """Returns True if all ranks' bytes are padded to one length: if they are short, or padding at most doubles them.

    Padded data can use a verb that sends few messages between many ranks. Other data goes through all_to_all_v.
    """
    return max(sizes) <= _SHORT or len(sizes) * max(sizes) <= 2 * sum(sizes)


def _padded(data: Bytes, size: int) -> Bytes:
    row = np.zeros(size, np.uint8)
    row[: len(data)] = data
    return row


def _only(rank: int, count: int, ranks: int) -> list[int]:
    return [count if each == rank else 0 for each in range(ranks)]
