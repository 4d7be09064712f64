"""The verbs of a group on objects that can be pickled. Each is two verbs on arrays: the sizes, then the bytes.

A rank that cannot pickle its object takes part all the same: it sends why, so that no other waits for it.
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

#: Of pickle: every Python that the ranks may have reads it.
_PROTOCOL = 5

#: Objects of at most so many bytes are padded to the longest.
_SHORT = 64 << 10


class _Failure(NamedTuple):
    """Is sent in place of an object that cannot be pickled."""

    host: str
    """Name of the rank's host."""
    kind: str
    """Class of the exception."""
    message: str
    """Its text."""


class ObjectCollectives(Collectives):
    """Base of `Group`: its verbs on objects of Python, in host memory and synchronous."""

    def all_gather_object(self, obj: T, *, timeout: float | None = None) -> list[T]:
        """Every rank gets a list of all ranks' objects, in rank order.

        `obj`: anything that can be pickled, None included, of any size and type on each rank. The objects in the list
        are copies, this rank's too.

        `timeout`: seconds for the sizes, and again for the bytes, else BaguaTimeoutError; None: the group's.

        Unpickling runs what the sender has put in its object: as with torch.distributed, a rank trusts every rank of
        the job. For numbers in arrays `all_gather` is faster.

        Returns when every rank of the group has called it, in the same order as its other verbs.

        Raises what pickle raises, on the rank whose object cannot be pickled; the ranks that would have received it get
        PeerRaisedError. What unpickling raises is raised on the rank that received the object. The group can be used
        afterwards in both cases, and in no other: MismatchError, BaguaTimeoutError, PeerLostError and AbortedError are
        as in `all_reduce`.
        """
        found = self._gathered(obj, None, timeout)
        assert found is not None, "every rank receives"
        return found

    def gather_object(self, obj: T, dst: int = 0, *, timeout: float | None = None) -> list[T] | None:
        """Rank `dst` gets a list of all ranks' objects, in rank order; the others get None.

        `obj`, `timeout`, errors and what unpickling trusts are as in `all_gather_object`. ValueError for a `dst`
        outside the group, before anything is sent.
        """
        return self._gathered(obj, self._rank(dst, "dst"), timeout)

    def broadcast_object(self, obj: Any, src: int = 0, *, timeout: float | None = None) -> Any:
        """Every rank gets rank `src`'s object; on `src` that is `obj` itself, on the others a copy.

        The other ranks' `obj` is not used. `timeout`, errors and what unpickling trusts are as in `all_gather_object`.
        ValueError for a `src` outside the group, before anything is sent.
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
        """Rank r gets a copy of the r-th of rank `src`'s objects.

        `objs`: on `src` as many objects as the group has ranks (else ValueError, before anything is sent); not used on
        the others. Where one of them cannot be pickled, no rank gets any. `timeout`, errors and what unpickling trusts
        are as in `all_gather_object`. ValueError for a `src` outside the group, too.
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
        """All ranks' objects on rank `dst`, or with None on every rank; None on the others."""
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
            # The same bytes to every rank.
            whole = self.all_to_all_v(mine, sends, recvs, send_displs=[0] * ranks, timeout=timeout)
            parts = np.split(whole, starts(recvs)[1:])
        if failure is not None:
            raise failure
        return [self._unpickled(part, rank) for rank, part in enumerate(parts)] if receives else None

    def _unpickled(self, data: Bytes, sender: int) -> Any:
        """The object in the bytes of a rank. PeerRaisedError where that could not pickle it."""
        found = pickle.loads(data.data)
        if type(found) is not _Failure:
            return found
        rank = self._communicator.ranks[sender]
        raise PeerRaisedError(
            f"rank {rank} on {found.host} raised {found.kind}: {found.message}", rank=rank, **found._asdict()
        )


def _pickled(objs: Sequence[Any]) -> tuple[list[Bytes], Exception | None]:
    """The bytes of each object; where one cannot be pickled, those of a `_Failure` for each, and the exception."""
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
    """Whether the ranks' bytes are padded to the longest: where these are few, or at most doubled by that.

    Then a verb carries them that needs few messages between many ranks. Others travel by all_to_all_v, as they are.
    """
    return max(sizes) <= _SHORT or len(sizes) * max(sizes) <= 2 * sum(sizes)


def _padded(data: Bytes, size: int) -> Bytes:
    row = np.zeros(size, np.uint8)
    row[: len(data)] = data
    return row


def _only(rank: int, count: int, ranks: int) -> list[int]:
    """Counts for all ranks: none but for one rank."""
    return [count if each == rank else 0 for each in range(ranks)]
