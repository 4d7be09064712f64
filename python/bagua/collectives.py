"""The verbs of a group, on arrays.

Every verb checks its arguments before it sends anything. Verbs that can run in place do so unless `out=` is given; the
array must then be writable and contiguous. Each verb returns the array that holds the result. With `async_op=True` it
returns a `Handle` instead, and the arrays must not be touched until that is done.

Arrays may be on a CUDA device (page "CUDA"). `stream` is a CUstream as an integer, in DLPack's numbering; None is the
legacy stream. The verb begins after the work that the stream already has, and work added afterwards sees the result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from bagua import extension, verbs
from bagua.arrays import Array, ArrayT, ResultT, owner_of, read_plain
from bagua.handle import Handle
from bagua.messages import Messages, outcome
from bagua.operand import Operand, empty_like, same_kind

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from bagua.messages import OutOptions

__all__ = ["Collectives"]

#: The name or number of a reduction.
Op = Literal["sum", "avg", "min", "max", "product", "band", "bor", "bxor"] | int


def op_code(op: str | int) -> int:
    """Returns a reduction's number from its name or number. Raises ValueError or TypeError with the known ones."""
    if type(op) is str and (known := extension.OPS.get(op)) is not None:
        return known
    # Enumerations are matched by name: torch's MIN has the number of our "max", Horovod's Sum that of our "product".
    name = op if isinstance(op, str) else getattr(op, "name", None)
    if isinstance(name, str):
        code = extension.OPS.get(name.lower(), -1)
    elif isinstance(op, int | np.integer) and not isinstance(op, bool):
        code = int(op)
    else:
        raise TypeError(f"op={op!r} is a {type(op).__name__}, not one of {', '.join(extension.OPS)}")
    if code not in extension.OPS.values():
        raise ValueError(f"op must be one of {', '.join(extension.OPS)}; got {op!r}")
    return code


class Collectives(Messages):
    """Collective verbs on arrays: the base of `Group` below its verbs on objects."""

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
        """Combines all ranks' arrays, element by element in rank order. Every rank gets the result.

        `x`: a NumPy array, or anything with DLPack or the buffer protocol. It may have any shape, which must be equal
        on all ranks. Its elements are float16, bfloat16, float32, float64, complex64, complex128, bool, or integers of
        8 to 64 bits. The result overwrites them unless `out` is given.

        `op`: "sum" (no bool), "avg" (float and complex), "min", "max" (no complex), "product", "band", "bor" or "bxor"
        (integers and bool). Half-precision sums are accumulated in float32.

        `out`: a writable array for the result, with the same shape, element type and device. `x` then keeps its
        elements, and may be read-only or strided.

        `async_op`: return a `Handle` at once. Its `wait()` returns the result. Do not read or write the arrays before.

        `timeout`: seconds until BaguaTimeoutError; None uses the group's.

        `stream`: for arrays on a CUDA device, a CUstream as an integer, in DLPack's numbering; None is the legacy
        stream. The verb begins after the work that the stream already has, and work added afterwards sees the result.
        Ignored for arrays on the host.

        Returns `out`, or `x` if `out` is not given. Every rank of the group must call it, in the same order as the
        group's other verbs.

        Raises TypeError or ValueError for bad arguments, before anything is sent. After that, raises MismatchError if
        ranks disagree, BaguaTimeoutError, PeerLostError, PeerRaisedError or AbortedError. After one of these, the group
        can only be left.
        """
        code = op_code(op)
        if out is None and (found := read_plain(x)) is not None and found[4]:
            # A shortcut past the objects below, which cost several times the rest of a small call.
            address, count, dtype, shape, _ = found
            done = self._communicator.run(
                extension.ALL_REDUCE,
                None,
                address,
                count,
                dtype,
                code,
                shape=shape,
                timeout=timeout,
                async_op=async_op,
                # The operation keeps the array alive, because the caller may drop the handle.
                keep=owner_of(x) if async_op else None,
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
        """Combines all ranks' arrays as `all_reduce` does, but only rank `dst` gets the result.

        On `dst`, the result is written to `out`, or to `x` if `out` is not given, and returned. On other ranks `x`
        keeps its elements, `out` is ignored, and None is returned. Other arguments and errors are as in `all_reduce`.
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
        """Combines all ranks' arrays and gives rank r the r-th part of the result.

        `x` has shape (n, ...), equal on all ranks. Its first dimension is divided among the ranks; n must be a multiple
        of the group's size (else ValueError). `x` keeps its elements. Returns `out` of shape (n / size, ...), or a new
        NumPy array if `out` is not given. `out` may be this rank's part of `x` itself. Element types, `op`, `async_op`,
        `timeout`, `stream` and errors are as in `all_reduce`.
        """
        code = op_code(op)
        src = self._operand(x, "the array", stream).to_read()
        shape = self._part(src, "reduce_scatter")
        dst, result = self._target(src, out, shape, stream)
        given, target = verbs.REDUCE_SCATTER.in_place(src, dst, self.rank)
        return self._begin(verbs.REDUCE_SCATTER, given, target, result, async_op, timeout, op=code)

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
        """Copies rank `src`'s array to every rank.

        `x` has the same shape and element type on all ranks. The result is written to `out`, or to `x` if `out` is not
        given, and returned. `x` on rank `src` is never changed. Element types, `out`, `async_op`, `timeout`, `stream`
        and errors are as in `all_reduce`.
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
        """Stacks all ranks' arrays along a new first dimension on rank `dst`. Other ranks get None.

        `x` has the same size and element type on all ranks, and keeps its elements. On `dst`, returns `out` of shape
        (size, *x.shape), or a new NumPy array if `out` is not given. Other ranks ignore `out`. Element types,
        `async_op`, `timeout`, `stream` and errors are as in `all_reduce`.
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
        """Gives rank r the r-th row of rank `src`'s array.

        On `src`, the first dimension of `x` is the number of ranks, `x` keeps its elements, and the row is written to
        `out`, or to a new NumPy array if `out` is not given. Every other rank passes no `x`, and must pass an `out`
        with the shape and element type of a row (else ValueError). Returns the row. Element types, `async_op`,
        `timeout`, `stream` and errors are as in `all_reduce`.
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
                # `out` is this rank's row of `x` already, and the core needs another destination: spare memory.
                spare = np.empty(target.nbytes, np.uint8)
                target = Operand(spare.ctypes.data, target.count, target.dtype, None, spare)
            else:
                given, target = None, source
        return self._begin(verbs.SCATTER, given, target, result, async_op, timeout, root=root)

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
        """Stacks all ranks' arrays along a new first dimension on every rank.

        `x` has the same size and element type on all ranks, and keeps its elements. Returns `out` of shape (size,
        *x.shape), or a new NumPy array if `out` is not given. `x` may be this rank's row of `out` itself. Element
        types, `async_op`, `timeout`, `stream` and errors are as in `all_reduce`.
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
        """Gives rank r the r-th part of every rank's array, in rank order.

        The first dimension of `x` is divided among the ranks, and must be a multiple of their number (else ValueError).
        Returns `out`, which has the shape of `x`. If `out` is not given, the result overwrites `x`, which is returned.
        Element types, `out`, `async_op`, `timeout`, `stream` and errors are as in `all_reduce`.
        """
        src, dst, result = self._pair(x, out, stream)
        self._part(dst, "all_to_all")
        return self._begin(verbs.ALL_TO_ALL, src, dst, result, async_op, timeout)

    @overload
    def barrier(self, *, async_op: Literal[False] = False, timeout: float | None = None) -> None: ...
    @overload
    def barrier(self, *, async_op: Literal[True], timeout: float | None = None) -> Handle[None]: ...
    def barrier(self, *, async_op: bool = False, timeout: float | None = None) -> Any:
        """Blocks until every rank has called it. With `async_op`, returns a `Handle` whose `wait()` blocks instead.

        `timeout` and errors are as in `all_reduce`.
        """
        done = self._communicator.run(
            extension.BARRIER, None, None, 0, extension.DTYPES["uint8"], timeout=timeout, async_op=async_op
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
        """Begins a verb. Returns its result, or its handle if `async_op`. `options` are those of `verbs.operation`."""
        ready = verbs.operation(self._communicator, verb, src, dst, **options)
        return outcome(ready.begin(async_op, timeout), result, self)

    def _pair(self, x: Any, out: Any, stream: int | None) -> tuple[Operand | None, Operand, Any]:
        """Returns source (None if in place), destination and return value of a verb whose result has `x`'s shape."""
        memory = self._operand(x, "the array", stream)
        if out is None or out is x:
            return None, memory.to_write("the array", has_out=True), x
        target = same_kind(memory, self._operand(out, "out", stream), memory.shape)
        return *verbs.ALL_REDUCE.in_place(memory.to_read(), target, self.rank), out

    def _part(self, memory: Operand, verb: str) -> tuple[int, ...]:
        if not memory.shape or memory.shape[0] % self.size:
            raise ValueError(
                f"{verb}: the first dimension of shape {memory.shape} cannot be divided among {self.size} ranks"
            )
        return (memory.shape[0] // self.size, *memory.shape[1:])

    def _target(self, memory: Operand, out: Any, shape: tuple[int, ...], stream: int | None) -> tuple[Operand, Any]:
        """Returns destination and return value of a verb whose result has another shape than its argument."""
        if out is None:
            out = empty_like(memory, shape)
        return same_kind(memory, self._operand(out, "out", stream), shape), out
