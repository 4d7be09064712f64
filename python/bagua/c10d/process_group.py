"""The process group that torch.distributed calls.

torch wraps the Work of a Python Backend in an object that has ``wait`` and ``get_future`` only. Methods of a
ProcessGroup subclass return Bagua's Work itself. The subclass therefore has the collectives. The Backend
(``backend.py``), registered with it, provides device types, the group's name, and calls from C++.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch

from bagua import extension, verbs
from bagua.group import Group
from bagua.handle import Handle
from bagua.process_state import at_exit
from bagua.torch_operand import reader, silent_reader

from . import operations, sparse
from .backend import register, without_support
from .compiler_disable import uncompiled
from .dispatch import HAS_SINGLE, dispatched, is_observed
from .operations import Operation
from .profiling import event, profiled
from .reductions import CODES_BY_HASH
from .torch_bindings import c10d
from .work import Work, seconds

__all__ = ["BaguaProcessGroup", "GroupFactory"]

_NO_TIME = timedelta(0)
_REDUCING = (verbs.ALL_REDUCE, verbs.REDUCE, verbs.REDUCE_SCATTER)
_ROOTED = (verbs.REDUCE, verbs.BROADCAST)
#: Collectives that increment the version counter of their output, as in gloo.
_COUNTED = (verbs.ALL_GATHER, verbs.REDUCE_SCATTER)
#: Largest number of Works kept for which no thread waits.
_MOST_KEPT = 1000


@dataclass
class _Call:
    op: Any
    root: int
    timeout: float
    async_op: bool


def _one(tensors: Any, what: str) -> Any:
    """Returns the only tensor of a list, or the tensor itself."""
    if type(tensors) is list and len(tensors) == 1:
        return tensors[0]
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise ValueError(f"{what} takes one tensor for each rank, not {len(tensors)}")
    return tensors[0]


class GroupFactory(Protocol):
    """Opens and leaves groups."""

    def open_group(self, store: Any, ranks: list[int], rank: int, timeout: timedelta) -> BaguaProcessGroup:
        """Returns the group of these world ranks. This process is number ``rank`` among them."""

    def ended(self, group: BaguaProcessGroup) -> None:
        """Leaves a group. Idempotent."""


@uncompiled
@without_support
class BaguaProcessGroup(c10d.ProcessGroup):  # type: ignore[misc]
    """The ranks of one group of torch.distributed. ``ranks`` are world ranks, by rank in the group."""

    def __init__(
        self,
        group: Group,
        ranks: Sequence[int],
        store: Any,
        timeout: timedelta,
        factory: GroupFactory,
    ) -> None:
        try:
            super().__init__(store, group.rank, group.size)
        except TypeError:  # torch before 2.6
            super().__init__(group.rank, group.size)
        #: The same group in Bagua's own API.
        self.bagua_group = group
        #: Rank in the group -> rank in torch's world.
        self.world_ranks = list(ranks)
        self._raw = group.communicator
        # Timeout of the core's operations.
        self._cores_timeout = timedelta(seconds=self._raw.timeout)
        self._store = store
        self._timeout = timeout
        self._factory = factory
        self._sequence = 0
        # Works started since _start_coalescing; None outside of coalescing.
        self._coalescing: list[Work] | None = None
        # The Python half of the Backend, which torch's C++ code may not keep alive.
        self._backend = register(self)
        # If torch has no such Backend, or its code hands a Work to C++ code, only the C++ half of a Work is kept, and
        # it would wait for ever without the Python half. So these Works are kept until a thread has waited for them,
        # oldest first; ``_asked`` lists those that a thread has waited for since the last operation.
        self._kept: OrderedDict[Work, None] = OrderedDict()
        self._asked: list[Work] = []
        if self._backend is None:
            # These versions of torch do not call ``shutdown`` when the group is destroyed.
            at_exit(self._kept.clear)
            at_exit(self._asked.clear)
        # These versions also do not store the name.
        self._name = ""

    def allreduce(self, tensors: Any, opts: Any = None, *, op: Any = None, timeout: Any = None) -> Work | None:
        """Reduces all ranks' tensors, in place on every rank. Sparse tensors are reduced by SUM only."""
        if op is timeout:
            done = self._at_once(verbs.ALL_REDUCE, opts, None, _one(tensors, "all_reduce"))
            return self._allreduce(tensors, opts) if done is NotImplemented else done
        return self._allreduce(tensors, opts, op=op, timeout=timeout)

    @dispatched
    def _allreduce(self, tensors: Any, opts: Any, *, op: Any = None, timeout: Any = None) -> Work:
        tensor = _one(tensors, "all_reduce")
        call = self._call(opts, op=op, timeout=timeout)
        if isinstance(tensor, torch.Tensor) and tensor.layout == torch.sparse_coo:
            with event("sparse_all_reduce"):
                return self._remember(sparse.all_reduce(self._raw, tensor, call.op, call.timeout))
        work = self._start(call, operations.all_reduce(self._raw, tensor, call.op))
        if call.async_op and isinstance(tensor, torch.Tensor) and tensor.numel() == 1:
            # DDP's reducer counts ranks that still have inputs in this way. Nothing else keeps this Work.
            self._keep(work)
        return work

    def allreduce_sparse(self, tensors: Any, opts: Any = None) -> Work | None:
        """Like :meth:`allreduce`."""
        return self.allreduce(tensors, opts)

    @dispatched
    def allreduce_coalesced(self, tensors: Sequence[Any], opts: Any = None) -> Work:
        """Like :meth:`allreduce`, for each tensor."""
        call = self._call(opts)
        parts = [operations.all_reduce(self._raw, tensor, call.op, is_coalesced=True) for tensor in tensors]
        return self._start(call, *parts)

    def reduce(
        self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None, *, root: int | None = None
    ) -> Work | None:
        """Reduces all ranks' tensors, in place on the root."""
        if op is timeout is root:
            done = self._at_once(verbs.REDUCE, opts, None, _one(tensors, "reduce"))
            return self._reduce(tensors, opts) if done is NotImplemented else done
        return self._reduce(tensors, opts, op=op, timeout=timeout, root=root)

    @dispatched
    def _reduce(self, tensors: Any, opts: Any, *, op: Any = None, timeout: Any = None, root: int | None = None) -> Work:
        call = self._call(opts, op=op, root=root, timeout=timeout)
        return self._start(call, operations.reduce(self._raw, _one(tensors, "reduce"), call.op, call.root))

    @dispatched
    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, *, op: Any = None, timeout: Any = None
    ) -> Work:
        """Reduces lists of tensors over all ranks, and gives tensor number r of the result to rank r."""
        call = self._call(opts, op=op, timeout=timeout)
        lists = inputs if isinstance(outputs, torch.Tensor) else _one(inputs, "reduce_scatter")
        output = _one(outputs, "reduce_scatter")
        return self._start(call, operations.reduce_scatter_list(self._raw, output, lists, call.op))

    def reduce_scatter_single(self, output: Any, tensor: Any, opts: Any = None) -> Work | None:
        """Reduces tensors over all ranks, and gives part r of the result to rank r."""
        done = self._at_once(verbs.REDUCE_SCATTER, opts, tensor, output)
        return self._reduce_scatter_single(output, tensor, opts) if done is NotImplemented else done

    @dispatched
    def _reduce_scatter_single(self, output: Any, tensor: Any, opts: Any) -> Work:
        call = self._call(opts)
        return self._start(call, operations.reduce_scatter(self._raw, output, tensor, call.op))

    @dispatched
    def reduce_scatter_single_coalesced(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> Work:
        """Like :meth:`reduce_scatter_single`, for each pair."""
        call = self._call(opts)
        pairs = zip(outputs, inputs, strict=True)
        return self._start(call, *(operations.reduce_scatter(self._raw, out, x, call.op) for out, x in pairs))

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None, *, root: int | None = None) -> Work | None:
        """Copies the root's tensor to every rank, in place."""
        if timeout is root:
            done = self._at_once(verbs.BROADCAST, opts, None, _one(tensors, "broadcast"))
            return self._broadcast(tensors, opts) if done is NotImplemented else done
        return self._broadcast(tensors, opts, timeout=timeout, root=root)

    @dispatched
    def _broadcast(self, tensors: Any, opts: Any, *, timeout: Any = None, root: int | None = None) -> Work:
        call = self._call(opts, root=root, timeout=timeout)
        return self._start(call, operations.broadcast(self._raw, _one(tensors, "broadcast"), call.root))

    @dispatched
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Work:
        """Gathers all ranks' tensors in a list by rank, on every rank."""
        call = self._call(opts, timeout=timeout)
        lists = outputs if isinstance(inputs, torch.Tensor) else _one(outputs, "all_gather")
        return self._start(call, operations.all_gather_list(self._raw, lists, _one(inputs, "all_gather")))

    def all_gather_single(self, output: Any, tensor: Any, opts: Any = None) -> Work | None:
        """Concatenates all ranks' tensors on every rank."""
        done = self._at_once(verbs.ALL_GATHER, opts, tensor, output)
        return self._all_gather_single(output, tensor, opts) if done is NotImplemented else done

    @dispatched
    def _all_gather_single(self, output: Any, tensor: Any, opts: Any) -> Work:
        return self._start(self._call(opts), operations.all_gather(self._raw, output, tensor))

    @dispatched
    def allgather_coalesced(self, outputs: Sequence[Sequence[Any]], inputs: Sequence[Any], opts: Any = None) -> Work:
        """Like :meth:`allgather`, for each input. ``outputs`` has one list for each rank."""
        if any(len(of_rank) != len(inputs) for of_rank in outputs):
            raise ValueError(f"each of the output lists needs {len(inputs)} tensors, one for each input")
        by_input = [[of_rank[i] for of_rank in outputs] for i in range(len(inputs))]
        pairs = zip(by_input, inputs, strict=True)
        return self._start(self._call(opts), *(operations.all_gather_list(self._raw, out, x) for out, x in pairs))

    @dispatched
    def all_gather_single_coalesced(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> Work:
        """Like :meth:`all_gather_single`, for each pair."""
        pairs = zip(outputs, inputs, strict=True)
        return self._start(self._call(opts), *(operations.all_gather(self._raw, out, x) for out, x in pairs))

    @dispatched
    def gather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, *, root: int | None = None
    ) -> Work:
        """Gathers all ranks' tensors in a list by rank, on the root."""
        call = self._call(opts, root=root, timeout=timeout)
        nested = not isinstance(inputs, torch.Tensor)
        lists: Sequence[Any] = (outputs[0] if outputs else []) if nested else outputs
        return self._start(call, operations.gather_list(self._raw, lists, _one(inputs, "gather"), call.root))

    @dispatched
    def gather_single(self, output: Any, tensor: Any, opts: Any = None) -> Work:
        """Concatenates all ranks' tensors on the root."""
        call = self._call(opts)
        return self._start(call, operations.gather(self._raw, output, tensor, call.root))

    @dispatched
    def scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, *, root: int | None = None
    ) -> Work:
        """Sends the root's tensor number r to rank r."""
        call = self._call(opts, root=root, timeout=timeout)
        nested = not isinstance(outputs, torch.Tensor)
        lists: Sequence[Any] = (inputs[0] if inputs else []) if nested else inputs
        return self._start(call, operations.scatter(self._raw, _one(outputs, "scatter"), lists, call.root))

    @dispatched
    def alltoall(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> Work:
        """Sends tensor number r to rank r, and receives a list by rank."""
        return self._start(self._call(opts), operations.all_to_all_list(self._raw, outputs, inputs))

    def all_to_all_single(
        self,
        output: Any,
        tensor: Any,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        opts: Any = None,
        timeout: Any = None,
    ) -> Work | None:
        """Sends part r of the tensor to rank r, and concatenates the parts received."""
        alike = not (timeout or output_splits or input_splits)
        # The core divides elements; torch divides rows.
        alike = alike and operations.has_equal_parts((tensor, output), self._raw.size)
        done: Work | None = self._at_once(verbs.ALL_TO_ALL, opts, tensor, output) if alike else NotImplemented
        if done is not NotImplemented:
            return done
        return self._all_to_all_single(output, tensor, output_splits, input_splits, opts, timeout=timeout)

    @dispatched
    def _all_to_all_single(
        self, output: Any, tensor: Any, output_splits: Any, input_splits: Any, opts: Any, *, timeout: Any
    ) -> Work:
        call = self._call(opts, timeout=timeout)
        return self._start(call, operations.all_to_all(self._raw, output, tensor, output_splits, input_splits))

    @dispatched
    def barrier(self, opts: Any = None, timeout: Any = None) -> Work:
        """Completes when every rank has called it."""
        return self._start(self._call(opts, timeout=timeout), operations.barrier(self._raw))

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Blocks until every rank has called it. After a timeout, the error names all missing ranks, and the group
        ends."""
        self._require_backend("monitored_barrier")
        begin = operations.barrier(self._raw).begin
        # A timeout of zero is a limit here, and does not mean the group's timeout.
        begin(False, 0.0 if timeout is not None and not timeout else self._limit(timeout))

    @dispatched
    def send(self, tensors: Any, dst: int, tag: int = 0) -> Work:
        """Sends a tensor to a rank, independently of collectives."""
        peer = self._peer(dst)
        return self._message(operations.send(self._raw, _one(tensors, "send"), peer, tag))

    @dispatched
    def recv(self, tensors: Any, src: int, tag: int = 0) -> Work:
        """Receives the next message with this tag from rank ``src``."""
        return self._receive(_one(tensors, "recv"), self._peer(src), tag)

    @dispatched
    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        """Receives the next message with this tag from any rank, which becomes ``source_rank`` of the Work."""
        return self._receive(_one(tensors, "recv"), None, tag)

    def _receive(self, tensor: Any, src: int | None, tag: int) -> Work:
        return self._message(operations.receive(self._raw, tensor, src, tag))

    def _message(self, message: Operation) -> Work:
        with event(message.name, message.tensors):
            handle = message.begin(True, self._limit())
        return self._remember(Work(handle, message.result, devices=message.devices, name=message.name))

    def _peer(self, rank: int) -> int:
        if not 0 <= rank < self._raw.size:
            raise ValueError(f"rank {rank} is not in a group of {self._raw.size}")
        if rank == self._raw.rank:
            raise ValueError(f"rank {rank} is this rank itself: copy the tensor instead of sending it")
        return int(rank)

    def _start_coalescing(self, device_type: Any = None) -> None:
        """Combines the operations until :meth:`_end_coalescing` into one Work. The operations start at once."""
        if self._coalescing is not None:
            raise RuntimeError("coalescing has begun already")
        self._coalescing = []

    def _end_coalescing(self, device_type: Any = None) -> Work:
        """Returns the Work of all operations since :meth:`_start_coalescing`."""
        works, self._coalescing = self._coalescing, None
        if works is None:
            raise RuntimeError("coalescing has not begun")
        return self.together(works)

    @staticmethod
    def together(works: Sequence[Work]) -> Work:
        """Returns the Work of several operations, or the only one of them."""
        if len(works) == 1:
            return works[0]
        tensors = [tensor for work in works for tensor in work.result()]
        devices = [device for work in works for device in work.devices]
        together = Work(Handle([work.handle for work in works]), tensors, devices=devices, name="coalesced")
        together.parts = works

        def asked(_: Work) -> None:
            for work in works:
                work.asked()

        together.on_asked = asked
        return together

    @property
    def group_name(self) -> str:
        """torch's name of the group, the same on all its ranks."""
        return super().group_name if self._backend is not None else self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name
        super()._set_group_name(name)

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> BaguaProcessGroup | None:
        """Returns the group of some ranks of this one, in their order; None on a rank that is not among them."""
        if self.rank() not in ranks:
            return None
        self._require_backend("split_group")
        world_ranks = [self.world_ranks[rank] for rank in ranks]
        name = group_name or f"{self.group_name}/{','.join(map(str, ranks))}"
        store = c10d.PrefixStore(f"{name}/", self._store)
        child = self._factory.open_group(store, world_ranks, ranks.index(self.rank()), timeout or self._timeout)
        child._set_group_name(name)
        child._set_group_desc(group_desc or "undefined")
        return child

    def merge_remote_group(self, *args: Any, **kwargs: Any) -> Any:
        """Raises NotImplementedError: ranks join through ``init_process_group``."""
        raise NotImplementedError("the backend 'bagua' cannot merge groups: ranks join through init_process_group")

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout of later operations."""
        self._timeout = timeout

    def shutdown(self) -> None:
        """Leaves the group. Operations that are still running fail with AbortedError."""
        self._kept.clear()
        self._asked.clear()
        self._factory.ended(self)

    def abort(self) -> None:
        """Ends all waits of the group on every rank with AbortedError, and leaves the group."""
        self._kept.clear()
        self._asked.clear()
        self.bagua_group.abort("torch.distributed aborted the group")
        self._factory.ended(self)

    def name(self) -> str:
        """Returns "bagua"."""
        return "bagua"

    getBackendName = name

    def _wait_for_pending_works(self) -> None:
        """Does nothing, because no hook runs when a Work ends."""

    def _get_sequence_number_for_group(self) -> int:
        """Returns the number of operations that this rank has started."""
        return self._sequence

    def _set_sequence_number_for_group(self) -> None:
        """Does nothing, because every group counts from zero."""

    def _require_backend(self, what: str) -> None:
        if self._backend is None:
            raise NotImplementedError(f"{what} needs a torch whose Backend Python can subclass, such as 2.15")

    def _limit(self, timeout: Any = None) -> float:
        own = seconds(timeout)
        return self._timeout.total_seconds() if own is None else own

    def _call(self, opts: Any, *, op: Any = None, root: int | None = None, timeout: Any = None) -> _Call:
        """Reads a call's options, or the arguments of torch's short forms, which may replace the options."""
        if isinstance(opts, (c10d.ReduceOp, c10d.ReduceOp.RedOpType)):
            op, opts = opts, None
        elif isinstance(opts, timedelta):
            timeout, opts = opts, None
        elif isinstance(opts, int):
            root, opts = opts, None
        return _Call(
            op=getattr(opts, "reduceOp", c10d.ReduceOp.RedOpType.SUM) if op is None else op,
            root=getattr(opts, "rootRank", 0) if root is None else root,
            timeout=self._limit(getattr(opts, "timeout", None) if timeout is None else timeout),
            async_op=getattr(opts, "asyncOp", True),
        )

    def _at_once(self, verb: verbs.Verb, opts: Any, src: Any, dst: Any) -> Any:
        """Runs a blocking collective, or starts an asynchronous one, on plain tensors of the host.

        Returns the Work of an asynchronous collective, and None for a blocking one, because making a Work would take
        half of the time of a small one. Returns NotImplemented, and does nothing, if the call needs more: copies, a
        timeout other than the group's, an event, or an error text.
        """
        is_async = getattr(opts, "asyncOp", None)
        if (
            is_async is None
            or is_observed()
            or profiled()
            or self._coalescing is not None
            or self._backend is None
            or self._timeout != self._cores_timeout
            or opts.timeout > _NO_TIME
        ):
            return NotImplemented
        op = CODES_BY_HASH.get(hash(opts.reduceOp)) if verb in _REDUCING else 0
        root = opts.rootRank if verb in _ROOTED else 0
        counts = reader if verb in _COUNTED else silent_reader
        self._sequence += 1
        if not is_async:
            if self._raw.try_run(verb.code, counts, src, dst, op, root):
                return None
        elif (handle := self._raw.try_begin(verb.code, counts, src, dst, op, root)) is not None:
            return self._begun(verb, handle, dst)
        self._sequence -= 1
        return NotImplemented

    def _begun(self, verb: verbs.Verb, handle: extension.Handle, tensor: torch.Tensor) -> Work:
        work = Work(handle, (tensor,), name=verb.name)
        if verb is verbs.ALL_REDUCE and tensor.numel() == 1:
            # See `_allreduce`.
            self._keep(work)
        return work

    def _start(self, call: _Call, *parts: Operation) -> Work:
        """Starts operations whose arguments have been checked."""
        result = [tensor for part in parts for tensor in part.result]
        devices = [device for part in parts for device in part.devices]
        self._sequence += 1
        if not parts:
            return self._remember(Work(None, result, devices=devices))
        name = parts[0].name
        with event(name, [tensor for part in parts for tensor in part.tensors]):
            handles = [part.begin(call.async_op, call.timeout) for part in parts]
        pending = None if not call.async_op else handles[0] if len(handles) == 1 else Handle(handles)
        return self._remember(Work(pending, result, devices=devices, name=name))

    def _remember(self, work: Work) -> Work:
        if self._coalescing is not None:
            self._coalescing.append(work)
        if self._backend is None:
            self._keep(work)
        return work

    def _keep(self, work: Work) -> None:
        """Keeps a Work until a thread has waited for it."""
        while self._asked:
            self._kept.pop(self._asked.pop(), None)
        if len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)
        self._kept[work] = None
        work.on_asked = self._asked.append

    if not HAS_SINGLE:
        # The names before torch 2.12. Newer versions have both, and one calls the other.
        _allgather_base = all_gather_single
        allgather_into_tensor_coalesced = all_gather_single_coalesced
        _reduce_scatter_base = reduce_scatter_single
        reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
        gather_into_tensor = gather_single
        alltoall_base = all_to_all_single
    start_coalescing, end_coalescing = _start_coalescing, _end_coalescing
