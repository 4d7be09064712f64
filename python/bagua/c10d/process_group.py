"""The process group that torch.distributed calls.

torch's holder around the Work of a Python Backend hands on `wait` and `get_future` alone, while the methods of a
ProcessGroup's subclass return our Work itself. So the subclass has the verbs; the Backend (`backend.py`), registered
on it, brings device types, the group's name and calls from C++.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch

from bagua import verbs
from bagua.group import Group
from bagua.handle import Handle
from bagua.lifecycle import at_exit
from bagua.torch_operand import reader, silent_reader

from . import operations, sparse
from .backend import register, without_support
from .compiler_disable import uncompiled
from .dispatch import HAS_SINGLE, PLAIN, dispatched, is_observed
from .operations import Operation
from .profiling import event, profiled
from .reductions import CODES_BY_HASH
from .torch_bindings import c10d
from .work import DoneWork, Work, seconds

__all__ = ["BaguaProcessGroup", "GroupFactory"]

_NO_TIME = timedelta(0)
_REDUCING = (verbs.ALL_REDUCE, verbs.REDUCE, verbs.REDUCE_SCATTER)
_ROOTED = (verbs.REDUCE, verbs.BROADCAST)
#: Verbs that increment the version counter of their output, as gloo's do.
_COUNTED = (verbs.ALL_GATHER, verbs.REDUCE_SCATTER)
#: So many Works are kept at most that no thread waits for.
_MOST_KEPT = 1000


@dataclass
class _Call:
    """What the options of a verb say."""

    op: Any
    root: int
    timeout: float
    async_op: bool


def _one(tensors: Any, what: str) -> Any:
    """The only tensor of a list, or the tensor itself."""
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
        """The group of these world ranks, of which this process is the `rank`-th."""

    def ended(self, group: BaguaProcessGroup) -> None:
        """Leaves a group. Idempotent."""


@uncompiled
@without_support
class BaguaProcessGroup(c10d.ProcessGroup):  # type: ignore[misc]
    """The ranks of one group of torch.distributed. `ranks` are ranks of torch's world, by rank in the group."""

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
        #: The same ranks in Bagua's own API.
        self.bagua_group = group
        #: Ranks of torch's world.
        self.world_ranks = list(ranks)
        self._raw = group.communicator
        # That of the core's operations.
        self._cores_timeout = timedelta(seconds=self._raw.timeout)
        self._store = store
        self._timeout = timeout
        self._factory = factory
        self._sequence = 0
        # Works that were started since _start_coalescing.
        self._coalescing: list[Work] | None = None
        # The Python half of the Backend, which torch's C++ code may not keep.
        self._backend = register(self)
        # Where torch has no such Backend, and where torch's code hands a Work to C++ code, only its C++ half is kept,
        # which waits for ever without the other half: such Works that no thread has waited for, oldest first; and those
        # of them that one has waited for since the last operation.
        self._kept: OrderedDict[Work, None] = OrderedDict()
        self._asked: list[Work] = []
        if self._backend is None:
            # Such a torch does not call `shutdown` when the group is destroyed.
            at_exit(self._kept.clear)
            at_exit(self._asked.clear)
        # And has no place for the name.
        self._name = ""

    # --- every rank combines ------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, *, op: Any = None, timeout: Any = None) -> Work:
        """Every rank gets the reduction of all tensors, in place; a sparse one by SUM."""
        if op is timeout:
            done = self._at_once(verbs.ALL_REDUCE, opts, None, _one(tensors, "all_reduce"))
            return done or self._allreduce(tensors, opts)
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
            # DDP's reducer gets the count of ranks that are not out of inputs so, and is the only one to keep it.
            self._keep(work)
        return work

    def allreduce_sparse(self, tensors: Any, opts: Any = None) -> Work:
        """As :meth:`allreduce`."""
        return self.allreduce(tensors, opts)

    @dispatched
    def allreduce_coalesced(self, tensors: Sequence[Any], opts: Any = None) -> Work:
        """As :meth:`allreduce` of each tensor."""
        call = self._call(opts)
        parts = [operations.all_reduce(self._raw, tensor, call.op, is_coalesced=True) for tensor in tensors]
        return self._start(call, *parts)

    def reduce(
        self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None, *, root: int | None = None
    ) -> Work:
        """The root gets the reduction of all tensors, in place."""
        if op is timeout is root:
            done = self._at_once(verbs.REDUCE, opts, None, _one(tensors, "reduce"))
            return done or self._reduce(tensors, opts)
        return self._reduce(tensors, opts, op=op, timeout=timeout, root=root)

    @dispatched
    def _reduce(self, tensors: Any, opts: Any, *, op: Any = None, timeout: Any = None, root: int | None = None) -> Work:
        call = self._call(opts, op=op, root=root, timeout=timeout)
        return self._start(call, operations.reduce(self._raw, _one(tensors, "reduce"), call.op, call.root))

    @dispatched
    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, *, op: Any = None, timeout: Any = None
    ) -> Work:
        """Rank r gets the reduction of every rank's r-th tensor."""
        call = self._call(opts, op=op, timeout=timeout)
        lists = inputs if isinstance(outputs, torch.Tensor) else _one(inputs, "reduce_scatter")
        output = _one(outputs, "reduce_scatter")
        return self._start(call, operations.reduce_scatter_list(self._raw, output, lists, call.op))

    def reduce_scatter_single(self, output: Any, tensor: Any, opts: Any = None) -> Work:
        """Rank r gets the reduction of every rank's r-th part."""
        if done := self._at_once(verbs.REDUCE_SCATTER, opts, tensor, output):
            return done
        return self._reduce_scatter_single(output, tensor, opts)

    @dispatched
    def _reduce_scatter_single(self, output: Any, tensor: Any, opts: Any) -> Work:
        call = self._call(opts)
        return self._start(call, operations.reduce_scatter(self._raw, output, tensor, call.op))

    @dispatched
    def reduce_scatter_single_coalesced(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> Work:
        """As :meth:`reduce_scatter_single` of each pair."""
        call = self._call(opts)
        pairs = zip(outputs, inputs, strict=True)
        return self._start(call, *(operations.reduce_scatter(self._raw, out, x, call.op) for out, x in pairs))

    # --- tensors move -------------------------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None, *, root: int | None = None) -> Work:
        """Every rank gets the root's tensor, in place."""
        if timeout is root:
            done = self._at_once(verbs.BROADCAST, opts, None, _one(tensors, "broadcast"))
            return done or self._broadcast(tensors, opts)
        return self._broadcast(tensors, opts, timeout=timeout, root=root)

    @dispatched
    def _broadcast(self, tensors: Any, opts: Any, *, timeout: Any = None, root: int | None = None) -> Work:
        call = self._call(opts, root=root, timeout=timeout)
        return self._start(call, operations.broadcast(self._raw, _one(tensors, "broadcast"), call.root))

    @dispatched
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Work:
        """Every rank gets every rank's tensor, in a list by rank."""
        call = self._call(opts, timeout=timeout)
        lists = outputs if isinstance(inputs, torch.Tensor) else _one(outputs, "all_gather")
        return self._start(call, operations.all_gather_list(self._raw, lists, _one(inputs, "all_gather")))

    def all_gather_single(self, output: Any, tensor: Any, opts: Any = None) -> Work:
        """Every rank gets every rank's tensor, one after the other."""
        if done := self._at_once(verbs.ALL_GATHER, opts, tensor, output):
            return done
        return self._all_gather_single(output, tensor, opts)

    @dispatched
    def _all_gather_single(self, output: Any, tensor: Any, opts: Any) -> Work:
        return self._start(self._call(opts), operations.all_gather(self._raw, output, tensor))

    @dispatched
    def allgather_coalesced(self, outputs: Sequence[Sequence[Any]], inputs: Sequence[Any], opts: Any = None) -> Work:
        """As :meth:`allgather` of each input; `outputs` has a list for each rank."""
        if any(len(of_rank) != len(inputs) for of_rank in outputs):
            raise ValueError(f"each of the output lists needs {len(inputs)} tensors, one for each input")
        by_input = [[of_rank[i] for of_rank in outputs] for i in range(len(inputs))]
        pairs = zip(by_input, inputs, strict=True)
        return self._start(self._call(opts), *(operations.all_gather_list(self._raw, out, x) for out, x in pairs))

    @dispatched
    def all_gather_single_coalesced(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> Work:
        """As :meth:`all_gather_single` of each pair."""
        pairs = zip(outputs, inputs, strict=True)
        return self._start(self._call(opts), *(operations.all_gather(self._raw, out, x) for out, x in pairs))

    @dispatched
    def gather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, *, root: int | None = None
    ) -> Work:
        """The root gets every rank's tensor, in a list by rank."""
        call = self._call(opts, root=root, timeout=timeout)
        nested = not isinstance(inputs, torch.Tensor)
        lists: Sequence[Any] = (outputs[0] if outputs else []) if nested else outputs
        return self._start(call, operations.gather_list(self._raw, lists, _one(inputs, "gather"), call.root))

    @dispatched
    def gather_single(self, output: Any, tensor: Any, opts: Any = None) -> Work:
        """The root gets every rank's tensor, one after the other."""
        call = self._call(opts)
        return self._start(call, operations.gather(self._raw, output, tensor, call.root))

    @dispatched
    def scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, *, root: int | None = None
    ) -> Work:
        """Rank r gets the root's r-th tensor."""
        call = self._call(opts, root=root, timeout=timeout)
        nested = not isinstance(outputs, torch.Tensor)
        lists: Sequence[Any] = (inputs[0] if inputs else []) if nested else inputs
        return self._start(call, operations.scatter(self._raw, _one(outputs, "scatter"), lists, call.root))

    @dispatched
    def alltoall(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> Work:
        """Rank r gets every rank's r-th tensor, in a list by rank."""
        return self._start(self._call(opts), operations.all_to_all_list(self._raw, outputs, inputs))

    def all_to_all_single(
        self,
        output: Any,
        tensor: Any,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        opts: Any = None,
        timeout: Any = None,
    ) -> Work:
        """Rank r gets the r-th part of every rank's tensor."""
        alike = not (timeout or output_splits or input_splits)
        # The core divides elements, and torch rows.
        alike = alike and operations.has_equal_parts((tensor, output), self._raw.size)
        if alike and (done := self._at_once(verbs.ALL_TO_ALL, opts, tensor, output)):
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
        """Done when every rank has called it."""
        return self._start(self._call(opts, timeout=timeout), operations.barrier(self._raw))

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Returns when every rank has called it. BaguaTimeoutError names all ranks that have not; it ends the group."""
        self._require_backend("monitored_barrier")
        begin = operations.barrier(self._raw).begin
        # No time at all is a time limit here, and not the group's timeout.
        begin(False, 0.0 if timeout is not None and not timeout else self._limit(timeout))

    # --- messages -----------------------------------------------------------------------------------------------------

    @dispatched
    def send(self, tensors: Any, dst: int, tag: int = 0) -> Work:
        """Sends a tensor to a rank, beside the collectives."""
        peer = self._peer(dst)
        return self._message(operations.send(self._raw, _one(tensors, "send"), peer, tag))

    @dispatched
    def recv(self, tensors: Any, src: int, tag: int = 0) -> Work:
        """Receives a rank's next message with this tag."""
        return self._receive(_one(tensors, "recv"), self._peer(src), tag)

    @dispatched
    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        """Receives the next message with this tag from any rank, which is the Work's `source_rank`."""
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

    # --- coalescing ---------------------------------------------------------------------------------------------------

    def _start_coalescing(self, device_type: Any = None) -> None:
        """The operations until :meth:`_end_coalescing` become one Work. They begin at once."""
        if self._coalescing is not None:
            raise RuntimeError("coalescing has begun already")
        self._coalescing = []

    def _end_coalescing(self, device_type: Any = None) -> Work:
        """The Work of all operations since :meth:`_start_coalescing`."""
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

    # --- the group ----------------------------------------------------------------------------------------------------

    @property
    def group_name(self) -> str:
        """What torch calls the group, the same on all its ranks."""
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
        """The group of some ranks of this one, in their order; None on a rank that is not among them."""
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
        """NotImplementedError: ranks join by `init_process_group`."""
        raise NotImplementedError("the backend 'bagua' merges no groups: ranks join by init_process_group")

    def set_timeout(self, timeout: timedelta) -> None:
        """The deadline of later operations."""
        self._timeout = timeout

    def shutdown(self) -> None:
        """Leaves the group. Operations that still run fail with AbortedError."""
        self._kept.clear()
        self._asked.clear()
        self._factory.ended(self)

    def abort(self) -> None:
        """Ends every wait of the group, on every rank, with AbortedError; and leaves it."""
        self._kept.clear()
        self._asked.clear()
        self.bagua_group.abort("torch.distributed aborted the group")
        self._factory.ended(self)

    def name(self) -> str:
        """ "bagua"."""
        return "bagua"

    getBackendName = name

    def _wait_for_pending_works(self) -> None:
        """Nothing: no hook runs when a Work ends."""

    def _get_sequence_number_for_group(self) -> int:
        """How many operations this rank has started."""
        return self._sequence

    def _set_sequence_number_for_group(self) -> None:
        """Nothing: every group counts from zero."""

    def _require_backend(self, what: str) -> None:
        if self._backend is None:
            raise NotImplementedError(f"{what} needs a torch whose Backend Python can subclass, such as 2.15")

    # --- how an operation starts --------------------------------------------------------------------------------------

    def _limit(self, timeout: Any = None) -> float:
        own = seconds(timeout)
        return self._timeout.total_seconds() if own is None else own

    def _call(self, opts: Any, *, op: Any = None, root: int | None = None, timeout: Any = None) -> _Call:
        """From options, or from the arguments of torch's short forms, whose first one may replace the options."""
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

    def _at_once(self, verb: verbs.Verb, opts: Any, src: Any, dst: Any) -> Work | None:
        """Runs a blocking verb, or begins an asynchronous one in place, on plain tensors of the host.

        None, and nothing is done, where it takes more: copies, another timeout than the group's, an event, an error
        text. A small all_reduce then costs a third.
        """
        is_async = getattr(opts, "asyncOp", None)
        if (
            is_async is None
            or (is_async and src is not None)
            or type(dst) not in PLAIN
            or is_observed()
            or profiled()
            or self._coalescing is not None
            or self._backend is None
            or self._timeout != self._cores_timeout
            or opts.timeout > _NO_TIME
        ):
            return None
        op = CODES_BY_HASH.get(hash(opts.reduceOp)) if verb in _REDUCING else 0
        root = opts.rootRank if verb in _ROOTED else 0
        if is_async:
            return self._begun(verb, dst, op, root)
        tensor = dst
        if verb.compares_shapes and dst.dim() != 1:
            # Shapes may differ between ranks.
            if dst.layout != torch.strided or dst.is_nested or not dst.is_contiguous():
                return None
            dst = dst.detach().view(-1)
        self._sequence += 1
        if self._raw.try_run(verb.code, reader if verb in _COUNTED else silent_reader, src, dst, op, root):
            done: DoneWork = DoneWork()
            done._result = [tensor]
            return done
        self._sequence -= 1
        return None

    def _begun(self, verb: verbs.Verb, tensor: torch.Tensor, op: int | None, root: int) -> Work | None:
        """Begins a verb in place. None, and nothing is done, where the tensor has to be copied, or an error is due."""
        found = silent_reader.at(tensor)
        if found is None or op is None or not 0 <= root < self._raw.size:
            return None
        address, count, dtype, _, _ = found
        if verb in _REDUCING and not verbs.is_defined(op, dtype):
            return None
        self._sequence += 1
        handle = self._raw.run(verb.code, None, address, count, dtype, op, root, async_op=True, keep=tensor)
        work = Work(handle, (tensor,), name=verb.name)
        if count == 1 and verb is verbs.ALL_REDUCE:
            # See `_allreduce`.
            self._keep(work)
        return work

    def _start(self, call: _Call, *parts: Operation) -> Work:
        """Begins operations whose arguments have all been checked."""
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
        """Keeps it until a thread has waited for it."""
        while self._asked:
            self._kept.pop(self._asked.pop(), None)
        if len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)
        self._kept[work] = None
        work.on_asked = self._asked.append

    if not HAS_SINGLE:
        # torch's names before 2.12. Newer releases have both, of which one calls the other.
        _allgather_base = all_gather_single
        allgather_into_tensor_coalesced = all_gather_single_coalesced
        _reduce_scatter_base = reduce_scatter_single
        reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
        gather_into_tensor = gather_single
        alltoall_base = all_to_all_single
    start_coalescing, end_coalescing = _start_coalescing, _end_coalescing
