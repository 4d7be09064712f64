"""The verbs of a group, on arrays.

Every verb checks its arguments before anything is sent, works in place where that has a meaning and the array is
writable and contiguous, writes to `out=` otherwise, and returns the array that holds the result. With `async_op=True`
it returns a `Handle` instead; until that is done, the arrays must not be touched.

Arrays may be on a CUDA device (the page "CUDA"). `stream` is a CUstream as an integer, by DLPack's numbers; None is the
legacy stream. The verb begins after the work that the stream has, and work that it gets afterwards sees the result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from bagua import engine, verbs
from bagua.arrays import Array, ArrayT, ResultT, read_plain
from bagua.handle import Handle
from bagua.messages import Messages, outcome
from bagua.operand import Operand, empty_like, same_kind

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from bagua.messages import OutOptions

__all__ = ["Collectives"]

#: A reduction, by its name or number.
Op = Literal["sum", "avg", "min", "max", "product", "band", "bor", "bxor"] | int


def op_code(op: str | int) -> int:
    """The number of a reduce operation, by name or number. ValueError and TypeError name the ones that exist."""
    if type(op) is str and (known := engine.OPS.get(op)) is not None:
        return known
    # Of an enumeration the name counts: torch's MIN has the number of our "max", Horovod's Sum that of our "product".
    name = op if isinstance(op, str) else getattr(op, "name", None)
    if isinstance(name, str):
        code = engine.OPS.get(name.lower(), -1)
    elif isinstance(op, int | np.integer) and not isinstance(op, bool):
        code = int(op)
    else:
        raise TypeError(f"op={op!r} is a {type(op).__name__}, not one of {', '.join(engine.OPS)}")
    if code not in engine.OPS.values():
        raise ValueError(f"op must be one of {', '.join(engine.OPS)}; got {op!r}")
    return code


class Collectives(Messages):
    """Base of `Group`, below its verbs on objects: what its members do together with arrays."""

    # --- every rank combines ------------------------------------------------------------------------------------------

    @overload
    def all_reduce(
        self, x: ArrayT, op: Op = "sum", *, async_op: Literal[False] = False, **options: Unpack[OutOptions[ArrayT]]
    ) -> ArrayT: ...
    @overload
    def all_reduce(
        self, x: ArrayT, op: Op = "sum", *, async_op: Literal[True], **options: Unpack[OutOptions[ArrayT]]
    ) -> Handle[ArrayT]: ...
    def all_reduce(
        self,
        x: ArrayT,
        op: Op = "sum",
        *,
        out: ArrayT | None = None,
        async_op: bool = False,
        timeout: float | None = None,
        stream: int | None = None,
    ) -> Any:
        """Combines all ranks' arrays, element by element in rank order; every rank gets the result.

        `x`: a NumPy array, or anything with DLPack or the buffer protocol, of any shape, which is equal on all ranks.
        Its elements are float16, bfloat16, float32, float64, complex64, complex128, bool, or integers of 8 to 64 bits.
        They are overwritten by the result unless `out` is given.

        `op`: "sum" (no bool), "avg" (float and complex), "min", "max" (no complex), "product", "band", "bor" or "bxor"
        (integers and bool). Half-precision sums are accumulated in float32.

        `out`: a writable array of the same shape, type and device for the result; `x` then keeps its elements, and may
        be read-only or strided.

        `async_op`: return a `Handle` at once. Its `wait()` returns the result; until then the arrays must not be
        read or written.

        `timeout`: seconds, else BaguaTimeoutError; None: the group's.

        `stream`: of arrays on a CUDA device, a CUstream as an integer by DLPack's numbers; None is the legacy stream.
        The verb begins after the work that the stream has, and work that it gets afterwards sees the result. Without
        effect on the host.

        Returns `out`, or `x` without it. Every rank of the group calls it, in the same order as its other verbs.

        Raises TypeError or ValueError for arguments that cannot be used, before anything is sent. Then MismatchError
        where ranks disagree, BaguaTimeoutError, PeerLostError, PeerRaisedError or AbortedError; the group can only be
        left afterwards.
        """
        code = op_code(op)
        if out is None and (found := read_plain(x)) is not None and found[4]:
            # The same as below without the objects, which cost several times the rest of a small call.
            address, count, dtype, shape, _ = found
            done = self._communicator.run(
                engine.ALL_REDUCE,
                None,
                address,
                count,
                dtype,
                code,
                shape=shape,
                timeout=timeout,
                async_op=async_op,
                # The operation keeps the array, because the caller may drop the handle.
                keep=x if async_op else None,
            )
            return outcome(done, x, self) if async_op else x
        src, dst, result = self._pair(x, out, stream)
        return self._begin(verbs.ALL_REDUCE, src, dst, result, async_op, timeout, op=code)

    @overload
    def reduce(
        self,
        x: ArrayT,
        dst: int = 0,
        op: Op = "sum",
        *,
        async_op: Literal[False] = False,
        **options: Unpack[OutOptions[ArrayT]],
    ) -> ArrayT | None: ...
    @overload
    def reduce(
        self, x: ArrayT, dst: int = 0, op: Op = "sum", *, async_op: Literal[True], **options: Unpack[OutOptions[ArrayT]]
    ) -> Handle[ArrayT | None]: ...
    def reduce(
        self,
        x: ArrayT,
        dst: int = 0,
        op: Op = "sum",
        *,
        out: ArrayT | None = None,
        async_op: bool = False,
        timeout: float | None = None,
        stream: int | None = None,
    ) -> Any:
        """As `all_reduce`, but only rank `dst` gets the result: in `out`, or in `x` without it.

        On the other ranks `x` keeps its elements, `out` is not used, and the result is None.
        """
        code, root = op_code(op), self._rank(dst, "dst")
        target: Operand | None = None
        result: Any = None
        if self.rank == root:
            src, target, result = self._pair(x, out, stream)
        else:
            src = self._operand(x, "the array", stream).to_read()
        return self._begin(verbs.REDUCE, src, target, result, async_op, timeout, op=code, root=root)

    @overload
    def reduce_scatter(
        self, x: Array, op: Op = "sum", *, async_op: Literal[False] = False, **options: Unpack[OutOptions[ResultT]]
    ) -> ResultT: ...
    @overload
    def reduce_scatter(
        self, x: Array, op: Op = "sum", *, async_op: Literal[True], **options: Unpack[OutOptions[ResultT]]
    ) -> Handle[ResultT]: ...
    def reduce_scatter(
        self,
        x: Array,
        op: Op = "sum",
        *,
        out: ResultT | None = None,
        async_op: bool = False,
        timeout: float | None = None,
        stream: int | None = None,
    ) -> Any:
        """Rank r gets the combination of all ranks' r-th part of `x`, whose first dimension is divided among the ranks.

        `x` of shape (n, ...) is equal in shape on all ranks, and n a multiple of their number (else ValueError). It
        keeps its elements. Returns `out` of shape (n / size, ...), or a new NumPy array without it; `out` may be this
        rank's part of `x` itself. Types, `op`, `async_op`, `timeout`, `stream` and errors are as in `all_reduce`.
        """
        code = op_code(op)
        src = self._operand(x, "the array", stream).to_read()
        shape = self._part(src, "reduce_scatter")
        dst, result = self._target(src, out, shape, stream)
        given, target = verbs.REDUCE_SCATTER.in_place(src, dst, self.rank)
        return self._begin(verbs.REDUCE_SCATTER, given, target, result, async_op, timeout, op=code)

    # --- from and to one rank -----------------------------------------------------------------------------------------

    @overload
    def broadcast(
        self, x: ArrayT, src: int = 0, *, async_op: Literal[False] = False, **options: Unpack[OutOptions[ArrayT]]
    ) -> ArrayT: ...
    @overload
    def broadcast(
        self, x: ArrayT, src: int = 0, *, async_op: Literal[True], **options: Unpack[OutOptions[ArrayT]]
    ) -> Handle[ArrayT]: ...
    def broadcast(
        self,
        x: ArrayT,
        src: int = 0,
        *,
        out: ArrayT | None = None,
        async_op: bool = False,
        timeout: float | None = None,
        stream: int | None = None,
    ) -> Any:
        """Every rank gets rank `src`'s array: in `out`, or in `x` without it, and returns that.

        `x` has one shape and type on all ranks; its elements are overwritten on every rank but `src` unless `out` is
        given. Types, `out`, `async_op`, `timeout`, `stream` and errors are as in `all_reduce`.
        """
        root = self._rank(src, "src")
        source, target, result = self._pair(x, out, stream)
        fill = source if self.rank == root else None
        return self._begin(verbs.BROADCAST, None, target, result, async_op, timeout, root=root, fill=fill)

    @overload
    def gather(
        self, x: Array, dst: int = 0, *, async_op: Literal[False] = False, **options: Unpack[OutOptions[ResultT]]
    ) -> ResultT | None: ...
    @overload
    def gather(
        self, x: Array, dst: int = 0, *, async_op: Literal[True], **options: Unpack[OutOptions[ResultT]]
    ) -> Handle[ResultT | None]: ...
    def gather(
        self,
        x: Array,
        dst: int = 0,
        *,
        out: ResultT | None = None,
        async_op: bool = False,
        timeout: float | None = None,
        stream: int | None = None,
    ) -> Any:
        """Rank `dst` gets all ranks' arrays, stacked along a new first dimension; the others get None.

        `x` has one size and type on all ranks, and keeps its elements. Returns, on `dst`, `out` of shape
        (size, *x.shape), or a new NumPy array without it; the others' `out` is not used. Types, `async_op`, `timeout`,
        `stream` and errors are as in `all_reduce`.
        """
        root = self._rank(dst, "dst")
        given: Operand | None
        given = src = self._operand(x, "the array", stream).to_read()
        target: Operand | None = None
        result: Any = None
        if self.rank == root:
            whole, result = self._target(src, out, (self.size, *src.shape), stream)
            given, target = verbs.GATHER.in_place(src, whole, root)
        return self._begin(verbs.GATHER, given, target, result, async_op, timeout, root=root)

    @overload
    def scatter(
        self,
        x: Array | None = None,
        src: int = 0,
        *,
        async_op: Literal[False] = False,
        **options: Unpack[OutOptions[ResultT]],
    ) -> ResultT: ...
    @overload
    def scatter(
        self, x: Array | None = None, src: int = 0, *, async_op: Literal[True], **options: Unpack[OutOptions[ResultT]]
    ) -> Handle[ResultT]: ...
    def scatter(
        self,
        x: Array | None = None,
        src: int = 0,
        *,
        out: ResultT | None = None,
        async_op: bool = False,
        timeout: float | None = None,
        stream: int | None = None,
    ) -> Any:
        """Rank r gets the r-th row of rank `src`'s `x`, whose first dimension is the number of ranks.

        The other ranks give no `x`, and an `out` of the shape and type of a row, whose elements are overwritten
        (ValueError without it); on `src` the result is a new NumPy array without `out`. `x` keeps its elements. Returns
        the row. Types, `async_op`, `timeout`, `stream` and errors are as in `all_reduce`.
        """
        root = self._rank(src, "src")
        source: Operand | None = None
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
        given: Operand | None = source
        if source is None:
            given = target.nothing()  # not read on this rank
        elif target.count > 0 and target.address == source.address + self.rank * target.nbytes:
            if target.place is None:
                # In place would mean that every rank has room for all rows; the own row is in place already.
                spare = np.empty(target.nbytes, np.uint8)
                target = Operand(spare.ctypes.data, target.count, target.dtype, None, spare)
            else:
                given, target = None, source
        return self._begin(verbs.SCATTER, given, target, result, async_op, timeout, root=root)

    # --- every rank to every rank -------------------------------------------------------------------------------------

    @overload
    def all_gather(
        self, x: Array, *, async_op: Literal[False] = False, **options: Unpack[OutOptions[ResultT]]
    ) -> ResultT: ...
    @overload
    def all_gather(
        self, x: Array, *, async_op: Literal[True], **options: Unpack[OutOptions[ResultT]]
    ) -> Handle[ResultT]: ...
    def all_gather(
        self,
        x: Array,
        *,
        out: ResultT | None = None,
        async_op: bool = False,
        timeout: float | None = None,
        stream: int | None = None,
    ) -> Any:
        """Every rank gets all ranks' arrays, stacked along a new first dimension.

        `x` has one size and type on all ranks, and keeps its elements. Returns `out` of shape (size, *x.shape), or a
        new NumPy array without it; `x` may be this rank's part of `out` itself. Types, `async_op`, `timeout`, `stream`
        and errors are as in `all_reduce`.
        """
        src = self._operand(x, "the array", stream).to_read()
        dst, result = self._target(src, out, (self.size, *src.shape), stream)
        given, target = verbs.ALL_GATHER.in_place(src, dst, self.rank)
        return self._begin(verbs.ALL_GATHER, given, target, result, async_op, timeout)

    @overload
    def all_to_all(
        self, x: ArrayT, *, async_op: Literal[False] = False, **options: Unpack[OutOptions[ArrayT]]
    ) -> ArrayT: ...
    @overload
    def all_to_all(
        self, x: ArrayT, *, async_op: Literal[True], **options: Unpack[OutOptions[ArrayT]]
    ) -> Handle[ArrayT]: ...
    def all_to_all(
        self,
        x: ArrayT,
        *,
        out: ArrayT | None = None,
        async_op: bool = False,
        timeout: float | None = None,
        stream: int | None = None,
    ) -> Any:
        """Rank r gets the r-th part of every rank's array, in rank order.

        The first dimension of `x` is a multiple of the number of ranks (else ValueError) and is divided among them.
        Returns `out`, of the shape of `x`; without it `x`, whose elements are overwritten. Types, `out`, `async_op`,
        `timeout`, `stream` and errors are as in `all_reduce`.
        """
        src, dst, result = self._pair(x, out, stream)
        self._part(dst, "all_to_all")
        return self._begin(verbs.ALL_TO_ALL, src, dst, result, async_op, timeout)

    @overload
    def barrier(self, *, async_op: Literal[False] = False, timeout: float | None = None) -> None: ...
    @overload
    def barrier(self, *, async_op: Literal[True], timeout: float | None = None) -> Handle[None]: ...
    def barrier(self, *, async_op: bool = False, timeout: float | None = None) -> Any:
        """Returns when every rank has called it; with `async_op` a `Handle`, whose `wait()` does.

        `timeout` and errors are as in `all_reduce`.
        """
        done = self._communicator.run(
            engine.BARRIER, None, None, 0, engine.DTYPES["uint8"], timeout=timeout, async_op=async_op
        )
        return outcome(done, None, self)

    def _begin(
        self,
        verb: verbs.Verb,
        src: Operand | None,
        dst: Operand | None,
        result: Any,
        async_op: bool,
        timeout: float | None,
        **options: Any,
    ) -> Any:
        """Begins a verb and returns its result, or its handle. The options are those of `verbs.operation`."""
        ready = verbs.operation(self._communicator, verb, src, dst, **options)
        return outcome(ready.begin(async_op, timeout), result, self)

    # --- checks -------------------------------------------------------------------------------------------------------

    def _pair(self, x: Any, out: Any, stream: int | None) -> tuple[Operand | None, Operand, Any]:
        """Source (None in place), destination, and what to return, of a verb whose result has the shape of `x`."""
        memory = self._operand(x, "the array", stream)
        if out is None or out is x:
            return None, memory.to_write("the array", has_out=True), x
        target = same_kind(memory, self._operand(out, "out", stream), memory.shape)
        return *verbs.ALL_REDUCE.in_place(memory.to_read(), target, self.rank), out

    def _part(self, memory: Operand, verb: str) -> tuple[int, ...]:
        """The shape of one rank's part of `memory`."""
        if not memory.shape or memory.shape[0] % self.size:
            raise ValueError(
                f"{verb}: the first dimension of shape {memory.shape} cannot be divided among {self.size} ranks"
            )
        return (memory.shape[0] // self.size, *memory.shape[1:])

    def _target(self, memory: Operand, out: Any, shape: tuple[int, ...], stream: int | None) -> tuple[Operand, Any]:
        """Destination and what to return, of a verb whose result has another shape."""
        if out is None:
            out = empty_like(memory, shape)
        return same_kind(memory, self._operand(out, "out", stream), shape), out
