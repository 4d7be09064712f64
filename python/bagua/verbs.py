"""The verbs of a group, on arrays.

Every verb checks its arguments before anything is sent, works in place where that has a meaning and the array is
writable and contiguous, writes to `out=` otherwise, and returns the array that holds the result. With `async_op=True`
it returns a `Handle` instead; until that is done, the arrays must not be touched.

Arrays may be on a CUDA device (docs/cuda.md). `stream` is a CUstream as an integer, by DLPack's numbers; None is the
legacy stream. The verb begins after the work that the stream has, and work that it gets afterwards sees the result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from bagua import engine
from bagua.arrays import Array, Memory, empty_like
from bagua.handle import Handle
from bagua.messages import Messages, outcome, same_kind, writable

if TYPE_CHECKING:
    from bagua.arrays import AnyMemory

__all__ = ["Verbs"]

Op = str | int


def op_code(op: Op) -> int:
    """The number of a reduce operation, by name or number. ValueError names the ones that exist."""
    if type(op) is str and (known := engine.OPS.get(op)) is not None:
        return known
    code = engine.OPS.get(op.lower(), -1) if isinstance(op, str) else int(op)
    if code not in engine.OPS.values():
        raise ValueError(f"op={op!r} is none of {', '.join(engine.OPS)}")
    return code


class Verbs(Messages):
    """Base of `Group`: what its members do together."""

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
        stream: int | None = None,
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
        stream: int | None = None,
    ) -> Handle[Any]: ...
    def all_reduce(
        self,
        x: Array,
        op: Op = "sum",
        *,
        out: Array | None = None,
        async_op: bool = False,
        timeout: float | None = None,
        stream: int | None = None,
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
            return outcome(done, x, x)
        src, dst, result = self._pair(x, out, stream)
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
        stream: int | None = None,
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
        stream: int | None = None,
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
        stream: int | None = None,
    ) -> Any:
        """As `all_reduce`, but only rank `dst` gets the result; the other ranks' arrays stay as they are, and
        they get None.
        """
        code, root = op_code(op), self._rank(dst, "dst")
        if self.rank == root:
            src, target, result = self._pair(x, out, stream)
        else:
            src, target, result = self._operand(x, "the array", stream).to_read(), None, None
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
        stream: int | None = None,
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
        stream: int | None = None,
    ) -> Handle[Any]: ...
    def reduce_scatter(
        self,
        x: Array,
        op: Op = "sum",
        *,
        out: Array | None = None,
        async_op: bool = False,
        timeout: float | None = None,
        stream: int | None = None,
    ) -> Any:
        """Rank r gets the combination of all ranks' r-th part of `x`, whose first dimension is divided among the ranks.

        The result is a new array or `out`. `out` may be this rank's part of `x` itself.
        """
        code = op_code(op)
        src = self._operand(x, "the array", stream).to_read()
        shape = self._part(src, "reduce_scatter")
        dst, result = self._target(src, out, shape, stream)
        inside = dst.count > 0 and dst.address == src.address + self.rank * dst.nbytes
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
        stream: int | None = None,
    ) -> Any: ...
    @overload
    def broadcast(
        self,
        x: Array,
        src: int = 0,
        *,
        out: Array | None = None,
        async_op: Literal[True],
        timeout: float | None = None,
        stream: int | None = None,
    ) -> Handle[Any]: ...
    def broadcast(
        self,
        x: Array,
        src: int = 0,
        *,
        out: Array | None = None,
        async_op: bool = False,
        timeout: float | None = None,
        stream: int | None = None,
    ) -> Any:
        """Every rank gets rank `src`'s array."""
        root = self._rank(src, "src")
        source, target, result = self._pair(x, out, stream)
        return self._run(
            engine.BROADCAST,
            None,
            target,
            result,
            root=root,
            shape=target.shape,
            async_op=async_op,
            timeout=timeout,
            copy_of=source if self.rank == root else None,
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
        stream: int | None = None,
    ) -> Any: ...
    @overload
    def gather(
        self,
        x: Array,
        dst: int = 0,
        *,
        out: Array | None = None,
        async_op: Literal[True],
        timeout: float | None = None,
        stream: int | None = None,
    ) -> Handle[Any]: ...
    def gather(
        self,
        x: Array,
        dst: int = 0,
        *,
        out: Array | None = None,
        async_op: bool = False,
        timeout: float | None = None,
        stream: int | None = None,
    ) -> Any:
        """Rank `dst` gets all ranks' arrays, stacked along a new first dimension; the others get None, and
        their `out` is not used.
        """
        root = self._rank(dst, "dst")
        src = self._operand(x, "the array", stream).to_read()
        target: AnyMemory | None = None
        result: Any = None
        if self.rank == root:
            target, result = self._target(src, out, (self.size, *src.shape), stream)
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
        stream: int | None = None,
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
        stream: int | None = None,
    ) -> Handle[Any]: ...
    def scatter(
        self,
        x: Array | None = None,
        src: int = 0,
        *,
        out: Array | None = None,
        async_op: bool = False,
        timeout: float | None = None,
        stream: int | None = None,
    ) -> Any:
        """Rank r gets the r-th row of rank `src`'s `x`, whose first dimension is the number of ranks.

        The other ranks give no `x`, and an `out` of the shape of a row; on `src` the result is a new array without it.
        """
        root = self._rank(src, "src")
        source: AnyMemory | None = None
        if self.rank == root:
            if x is None:
                raise ValueError(f"scatter: rank {root} is the source and needs an array")
            source = self._operand(x, "the array", stream).to_read()
            if not source.shape or source.shape[0] != self.size:
                raise ValueError(
                    f"scatter: the first dimension of shape {source.shape} is not the number of ranks, {self.size}"
                )
            target, result = self._target(source, out, source.shape[1:], stream)
        elif out is None:
            raise ValueError(f"scatter: rank {self.rank} is not the source and needs out=")
        else:
            target, result = self._operand(out, "out", stream).to_write("out"), out
        count, dtype = target.count, target.dtype
        given: AnyMemory | None = source
        if source is None:
            given = target.nothing()  # not read on this rank
        elif count > 0 and target.address == source.address + self.rank * target.nbytes:
            if isinstance(target, Memory):
                # In place would mean that every rank has room for all rows; the own row is in place already.
                target = Memory(target.array.copy(), dtype, target.owner)
            else:
                given, target = None, source
        return self._run(
            engine.SCATTER, given, target, result, root=root, count=count, async_op=async_op, timeout=timeout
        )

    # --- every rank to every rank -------------------------------------------------------------------------------------

    @overload
    def all_gather(
        self,
        x: Array,
        *,
        out: Array | None = None,
        async_op: Literal[False] = False,
        timeout: float | None = None,
        stream: int | None = None,
    ) -> Any: ...
    @overload
    def all_gather(
        self,
        x: Array,
        *,
        out: Array | None = None,
        async_op: Literal[True],
        timeout: float | None = None,
        stream: int | None = None,
    ) -> Handle[Any]: ...
    def all_gather(
        self,
        x: Array,
        *,
        out: Array | None = None,
        async_op: bool = False,
        timeout: float | None = None,
        stream: int | None = None,
    ) -> Any:
        """Every rank gets all ranks' arrays, stacked along a new first dimension, in a new array or in `out`.

        `x` may be this rank's part of `out` itself.
        """
        src = self._operand(x, "the array", stream).to_read()
        dst, result = self._target(src, out, (self.size, *src.shape), stream)
        given = None if self._is_own_part(src, dst) else src
        return self._run(engine.ALL_GATHER, given, dst, result, count=src.count, async_op=async_op, timeout=timeout)

    @overload
    def all_to_all(
        self,
        x: Array,
        *,
        out: Array | None = None,
        async_op: Literal[False] = False,
        timeout: float | None = None,
        stream: int | None = None,
    ) -> Any: ...
    @overload
    def all_to_all(
        self,
        x: Array,
        *,
        out: Array | None = None,
        async_op: Literal[True],
        timeout: float | None = None,
        stream: int | None = None,
    ) -> Handle[Any]: ...
    def all_to_all(
        self,
        x: Array,
        *,
        out: Array | None = None,
        async_op: bool = False,
        timeout: float | None = None,
        stream: int | None = None,
    ) -> Any:
        """Rank r gets the r-th part of every rank's array, in rank order; the first dimension is divided among
        the ranks.
        """
        src, dst, result = self._pair(x, out, stream)
        self._part(dst, "all_to_all")
        count = dst.count // self.size
        return self._run(engine.ALL_TO_ALL, src, dst, result, count=count, async_op=async_op, timeout=timeout)

    @overload
    def barrier(self, *, async_op: Literal[False] = False, timeout: float | None = None) -> None: ...
    @overload
    def barrier(self, *, async_op: Literal[True], timeout: float | None = None) -> Handle[None]: ...
    def barrier(self, *, async_op: bool = False, timeout: float | None = None) -> Any:
        """Returns when every rank has called it."""
        done = self._communicator.run(
            engine.BARRIER, None, None, 0, engine.DTYPES["uint8"], timeout=timeout, async_op=async_op
        )
        return outcome(done, None, None)

    def _run(
        self,
        verb: int,
        src: AnyMemory | None,
        dst: AnyMemory | None,
        result: Any,
        op: int = 0,
        root: int = 0,
        *,
        async_op: bool,
        timeout: float | None,
        count: int | None = None,
        shape: tuple[int, ...] | None = None,
        copy_of: AnyMemory | None = None,
    ) -> Any:
        """Runs a verb from `src` (None: in place) to `dst` and returns its result, or its handle.

        `count` is that of one rank's shard, for the verbs that have shards. `copy_of` is copied to `dst` before.
        """
        held = dst if dst is not None else src
        assert held is not None
        place = held.call(self._communicator, (src, dst, copy_of))
        if copy_of is not None:
            assert dst is not None
            if place is not None:
                place.copy(dst.address, copy_of.address, dst.nbytes)
            elif isinstance(dst, Memory) and isinstance(copy_of, Memory):
                dst.array[...] = copy_of.array.view(dst.array.dtype)
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
            keep=(src, dst, copy_of) if async_op or place is not None else None,
            place=place,
        )
        return outcome(raw, result, (src, dst))

    # --- checks -------------------------------------------------------------------------------------------------------

    def _pair(self, x: Any, out: Any, stream: int | None) -> tuple[AnyMemory | None, AnyMemory, Any]:
        """Source (None in place), destination, and what to return, of a verb whose result has the shape of `x`."""
        memory = self._operand(x, "the array", stream)
        if out is None or out is x:
            return None, writable(memory), x
        target = same_kind(memory, self._operand(out, "out", stream), memory.shape)
        source = memory.to_read()
        return (None if source.address == target.address else source), target, out

    def _part(self, memory: AnyMemory, verb: str) -> tuple[int, ...]:
        """The shape of one rank's part of `memory`."""
        if not memory.shape or memory.shape[0] % self.size:
            raise ValueError(
                f"{verb}: the first dimension of shape {memory.shape} cannot be divided among {self.size} ranks"
            )
        return (memory.shape[0] // self.size, *memory.shape[1:])

    def _is_own_part(self, part: AnyMemory, whole: AnyMemory) -> bool:
        return part.count > 0 and part.address == whole.address + self.rank * part.nbytes

    def _target(self, memory: AnyMemory, out: Any, shape: tuple[int, ...], stream: int | None) -> tuple[AnyMemory, Any]:
        """Destination and what to return, of a verb whose result has another shape."""
        if out is None:
            out = empty_like(memory, shape)
        return same_kind(memory, self._operand(out, "out", stream), shape), out
