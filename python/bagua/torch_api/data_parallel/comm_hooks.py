"""Communication hooks, torch's own among them: a user's function communicates the buckets of gradients.

A hook is called as torch's DistributedDataParallel calls it: for one bucket after the other, on the thread that runs
backward, as soon as the bucket's gradients are there; its futures are waited for when backward ends. What it returns
becomes the gradient as it is: a hook divides by the number of ranks itself.

On a CUDA device a hook is called on the current stream of that thread, behind the gradients of its bucket. The stream
that is current at the end of the backward is ordered after the future's value, and after what the hook put on its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from bagua.errors import BaguaError

from ..algorithms.base import WrappedModel
from ..algorithms.gradient_allreduce import GradientAllReduceAlgorithmImpl
from ..bucket import BaguaBucket
from ..model_engine.exchange_interface import Exchange
from ..model_engine.gradients import GradientExchange, Slot
from ..model_engine.sparse import sparse_parameters
from ..tensor import effective, registration

__all__ = ["CommHook", "GradBucket", "HookedAllReduce", "check"]

#: Called with its state and a bucket; the future's value is the bucket's communicated buffer.
CommHook = Callable[[Any, Any], torch.futures.Future[Any]]

# Sizes of torch's buckets, by which a hook with a state per bucket has the same state as there: bytes of the first one
# and of the others.
_FIRST_BUCKET = 1 << 20
_BUCKET = 25 << 20


class GradBucket:
    """The gradients of one bucket, with the methods of torch's ``dist.GradBucket``, which only torch can make."""

    def __init__(self, index: int, buffer: torch.Tensor, gradients: list[torch.Tensor], last: bool) -> None:
        self._index = index
        self._buffer = buffer
        self._gradients = gradients
        self._last = last
        self._parameters: list[torch.Tensor] = []

    def of(self, parameters: list[torch.Tensor]) -> GradBucket:
        """The same bucket with the parameters that its gradients belong to."""
        self._parameters = parameters
        return self

    def index(self) -> int:
        """Index of the bucket in the order of communication, from 0."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """The gradients in one flat tensor."""
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        """Views of the buffer, one for each parameter."""
        return self._gradients

    def parameters(self) -> list[torch.Tensor]:
        """The parameters, in the order of :meth:`gradients`."""
        return self._parameters

    def is_last(self) -> bool:
        """Whether no bucket follows in this backward."""
        return self._last

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Replaces the buffer that :meth:`buffer` returns."""
        self._buffer = tensor


def check(hook: Any) -> None:
    """TypeError and ValueError for what torch's DistributedDataParallel takes for no communication hook."""
    if not callable(hook):
        raise TypeError(f"a communication hook must be callable, not {type(hook).__name__}")
    try:
        signature = inspect.signature(hook, eval_str=True)
    except NameError:
        # Imported for type checkers only.
        return
    bucket = signature.parameters.get("bucket")
    if bucket is None:
        raise ValueError("a communication hook has the arguments state and bucket")
    torchs = dist.GradBucket  # type: ignore[attr-defined]
    if bucket.annotation not in (inspect.Parameter.empty, Any, torchs, GradBucket):
        raise ValueError(f"a communication hook's bucket is a dist.GradBucket, not {bucket.annotation!r}")
    if signature.return_annotation not in (inspect.Signature.empty, Any, torch.futures.Future[torch.Tensor]):
        raise ValueError(
            f"a communication hook returns torch.futures.Future[torch.Tensor], not {signature.return_annotation!r}"
        )


@dataclass
class _Bucket:
    """One bucket and what has become of it in this backward."""

    bucket: BaguaBucket
    # Gradients that have not come.
    missing: int
    # What the hook returned.
    future: torch.futures.Future[Any] | None = None
    # On a CUDA device: on which streams gradients have come; when the hook was called, its stream alone.
    streams: list[torch.cuda.Stream] = field(default_factory=list)

    def order(self) -> None:
        """Orders the current stream behind `streams`, of which it becomes the only one."""
        for device in {stream.device for stream in self.streams}:
            here = torch.cuda.current_stream(device)
            for stream in self.streams:
                if stream != here:
                    here.wait_stream(stream)
            self.streams = [here]


class HookExchange(GradientExchange):
    """Gradients whose buckets a hook communicates instead of the engine."""

    uses_buckets = False

    def __init__(self, bagua_ddp: WrappedModel, hook: CommHook, state: Any, as_views: bool) -> None:
        super().__init__(bagua_ddp)
        self._hook = hook
        self._state = state
        self._as_views = as_views
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[str, _Bucket] = {}
        # How many buckets the hook was called for in this backward.
        self._called = 0

    def bind(self, buckets: Sequence[BaguaBucket]) -> None:
        """See :meth:`Exchange.bind`."""
        super().bind(buckets)
        self._buckets = [_Bucket(bucket, len(bucket.tensors)) for bucket in buckets]
        self._bucket_of = {registration(tensor).name: each for each in self._buckets for tensor in each.bucket.tensors}

    def _mark(self, slot: Slot, wire: torch.Tensor | None) -> None:
        of = self._bucket_of[slot.name]
        of.missing -= 1
        if slot.param.is_cuda:
            stream = torch.cuda.current_stream(slot.param.device)
            if stream not in of.streams:
                of.streams.append(stream)
        while self._called < len(self._buckets) and self._buckets[self._called].missing == 0:
            self._buckets[self._called].future = self._call(self._called)
            self._called += 1

    def _call(self, index: int) -> torch.futures.Future[Any]:
        self._buckets[index].order()
        bucket = self._buckets[index].bucket
        assert bucket.backend_tensor is not None
        slots = [self._slots[registration(tensor).name] for tensor in bucket.tensors]
        views = [slot.place.tensor() for slot in slots if slot.place is not None]
        shown = GradBucket(index, bucket.backend_tensor, views, index == len(self._buckets) - 1)
        future = self._hook(self._state, shown.of([slot.param for slot in slots]))
        if not isinstance(future, torch._C.Future):
            raise TypeError(f"a communication hook returns a torch.futures.Future, not {type(future).__name__}")
        return future

    def _wait(self) -> None:
        for each in self._buckets:
            if each.future is None:
                raise BaguaError(f"the gradients of bucket {each.bucket.name!r} of {self._module_name!r} did not come")
            value = each.future.wait()
            each.order()
            found = value[0] if isinstance(value, (list, tuple)) else value
            memory = each.bucket.memory
            assert memory is not None
            found = found.detach().view(memory.own.shape)
            if found.data_ptr() != memory.own.data_ptr():
                memory.own.copy_(found)

    def _completed(self, nowhere: set[str]) -> None:
        if self._as_views:
            return
        for slot in self._slots.values():
            if slot.param.grad is not None and slot.param.grad is slot.grad:
                slot.param.grad = slot.grad.clone()

    def abandon(self) -> None:
        """See :meth:`Exchange.abandon`. What the hook began ends without effect."""
        self._reset()

    def _reset(self) -> None:
        super()._reset()
        self._called = 0
        for each in self._buckets:
            each.missing, each.future, each.streams = len(each.bucket.tensors), None, []


class HookedAllReduce(GradientAllReduceAlgorithmImpl):
    """gradient_allreduce whose buckets a hook communicates."""

    def __init__(
        self, plain: GradientAllReduceAlgorithmImpl, hook: CommHook, state: Any, cap: int | None, as_views: bool
    ) -> None:
        super().__init__(plain.process_group)
        self.hierarchical, self.average = plain.hierarchical, plain.average
        self._limits = (_FIRST_BUCKET, _BUCKET) if cap is None else (cap, cap)
        self._hook = hook
        self._state = state
        self._as_views = as_views
        self._order: list[torch.Tensor] = []

    def make_exchange(self, bagua_ddp: WrappedModel) -> Exchange:
        """See :meth:`AlgorithmImpl.make_exchange`."""
        sparse = sparse_parameters(bagua_ddp.module, bagua_ddp.parameters)
        if sparse:
            raise NotImplementedError(f"a communication hook for sparse gradients, which {sparse[0][0]!r} has")
        return HookExchange(bagua_ddp, self._hook, self._state, self._as_views)

    def init_tensors(self, bagua_ddp: WrappedModel) -> list[torch.Tensor]:
        """See :meth:`AlgorithmImpl.init_tensors`."""
        self._order = super().init_tensors(bagua_ddp)
        return self._order

    def tensors_to_buckets(self, tensors: Sequence[Sequence[torch.Tensor]], do_flatten: bool) -> list[BaguaBucket]:
        """The buckets that torch's DistributedDataParallel has after its first step."""
        return super().tensors_to_buckets(_as_torch(self._order, self._limits), True)

    def init_operations(self, bagua_ddp: WrappedModel, bucket: BaguaBucket) -> None:
        """None: the hook does it."""
        bucket.clear_ops()


def _as_torch(tensors: Sequence[torch.Tensor], limits: tuple[int, int]) -> list[list[torch.Tensor]]:
    """Buckets that end with the tensor that reaches the limit, the first one of a dtype with a limit of its own."""
    closed: list[list[torch.Tensor]] = []
    filling: dict[torch.dtype, list[torch.Tensor]] = {}
    sizes: dict[torch.dtype, int] = {}
    limit_of: dict[torch.dtype, int] = {}
    for tensor in tensors:
        values = effective(tensor)
        kind = values.dtype
        filling.setdefault(kind, []).append(tensor)
        sizes[kind] = sizes.get(kind, 0) + values.numel() * values.element_size()
        if sizes[kind] >= limit_of.get(kind, limits[0]):
            closed.append(filling.pop(kind))
            sizes[kind], limit_of[kind] = 0, limits[1]
    return [*closed, *filling.values()]
