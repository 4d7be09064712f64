"""The verbs of a group, on arrays.

Every verb checks its arguments before anything is sent, works in place where that has a meaning and the array is
writable and contiguous, writes to `out=` otherwise, and returns the array that holds the result. With `async_op=True`
it returns a `Handle` instead; until that is done, nobody may touch the arrays.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, TypeVar, overload

from bagua import engine
from bagua.arrays import Array, Memory, empty_like, memory_of

__all__ = ["Handle", "Verbs"]

T = TypeVar("T")
Op = str | int


class Handle(Generic[T]):
    """The outcome of an asynchronous verb, now or later."""

    def __init__(self, raw: engine.Handle, result: T, keep: object) -> None:
        self._raw = raw
        self._result = result
        self._keep = keep

    def wait(self, timeout: float | None = None) -> T:
        """Waits until the verb is done, and returns its result.

        `timeout` is in seconds; None waits until the verb's own deadline. BaguaTimeoutError leaves the verb running.
        """
        self._raw.wait(timeout)
        return self._result

    def then(self, callback: Callable[[Exception | None], object]) -> None:
        """Calls `callback(error)` when the verb is done, exactly once: `error` is None, or the exception that `wait`
        raises.

        When the verb is done already, the call happens here. Otherwise it happens on the thread "bagua-callbacks",
        which calls all callbacks of the process one after another: a callback may block and start verbs, and only
        other callbacks wait for it. The arrays are kept until the verb is done. An exception of a callback goes to
        `sys.unraisablehook`; only one that is no Exception (KeyboardInterrupt, SystemExit) is raised here, when the
        call happens here.
        """
        self._raw.then(callback)

    def is_completed(self) -> bool:
        """True when the verb is done, well or not."""
        return self._raw.is_completed()


def op_code(op: Op) -> int:
    """The number of a reduce operation, by name or number. ValueError names the ones that exist."""
    if type(op) is str and (known := engine.OPS.get(op)) is not None:
        return known
    code = engine.OPS.get(op.lower(), -1) if isinstance(op, str) else int(op)
    if code not in engine.OPS.values():
        raise ValueError(f"op={op!r} is none of {', '.join(engine.OPS)}")
    return code


def _same(memory: Memory, out: Memory, shape: tuple[int, ...]) -> Memory:
    """`out`, if it can hold a result of this shape and of the type of `memory`."""
    if out.dtype != memory.dtype:
        raise TypeError(f"out has elements of type {out.dtype_name}, the array has {memory.dtype_name}")
    if out.shape != shape:
        raise ValueError(f"out has shape {out.shape}, the result has {shape}")
    return out.to_write("out")


def _here(memory: Memory) -> Memory:
    return memory.to_write("the array")


class Verbs:
    """Base of `Group`: what its members do together."""

    def __init__(self, communicator: engine.Communicator) -> None:
        self._communicator = communicator

    @property
    def communicator(self) -> engine.Communicator:
        """The same verbs by address, for callers that keep memory alive themselves."""
        return self._communicator

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self._communicator.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._communicator.size

    # --- every rank combines ------------------------------------------------------------------------------------------

    @overload
    def all_reduce(
        self,
        x: Array,
        op: Op = "sum",
        *,
        out: Array | None = None,
        async_op: Literal[False] = False,
        timeout: float | None = None,
    ) -> Any: ...
    @overload
    def all_reduce(
        self,
        x: Array,
        op: Op = "sum",
        *,
        out: Array | None = None,
        async_op: Literal[True],
        timeout: float | None = None,
    ) -> Handle[Any]: ...
    def all_reduce(
        self,
        x: Array,
        op: Op = "sum",
        *,
        out: Array | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Combines all ranks' arrays, element by element in rank order; every rank gets the result.

        `op` is sum, avg, min, max, product, band, bor, bxor or its number. `timeout` is in seconds.
        """
        code = op_code(op)
        if out is None and (found := engine.read_array(x)) is not None and found[4]:
            # The same as below without the objects, which cost several times the rest of a small call.
            address, count, dtype, shape, _ = found
            if not async_op:
                self._communicator.run(
                    engine.ALL_REDUCE, None, address, count, dtype, code, shape=shape, timeout=timeout
                )
                return x
            # The operation keeps the array, because the caller may drop the handle.
            done = self._communicator.run(
                engine.ALL_REDUCE,
                None,
                address,
                count,
                dtype,
                code,
                shape=shape,
                timeout=timeout,
                async_op=True,
                keep=x,
            )
            return _outcome(done, x, x)
        src, dst, result = self._pair(x, out)
        return self._run(engine.ALL_REDUCE, src, dst, result, code, shape=dst.shape, async_op=async_op, timeout=timeout)

    @overload
    def reduce(
        self,
        x: Array,
        dst: int = 0,
        op: Op = "sum",
        *,
        out: Array | None = None,
        async_op: Literal[False] = False,
        timeout: float | None = None,
    ) -> Any: ...
    @overload
    def reduce(
        self,
        x: Array,
        dst: int = 0,
        op: Op = "sum",
        *,
        out: Array | None = None,
        async_op: Literal[True],
        timeout: float | None = None,
    ) -> Handle[Any]: ...
    def reduce(
        self,
        x: Array,
        dst: int = 0,
        op: Op = "sum",
        *,
        out: Array | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """As `all_reduce`, but only rank `dst` gets the result; the other ranks' arrays stay as they are, and
        they get None.
        """
        code, root = op_code(op), self._rank(dst, "dst")
        if self.rank == root:
            src, target, result = self._pair(x, out)
        else:
            src, target, result = memory_of(x).to_read(), None, None
        held = src if target is None else target
        assert held is not None
        return self._run(
            engine.REDUCE, src, target, result, code, root, shape=held.shape, async_op=async_op, timeout=timeout
        )

    @overload
    def reduce_scatter(
        self,
        x: Array,
        op: Op = "sum",
        *,
        out: Array | None = None,
        async_op: Literal[False] = False,
        timeout: float | None = None,
    ) -> Any: ...
    @overload
    def reduce_scatter(
        self,
        x: Array,
        op: Op = "sum",
        *,
        out: Array | None = None,
        async_op: Literal[True],
        timeout: float | None = None,
    ) -> Handle[Any]: ...
    def reduce_scatter(
        self,
        x: Array,
        op: Op = "sum",
        *,
        out: Array | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Rank r gets the combination of all ranks' r-th part of `x`, whose first dimension is divided among the ranks.

        The result is a new array or `out`. `out` may be this rank's part of `x` itself.
        """
        code = op_code(op)
        src = memory_of(x).to_read()
        shape = self._part(src, "reduce_scatter")
        dst, result = _target(src, out, shape)
        inside = dst.count > 0 and dst.address == src.address + self.rank * dst.array.nbytes
        given, target = (None, src) if inside else (src, dst)
        return self._run(
            engine.REDUCE_SCATTER, given, target, result, code, count=dst.count, async_op=async_op, timeout=timeout
        )

    # --- from and to one rank -----------------------------------------------------------------------------------------

    @overload
    def broadcast(
        self,
        x: Array,
        src: int = 0,
        *,
        out: Array | None = None,
        async_op: Literal[False] = False,
        timeout: float | None = None,
    ) -> Any: ...
    @overload
    def broadcast(
        self, x: Array, src: int = 0, *, out: Array | None = None, async_op: Literal[True], timeout: float | None = None
    ) -> Handle[Any]: ...
    def broadcast(
        self,
        x: Array,
        src: int = 0,
        *,
        out: Array | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Every rank gets rank `src`'s array."""
        root = self._rank(src, "src")
        source, target, result = self._pair(x, out)
        if source is not None and self.rank == root:
            target.array[...] = source.array.view(target.array.dtype)
        return self._run(
            engine.BROADCAST, None, target, result, root=root, shape=target.shape, async_op=async_op, timeout=timeout
        )

    @overload
    def gather(
        self,
        x: Array,
        dst: int = 0,
        *,
        out: Array | None = None,
        async_op: Literal[False] = False,
        timeout: float | None = None,
    ) -> Any: ...
    @overload
    def gather(
        self, x: Array, dst: int = 0, *, out: Array | None = None, async_op: Literal[True], timeout: float | None = None
    ) -> Handle[Any]: ...
    def gather(
        self,
        x: Array,
        dst: int = 0,
        *,
        out: Array | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Rank `dst` gets all ranks' arrays, stacked along a new first dimension; the others get None, and
        their `out` is not used.
        """
        root = self._rank(dst, "dst")
        src = memory_of(x).to_read()
        target: Memory | None = None
        result: Any = None
        if self.rank == root:
            target, result = _target(src, out, (self.size, *src.shape))
        inside = target is not None and self._is_own_part(src, target)
        return self._run(
            engine.GATHER,
            None if inside else src,
            target,
            result,
            root=root,
            count=src.count,
            async_op=async_op,
            timeout=timeout,
        )

    @overload
    def scatter(
        self,
        x: Array | None = None,
        src: int = 0,
        *,
        out: Array | None = None,
        async_op: Literal[False] = False,
        timeout: float | None = None,
    ) -> Any: ...
    @overload
    def scatter(
        self,
        x: Array | None = None,
        src: int = 0,
        *,
        out: Array | None = None,
        async_op: Literal[True],
        timeout: float | None = None,
    ) -> Handle[Any]: ...
    def scatter(
        self,
        x: Array | None = None,
        src: int = 0,
        *,
        out: Array | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Rank r gets the r-th row of rank `src`'s `x`, whose first dimension is the number of ranks.

        The other ranks give no `x`, and an `out` of the shape of a row; on `src` the result is a new array without it.
        """
        root = self._rank(src, "src")
        source: Memory | None = None
        if self.rank == root:
            if x is None:
                raise ValueError(f"scatter: rank {root} is the source and needs an array")
            source = memory_of(x).to_read()
            if not source.shape or source.shape[0] != self.size:
                raise ValueError(
                    f"scatter: the first dimension of shape {source.shape} is not the number of ranks, {self.size}"
                )
            target, result = _target(source, out, source.shape[1:])
        elif out is None:
            raise ValueError(f"scatter: rank {self.rank} is not the source and needs out=")
        else:
            target, result = memory_of(out, "out").to_write("out"), out
        count, dtype = target.count, target.dtype
        if source is None:
            source = Memory(target.array[:0], dtype, None)  # not read on this rank
        elif count > 0 and target.address == source.address + self.rank * target.array.nbytes:
            # In place would mean that every rank has room for all rows; the own row is in place already.
            target = Memory(target.array.copy(), dtype, target.owner)
        return self._run(
            engine.SCATTER, source, target, result, root=root, count=count, async_op=async_op, timeout=timeout
        )

    # --- every rank to every rank -------------------------------------------------------------------------------------

    @overload
    def all_gather(
        self, x: Array, *, out: Array | None = None, async_op: Literal[False] = False, timeout: float | None = None
    ) -> Any: ...
    @overload
    def all_gather(
        self, x: Array, *, out: Array | None = None, async_op: Literal[True], timeout: float | None = None
    ) -> Handle[Any]: ...
    def all_gather(
        self, x: Array, *, out: Array | None = None, async_op: bool = False, timeout: float | None = None
    ) -> Any:
        """Every rank gets all ranks' arrays, stacked along a new first dimension, in a new array or in `out`.

        `x` may be this rank's part of `out` itself.
        """
        src = memory_of(x).to_read()
        dst, result = _target(src, out, (self.size, *src.shape))
        given = None if self._is_own_part(src, dst) else src
        return self._run(engine.ALL_GATHER, given, dst, result, count=src.count, async_op=async_op, timeout=timeout)

    @overload
    def all_to_all(
        self, x: Array, *, out: Array | None = None, async_op: Literal[False] = False, timeout: float | None = None
    ) -> Any: ...
    @overload
    def all_to_all(
        self, x: Array, *, out: Array | None = None, async_op: Literal[True], timeout: float | None = None
    ) -> Handle[Any]: ...
    def all_to_all(
        self, x: Array, *, out: Array | None = None, async_op: bool = False, timeout: float | None = None
    ) -> Any:
        """Rank r gets the r-th part of every rank's array, in rank order; the first dimension is divided among
        the ranks.
        """
        src, dst, result = self._pair(x, out)
        self._part(dst, "all_to_all")
        count = dst.count // self.size
        return self._run(engine.ALL_TO_ALL, src, dst, result, count=count, async_op=async_op, timeout=timeout)

    @overload
    def all_to_all_v(
        self,
        x: Array,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        *,
        send_displs: Sequence[int] | None = None,
        recv_displs: Sequence[int] | None = None,
        out: Array | None = None,
        async_op: Literal[False] = False,
        timeout: float | None = None,
    ) -> Any: ...
    @overload
    def all_to_all_v(
        self,
        x: Array,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        *,
        send_displs: Sequence[int] | None = None,
        recv_displs: Sequence[int] | None = None,
        out: Array | None = None,
        async_op: Literal[True],
        timeout: float | None = None,
    ) -> Handle[Any]: ...
    def all_to_all_v(
        self,
        x: Array,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        *,
        send_displs: Sequence[int] | None = None,
        recv_displs: Sequence[int] | None = None,
        out: Array | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Rank r gets `send_counts[r]` elements of every rank's `x`, as MPI_Alltoallv.

        Counts and displacements are in elements of the flattened arrays, one per rank; without displacements the parts
        follow each other. `recv_counts[r]` must be what rank r sends to this rank. The result is `out`, or a new array
        of one dimension. Raises ValueError when a part is not within its array or two parts of the result overlap.
        """
        src = memory_of(x).to_read()
        sends, recvs = [int(n) for n in send_counts], [int(n) for n in recv_counts]
        for name, counts in (("send_counts", sends), ("recv_counts", recvs)):
            if len(counts) != self.size or min(counts, default=0) < 0:
                raise ValueError(f"{name}={counts} must be {self.size} numbers, none of them negative")
        send_at, recv_at = _displs(sends, send_displs, "send_displs"), _displs(recvs, recv_displs, "recv_displs")
        if out is None:
            out = empty_like(src, (max((at + n for at, n in zip(recv_at, recvs, strict=True)), default=0),))
        dst = memory_of(out, "out")
        dst = _same(src, dst, dst.shape)
        raw = self._communicator.all_to_all_v(
            src.address,
            src.count,
            dst.address,
            dst.count,
            dst.dtype,
            sends,
            send_at,
            recvs,
            recv_at,
            timeout=timeout,
            async_op=async_op,
            keep=(src, dst) if async_op else None,
        )
        return _outcome(raw, out, (src, dst))

    @overload
    def exchange(
        self,
        sends: Sequence[tuple[int, Array]],
        recvs: Sequence[tuple[int, Array]],
        *,
        async_op: Literal[False] = False,
        timeout: float | None = None,
    ) -> list[Any]: ...
    @overload
    def exchange(
        self,
        sends: Sequence[tuple[int, Array]],
        recvs: Sequence[tuple[int, Array]],
        *,
        async_op: Literal[True],
        timeout: float | None = None,
    ) -> Handle[list[Any]]: ...
    def exchange(
        self,
        sends: Sequence[tuple[int, Array]],
        recvs: Sequence[tuple[int, Array]],
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Many messages at once, as a group of ncclSend and ncclRecv: `(peer, array)` for each.

        All arrays have one element type. Messages to one peer arrive in the order given; the peer may take one with
        `recv`, too. Returns the arrays of `recvs`, which are filled in place. Only the ranks named take part.
        """
        given = [(self._peer(peer, "peer"), memory_of(x).to_read()) for peer, x in sends]
        wanted = [(self._peer(peer, "peer"), _here(memory_of(x))) for peer, x in recvs]
        result = [x for _, x in recvs]
        memories = [memory for _, memory in (*given, *wanted)]
        if len(kinds := {memory.dtype_name for memory in memories}) > 1:
            raise TypeError(f"exchange: the arrays have different element types: {', '.join(sorted(kinds))}")
        raw = self._communicator.exchange(
            [(peer, memory.address, memory.count) for peer, memory in given],
            [(peer, memory.address, memory.count) for peer, memory in wanted],
            memories[0].dtype if memories else engine.DTYPES["uint8"],
            timeout=timeout,
            async_op=async_op,
            keep=memories if async_op else None,
        )
        return _outcome(raw, result, memories)

    # --- one rank to one rank -----------------------------------------------------------------------------------------

    @overload
    def send(self, x: Array, dst: int, *, async_op: Literal[False] = False, timeout: float | None = None) -> None: ...
    @overload
    def send(self, x: Array, dst: int, *, async_op: Literal[True], timeout: float | None = None) -> Handle[None]: ...
    def send(self, x: Array, dst: int, *, async_op: bool = False, timeout: float | None = None) -> Any:
        """Sends the array to rank `dst`."""
        to = self._peer(dst, "dst")
        src = memory_of(x).to_read()
        raw = self._communicator.send(
            src.address, src.count, src.dtype, to, timeout=timeout, async_op=async_op, keep=src if async_op else None
        )
        return _outcome(raw, None, src)

    @overload
    def recv(self, x: Array, src: int, *, async_op: Literal[False] = False, timeout: float | None = None) -> Any: ...
    @overload
    def recv(self, x: Array, src: int, *, async_op: Literal[True], timeout: float | None = None) -> Handle[Any]: ...
    def recv(self, x: Array, src: int, *, async_op: bool = False, timeout: float | None = None) -> Any:
        """Receives an array of the size and type of `x` from rank `src` into `x`."""
        sender = self._peer(src, "src")
        dst = _here(memory_of(x))
        raw = self._communicator.recv(
            dst.address,
            dst.count,
            dst.dtype,
            sender,
            timeout=timeout,
            async_op=async_op,
            keep=dst if async_op else None,
        )
        return _outcome(raw, x, dst)

    @overload
    def barrier(self, *, async_op: Literal[False] = False, timeout: float | None = None) -> None: ...
    @overload
    def barrier(self, *, async_op: Literal[True], timeout: float | None = None) -> Handle[None]: ...
    def barrier(self, *, async_op: bool = False, timeout: float | None = None) -> Any:
        """Returns when every rank has called it."""
        done = self._communicator.run(
            engine.BARRIER, None, None, 0, engine.DTYPES["uint8"], timeout=timeout, async_op=async_op
        )
        return _outcome(done, None, None)

    def _run(
        self,
        verb: int,
        src: Memory | None,
        dst: Memory | None,
        result: Any,
        op: int = 0,
        root: int = 0,
        *,
        async_op: bool,
        timeout: float | None,
        count: int | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> Any:
        """Runs a verb from `src` (None: in place) to `dst` and returns its result, or its handle.

        `count` is that of one rank's shard, for the verbs that have shards.
        """
        held = dst if dst is not None else src
        assert held is not None
        raw = self._communicator.run(
            verb,
            None if src is None else src.address,
            None if dst is None else dst.address,
            held.count if count is None else count,
            held.dtype,
            op,
            root,
            shape=shape,
            timeout=timeout,
            async_op=async_op,
            keep=(src, dst) if async_op else None,
        )
        return _outcome(raw, result, (src, dst))

    # --- checks -------------------------------------------------------------------------------------------------------

    def _rank(self, rank: int, name: str) -> int:
        if not 0 <= rank < self.size:
            raise ValueError(f"{name}={rank} is not a rank of a group of {self.size}")
        return int(rank)

    def _peer(self, rank: int, name: str) -> int:
        if self._rank(rank, name) == self.rank:
            raise ValueError(f"{name}={rank} is this rank itself")
        return int(rank)

    def _pair(self, x: Any, out: Any) -> tuple[Memory | None, Memory, Any]:
        """Source (None in place), destination, and what to return, of a verb whose result has the shape of `x`."""
        memory = memory_of(x)
        if out is None or out is x:
            return None, _here(memory), x
        target = _same(memory, memory_of(out, "out"), memory.shape)
        source = memory.to_read()
        return (None if source.address == target.address else source), target, out

    def _part(self, memory: Memory, verb: str) -> tuple[int, ...]:
        """The shape of one rank's part of `memory`."""
        if not memory.shape or memory.shape[0] % self.size:
            raise ValueError(
                f"{verb}: the first dimension of shape {memory.shape} cannot be divided among {self.size} ranks"
            )
        return (memory.shape[0] // self.size, *memory.shape[1:])

    def _is_own_part(self, part: Memory, whole: Memory) -> bool:
        return part.count > 0 and part.address == whole.address + self.rank * part.array.nbytes


def _target(memory: Memory, out: Any, shape: tuple[int, ...]) -> tuple[Memory, Any]:
    """Destination and what to return, of a verb whose result has another shape."""
    if out is None:
        out = empty_like(memory, shape)
    return _same(memory, memory_of(out, "out"), shape), out


def _outcome(raw: engine.Handle | None, result: Any, keep: object) -> Any:
    return result if raw is None else Handle(raw, result, keep)


def _displs(counts: list[int], displs: Sequence[int] | None, name: str) -> list[int]:
    """Displacements of parts of these counts: those given, or one part after the other."""
    if displs is None:
        return [0, *itertools.accumulate(counts)][: len(counts)]
    found = [int(n) for n in displs]
    if len(found) != len(counts) or min(found, default=0) < 0:
        raise ValueError(f"{name}={found} must be {len(counts)} numbers, none of them negative")
    return found
