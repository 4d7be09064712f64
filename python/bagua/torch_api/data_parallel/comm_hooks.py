"""Communication hooks: a user's function, or one of torch's, communicates the buckets of gradients.

As in torch's DistributedDataParallel, the thread that runs backward calls the hook for each bucket in order, as soon as
the bucket's gradients are computed, and waits for the hook's futures when backward ends. The future's value becomes the
gradient without any change, so the hook itself divides by the number of ranks.

On a CUDA device, the hook is called on that thread's current stream, after the gradients of its bucket. The current
stream at the end of backward waits for the future's value and for the work that the hook queued on its own stream.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from bagua.errors import BaguaError

from ..algorithms._policy import ExchangePolicy
from ..algorithms.base import WrappedModel
from ..algorithms.gradient_allreduce import GradientAllReduceAlgorithmImpl
from ..bucket import BaguaBucket
from ..model_engine.algorithm_interface import Exchange
from ..model_engine.gradients import GradientExchange, Slot
from ..model_engine.sparse import sparse_parameters
from ..tensor import effective, registration

__all__ = ["CommHook", "GradBucket", "HookedAllReduce", "check"]

#: A communication hook: called with the user's state and a bucket. Its future has the bucket's communicated buffer.
CommHook = Callable[[Any, Any], torch.futures.Future[Any]]

# Sizes of torch's buckets in bytes, the first one and the others. Hooks with a state per bucket then have the same
# state as in torch.
_FIRST_BUCKET = 1 << 20
_BUCKET = 25 << 20


class GradBucket:
    """The gradients of one bucket, with the methods of ``dist.GradBucket``, which only torch can construct."""

    def __init__(self, index: int, buffer: torch.Tensor, gradients: list[torch.Tensor], last: bool) -> None:
        self._index = index
        self._buffer = buffer
        self._gradients = gradients
        self._last = last
        self._parameters: list[torch.Tensor] = []

    def bucket_of(self, parameters: list[torch.Tensor]) -> GradBucket:
        """Sets the parameters that the gradients belong to, and returns the bucket."""
        self._parameters = parameters
        return self

    def index(self) -> int:
        """Returns the index of the bucket in the order of communication, from 0."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """Returns the gradients in one flat tensor."""
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        """Returns views of the buffer, one for each parameter."""
        return self._gradients

    def parameters(self) -> list[torch.Tensor]:
        """Returns the parameters, in the order of :meth:`gradients`."""
        return self._parameters

    def is_last(self) -> bool:
        """Returns True if no bucket follows in this backward."""
        return self._last

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Replaces the buffer that :meth:`buffer` returns."""
        self._buffer = tensor


def check(hook: Any) -> None:
    """Raises TypeError or ValueError for a hook that torch's DistributedDataParallel would refuse."""
    if not callable(hook):
        raise TypeError(f"a communication hook must be callable, not {type(hook).__name__}")
    try:
        signature = inspect.signature(hook, eval_str=True)
    except NameError:
        # The annotations cannot be read if they name types that are imported for type checkers only.
        return
    bucket = signature.parameters.get("bucket")
    if bucket is None:
        raise ValueError("a communication hook must have the arguments state and bucket")
    torchs = dist.GradBucket  # type: ignore[attr-defined]
    if bucket.annotation not in (inspect.Parameter.empty, Any, torchs, GradBucket):
        raise ValueError(f"a communication hook's bucket must be a dist.GradBucket, not {bucket.annotation!r}")
    if signature.return_annotation not in (inspect.Signature.empty, Any, torch.futures.Future[torch.Tensor]):
        raise ValueError(
            f"a communication hook must return torch.futures.Future[torch.Tensor], not {signature.return_annotation!r}"
        )


@dataclass
class _Bucket:
    """One bucket and its state in this backward."""

    bucket: BaguaBucket
    # Number of gradients that are not computed yet.
    missing: int
    future: torch.futures.Future[Any] | None = None
    # On a CUDA device, the streams on which gradients were computed. After the hook was called, only the hook's stream.
    streams: list[torch.cuda.Stream] = field(default_factory=list)

    def order(self) -> None:
        """Makes the current stream wait for ``streams``, and keeps only the current stream."""
        for device in {stream.device for stream in self.streams}:
            here = torch.cuda.current_stream(device)
            for stream in self.streams:
                if stream != here:
                    here.wait_stream(stream)
            self.streams = [here]


class HookExchange(GradientExchange):
    """Gradients whose buckets are communicated by a hook instead of the engine."""

    uses_buckets = False

    def __init__(self, bagua_ddp: WrappedModel, hook: CommHook, state: Any, as_views: bool) -> None:
        super().__init__(bagua_ddp)
        self._hook = hook
        self._state = state
        self._as_views = as_views
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[str, _Bucket] = {}
        # Number of buckets that the hook was called for in this backward.
        self._called = 0

    def bind(self, buckets: Sequence[BaguaBucket]) -> None:
        """Like :meth:`Exchange.bind`."""
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
        future = self._hook(self._state, shown.bucket_of([slot.param for slot in slots]))
        if not isinstance(future, torch._C.Future):
            raise TypeError(f"a communication hook must return a torch.futures.Future, not {type(future).__name__}")
        return future

    def _wait(self) -> None:
        for each in self._buckets:
            if each.future is None:
                raise BaguaError(f"gradients of bucket {each.bucket.name!r} of model {self._module_name!r} are missing")
            value = each.future.wait()
            each.order()
            found = value[0] if isinstance(value, (list, tuple)) else value
            memory = each.bucket.memory
            assert memory is not None
            found = found.detach().view(memory.own.shape)
            if found.data_ptr() != memory.own.data_ptr():
                memory.own.copy_(found)

    def _completed(self, nowhere: set[str], divisor: float) -> None:
        if self._as_views:
            return
        for slot in self._slots.values():
            if slot.param.grad is not None and slot.param.grad is slot.grad:
                slot.param.grad = slot.grad.clone()

    def abandon(self) -> None:
        """Like :meth:`Exchange.abandon`. Communication that the hook began has no effect."""
        self._reset()

    def _reset(self) -> None:
        super()._reset()
        self._called = 0
        for each in self._buckets:
            each.missing, each.future, each.streams = len(each.bucket.tensors), None, []


class HookedAllReduce(GradientAllReduceAlgorithmImpl):
    """gradient_allreduce with a hook that communicates the buckets."""

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

    def _policy(self) -> ExchangePolicy:
        return ExchangePolicy(make_exchange=self._make_exchange, sparse_op=super()._policy().sparse_op)

    def _make_exchange(self, bagua_ddp: WrappedModel) -> Exchange:
        """Exchanges gradients through the hook. Raises NotImplementedError for sparse gradients."""
        sparse = sparse_parameters(bagua_ddp.module.modules(), bagua_ddp.parameters)
        if sparse:
            raise NotImplementedError(f"communication hooks do not support sparse gradients, as of {sparse[0][0]!r}")
        return HookExchange(bagua_ddp, self._hook, self._state, self._as_views)

    def init_tensors(self, bagua_ddp: WrappedModel) -> list[torch.Tensor]:
        """Like :meth:`AlgorithmImpl.init_tensors`."""
        self._order = super().init_tensors(bagua_ddp)
        return self._order

    def tensors_to_buckets(self, tensors: Sequence[Sequence[torch.Tensor]], do_flatten: bool) -> list[BaguaBucket]:
        """Makes the buckets that torch's DistributedDataParallel has after its first step."""
        return super().tensors_to_buckets(_as_torch(self._order, self._limits), True)

    def init_operations(self, bagua_ddp: WrappedModel, bucket: BaguaBucket) -> None:
        """Appends no operation, because the hook communicates."""
        bucket.clear_ops()


def _as_torch(tensors: Sequence[torch.Tensor], limits: tuple[int, int]) -> list[list[torch.Tensor]]:
    """Splits tensors into buckets. A bucket ends with the tensor that reaches the limit; the first bucket of a dtype
    has its own limit.
    """
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
