"""Asynchronous model averaging: ranks train alone while a thread of each rank averages the weights.

One round, every ``sync_interval_ms``:

1. Each rank that takes part copies its weights (the *snapshot*) under the weight lock.
2. The ranks average their snapshots. Training continues meanwhile.
3. Each rank adds average - snapshot to its weights, under the lock.

Training holds the lock while it uses the weights. A rank that did not train during the round ends up with exactly the
average; one that did keeps its progress. After Gan et al., VLDB 2021 (arXiv:2107.01499), section 3.3. The round is
implemented in ``rust/bagua-core/src/average``.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from bagua import extension, hints
from bagua.codecs import Compression, raw_codec
from bagua.errors import BaguaError, DeviceError, PeerLostError

from .. import devices
from ..bucket import BaguaBucket
from ..bucket_memory import BucketSlice, FlatMemory
from ..membership import elastic
from ..model_engine.algorithm_interface import Exchange
from ..model_engine.bucket_engine import AveragedMemory
from ..model_engine.sparse import exchange_gradients
from ..model_engine.weights import WeightTensors, check_floating
from ..process_group import DTYPES, Communicator, ProcessGroup, ReduceOp
from ._policy import ExchangePolicy, TrainingCallbacks
from .base import Algorithm, AlgorithmImpl, GlobalAlgorithmRegistry, WrappedModel, one_bucket_per_dtype

#: Seconds for which a round waits between a forward and its backward. After that, the round takes the lock.
_PAUSE = 1.0

#: Seconds after which an optimizer step counts as over if its end was not reported. That happens if the step raised and
#: the program keeps the exception, and with it the frames of the step.
_STEP = 60.0


def check_options(peer_selection_mode: str, sync_interval_ms: float, warmup_steps: int) -> None:
    """Raises ValueError for a mode other than "all", an interval that is not positive, or a negative warm-up."""
    if peer_selection_mode != "all":
        raise ValueError(f"peer_selection_mode of asynchronous averaging must be 'all', not {peer_selection_mode!r}")
    if not sync_interval_ms > 0:
        raise ValueError(f"sync_interval_ms must be positive, not {sync_interval_ms!r}")
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps must not be negative; got {warmup_steps!r}")


class _AveragedWeights(WeightTensors):
    """The weights in one bucket per dtype, which the averaging thread reads and writes."""

    def __init__(self, bagua_ddp: WrappedModel, algorithm: AsyncModelAverageAlgorithmImpl) -> None:
        super().__init__(bagua_ddp)
        self._algorithm = algorithm
        # True after the warning about memory shared with other processes.
        self._warned = False

    def bind(self, buckets: Sequence[BaguaBucket]) -> None:
        super().bind(buckets)
        # Otherwise the first forward would move back weights that are not dense, and lose earlier averages.
        self.move_back()
        self._algorithm._start(buckets)

    def before_load(self) -> None:
        """Raises BaguaError while this rank takes part in rounds.

        Ranks do not load at the same moment, so loaded weights would be averaged with weights of ranks that have not
        loaded yet.
        """
        self._algorithm._check_load()

    def have_moved(self) -> bool:
        """Returns True if the program gave a parameter other memory."""
        return not all(slot.in_place() for slot in self._slots)

    def move_back(self) -> None:
        """Moves parameters that the program gave other memory back to their buckets, with their current values.

        Call under the weight lock.
        """
        for slot in self._slots:
            assert slot.place is not None
            if not slot.place.holds(slot.param):
                self._warn_of_sharing(slot.name, slot.param)
                slot.place.put_back(slot.param)

    def _warn_of_sharing(self, name: str, param: torch.Tensor) -> None:
        if not self._warned and not param.is_cuda and param.untyped_storage().is_shared():
            self._warned = True
            hints.warn(
                f"parameter {name!r} of model {self._module_name!r} was moved to memory that other processes share "
                "(share_memory(), or a queue of torch.multiprocessing), and is back in its bucket now: they keep the "
                "values that it had; send them a copy each time",
                RuntimeWarning,
            )


class _Buffers:
    """The model's buffers in contiguous memory, from which a rank that joins the job copies them."""

    def __init__(self, ddp: WrappedModel) -> None:
        self._module = weakref.ref(ddp.module)
        self._places: dict[str, BucketSlice] = {}
        for name, buffer in ddp.module.named_buffers():
            if name not in ddp.parameters_to_ignore and buffer.numel():
                flat = FlatMemory(torch.empty(buffer.numel(), dtype=buffer.dtype, device=buffer.device))
                self._places[name] = BucketSlice(flat, buffer.contiguous(), 0)
        self.move_back()

    def memory(self) -> list[torch.Tensor]:
        """Returns one flat tensor per buffer."""
        return [place.own for place in self._places.values()]

    def move_back(self) -> None:
        module = self._module()
        for name, buffer in () if module is None else module.named_buffers():
            place = self._places.get(name)
            if place is not None and not place.holds(buffer):
                place.put_back(buffer)


class AsyncModelAverageAlgorithmImpl(AlgorithmImpl):
    """The implementation of :class:`AsyncModelAverageAlgorithm`, which is ``model.bagua_algorithm``."""

    peer_selection_mode: str
    sync_interval_ms: float
    warmup_steps: int
    compression: Compression

    def __init__(self, process_group: ProcessGroup, *options: Any, **named: Any) -> None:
        super().__init__(process_group, *options, **named)
        if elastic.rejoined():
            # A rank that rejoins a running job gets weights that are past the warm-up.
            self.warmup_steps = 0
        self._weights: _AveragedWeights | None = None
        self._lock = extension.WeightLock()
        self._averager: extension.Averager | None = None
        self._aborted = False
        self._ended = False
        # Number of completed steps of the first optimizer.
        self._steps = 0
        # Number of forwards with gradients whose backward has not ended, and the time (time.monotonic) until which they
        # keep the lock; None until the first of them has returned.
        self._awaited = 0
        self._awaited_until: float | None = None
        # Number of optimizer steps in progress; several if one optimizer calls another.
        self._stepping = 0
        # Keeps the memory alive that the averaging thread uses.
        self._memory: list[torch.Tensor] = []
        # Buffers that a joining rank gets; None outside elastic jobs.
        self._buffers: _Buffers | None = None
        # CUDA device of the weights, on which the lock orders streams; None for the host.
        self._device: torch.device | None = None

    @property
    def _warming(self) -> bool:
        return self._weights is None

    def _policy(self) -> ExchangePolicy:
        return ExchangePolicy(
            make_exchange=self._make_exchange,
            communicates=self._communicates,
            compared_step=self._compared_step,
            check_model=self._check_model,
            callbacks=TrainingCallbacks(
                before_forward=self._before_forward,
                after_forward=self._after_forward,
                before_backward=self._before_backward,
                after_backward=self._after_backward,
                before_optimizer_step=self._before_optimizer_step,
                after_optimizer_step=self._after_optimizer_step,
            ),
            close=self._close,
            read_state=self._read_state,
            pause=self._pause,
            can_rejoin=True,
            # Averages sparse gradients in the warm-up. Afterwards no gradients are exchanged.
            sparse_op=ReduceOp.AVG,
        )

    def _check_model(self, bagua_ddp: WrappedModel) -> None:
        """Raises ValueError without ``do_flatten``, or for a warm-up without an optimizer. Raises TypeError for
        parameters that are complex or that the codec cannot encode.
        """
        if not bagua_ddp.do_flatten:
            raise ValueError("asynchronous averaging needs the weights in buckets of their own: do_flatten=True")
        if self.warmup_steps and not bagua_ddp.bagua_optimizers:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} counts steps of the first optimizer, but with_bagua was given none"
            )
        parameters = bagua_ddp.bagua_build_params()
        check_floating(parameters)
        codec = raw_codec(self.compression)
        for name, param in parameters if codec is not None else ():
            try:
                assert codec is not None
                codec.encoded_bytes(param.numel(), DTYPES[param.dtype], 1)
            except TypeError as error:
                raise TypeError(f"parameter {name!r}: {error}") from error

    def need_reset(self) -> bool:
        """Returns True when the warm-up is over and weights are exchanged instead of gradients."""
        return self._warming and self._steps >= self.warmup_steps

    def _compared_step(self) -> int:
        """Returns the step of the warm-up, which all ranks end together."""
        return self._steps + 1

    def _communicates(self, step: int) -> bool:
        """Returns True during the warm-up. Later rounds do not belong to a step."""
        return self._warming

    def _make_exchange(self, bagua_ddp: WrappedModel) -> Exchange:
        """Exchanges gradients during the warm-up, and weights afterwards."""
        if self._steps < self.warmup_steps:
            return exchange_gradients(bagua_ddp, ReduceOp.AVG)
        return _AveragedWeights(bagua_ddp, self)

    def tensors_to_buckets(self, tensors: Sequence[Sequence[torch.Tensor]], do_flatten: bool) -> list[BaguaBucket]:
        """Makes the buckets of gradient_allreduce during the warm-up, and one bucket per dtype afterwards."""
        if self._steps < self.warmup_steps:
            return super().tensors_to_buckets(tensors, do_flatten)
        return one_bucket_per_dtype(tensors, do_flatten, self.process_group)

    def init_operations(self, bagua_ddp: WrappedModel, bucket: BaguaBucket) -> None:
        """Appends an all_reduce of gradients during the warm-up. Afterwards, appends the operation through which users
        lock, abort and reset.
        """
        bucket.clear_ops()
        if self._steps < self.warmup_steps:
            bucket.append_centralized_synchronous_op(average=True, group=self.process_group)
            return
        op = bucket.append_asynchronous_model_average_op(self.peer_selection_mode, self.process_group, lock=self._lock)
        op.control_by(
            lambda: self.abort(self.bagua_ddp), lambda: self.resume(self.bagua_ddp), lambda: str(self.stats()["state"])
        )

    def _start(self, buckets: Sequence[BaguaBucket]) -> None:
        """Starts the rounds, one interval from now. The weights are in their buckets and equal. Collective."""
        ddp = self.bagua_ddp
        assert isinstance(ddp.exchange, _AveragedWeights)
        self._weights = ddp.exchange
        weights = [bucket.memory.own for bucket in buckets if bucket.memory is not None]
        job = elastic.job()
        self._buffers = None if job is None else _Buffers(ddp)
        buffers = [] if self._buffers is None else self._buffers.memory()
        self._memory = weights + buffers
        described = AveragedMemory(weights, buffers, self._lock, job.join_server if job else None, ddp.digest)
        self._device = described.device
        interval, codec, limit = self.sync_interval_ms / 1000, raw_codec(self.compression), self._communicator().timeout
        if job is None or not job.rejoined:
            self._averager = ddp.backend.start_averager(described, interval, codec, not self._aborted)
        else:
            self._averager = ddp.backend.join_averager(described, interval, codec, limit)
            self._averager.wait_joined(limit)
            self._lock.order(**self._stream)
            ddp.bagua_train_step_counter = self._averager.forwards
            if self._aborted:
                self._averager.abort(limit)

    def _close(self) -> None:
        """Stops the averaging after the round in progress. Warns if no round has averaged the last steps."""
        self._lock.end_training(**self._stream)
        if self._averager is None or self._ended:
            return
        self._ended = True
        has_failed = self._has_failed()
        self._averager.stop(_PAUSE * 10)
        found = self._averager.stats()
        if found["unaveraged_steps"] and len(self._communicator().ranks) > 1 and not has_failed:
            hints.warn(
                f"{self.name} ended after {found['rounds']} averaging rounds, none of which averaged the last "
                f"{found['unaveraged_steps']} optimizer steps of this rank, so the ranks' weights differ: to end a "
                "training, call model.bagua_algorithm.synchronize(model) and model.bagua_algorithm.abort(model) on all "
                "ranks",
                RuntimeWarning,
            )

    def _has_failed(self) -> bool:
        """Returns True if the averaging or its group has failed. A rank that ended before this one is not a failure."""
        assert self._averager is not None
        for check in (self._averager.check, self._communicator().cause):
            try:
                check()
            except BaguaError as error:
                if not (isinstance(error, PeerLostError) and "left the group" in error.reason):
                    return True
        return False

    @property
    def _stream(self) -> dict[str, Any]:
        """The lock's arguments: torch's current stream if the weights are on a CUDA device."""
        return devices.stream_options(self._device)

    def _before_forward(self, with_grad: bool) -> None:
        """Takes the lock for each forward. In training, raises errors of the averaging."""
        if self._weights is None or self._averager is None:
            return
        if with_grad:
            try:
                self._averager.check()
            except DeviceError as error:
                # No other rank has this error.
                self.bagua_ddp.backend.reported(error)
                raise
            if elastic.job() is None:
                # The averaging may not notice that a rank was lost or raised.
                self._communicator().cause()
            self._averager.set_forwards(self.bagua_ddp.bagua_train_step_counter)
        self._lock.begin_training(**self._stream)
        if with_grad:
            if not self._awaited:
                self._awaited_until = None
            self._awaited += 1
            self._move_back()

    def _move_back(self) -> None:
        """Moves parameters and buffers back to the memory that the averaging thread uses. Call under the lock."""
        if self._weights is not None:
            self._weights.move_back()
        if self._buffers is not None:
            self._buffers.move_back()

    def _after_forward(self, output: Any) -> None:
        """Keeps the lock for the backward, for a second, if the forward had gradients. Otherwise releases it."""
        if self._averager is None:
            return
        if self._awaited_until is None:
            self._awaited_until = time.monotonic() + _PAUSE
        self._release()

    def _before_backward(self) -> None:
        """Takes the lock again if a round took it since the forward."""
        if self._averager is not None:
            self._lock.begin_training(**self._stream)

    def _after_backward(self) -> None:
        self._awaited = max(0, self._awaited - 1)
        if self._averager is not None:
            self._release()

    def _before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._averager is not None:
            self._lock.begin_training(**self._stream)
            self._move_back()
        self._stepping += 1
        if self._averager is not None:
            self._release()

    def _after_optimizer_step(self) -> None:
        """Releases the lock, also for forwards before the step. Their backward would be wrong after the step anyway."""
        self._stepping = max(0, self._stepping - 1)
        self._awaited = 0
        if self._averager is not None:
            self._release()

    def init_post_optimizer_step_hook(self, bagua_ddp: WrappedModel) -> Callable[[torch.optim.Optimizer], None]:
        """Counts steps: of the first optimizer for the warm-up, and of all optimizers for :meth:`stats`."""

        def stepped(optimizer: torch.optim.Optimizer) -> None:
            # Reads self.bagua_ddp, because a reference to the argument would be a cycle: the model holds this function.
            optimizers = self.bagua_ddp.bagua_optimizers
            first = bool(optimizers) and optimizers[0] is optimizer
            self._steps += first
            if self._averager is not None and not self._aborted:
                self._averager.count_step()

        return stepped

    def _release(self) -> None:
        """Releases the lock. If a backward is expected or an optimizer step runs, limits the hold in time instead."""
        if self._stepping:
            self._lock.pause_training(_STEP, **self._stream)
            return
        left = 0.0
        if self._awaited and self._awaited_until is not None:
            left = self._awaited_until - time.monotonic()
        if left > 0.0:
            self._lock.pause_training(left, **self._stream)
        else:
            # Forget forwards that waited too long; the next one gets its own second.
            self._awaited = 0
            self._lock.end_training(**self._stream)

    @contextlib.contextmanager
    def lock(self, bagua_module: Any) -> Iterator[None]:
        """Holds the weight lock in a ``with`` block: no round changes the weights, and other threads that lock wait.

        A thread may take the lock several times. ``bagua_module`` is the model.
        """
        self._check_module(bagua_module)
        self._lock.lock(**self._stream)
        try:
            self._move_back()
            yield
        finally:
            self._lock.unlock(**self._stream)

    def _read_state(self, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Returns copies of the state, made between two rounds. Tied weights are copied once."""
        copies: dict[Any, torch.Tensor] = {}
        with self.lock(self.bagua_ddp):
            state = read()
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    place = value.data_ptr(), value.dtype, value.shape, value.stride()
                    if place not in copies:
                        copies[place] = value.detach().clone()
                    state[name] = copies[place]
        return state

    def _check_load(self) -> None:
        if self._averager is not None and not self._aborted:
            raise BaguaError(
                f"load_state_dict of model {self.bagua_ddp.bagua_module_name!r} while {self.name} averages its weights "
                "with ranks that have not loaded theirs yet: load before with_bagua, use "
                "bagua.torch_api.checkpoint.load_checkpoint, or call model.bagua_algorithm.abort(model) and barrier() "
                "on all ranks, load, and call barrier() and model.bagua_algorithm.resume(model)"
            )

    @property
    def is_aborted(self) -> bool:
        """True if :meth:`abort` was called since the last :meth:`resume`."""
        return self._aborted

    def abort(self, bagua_module: Any, timeout: float | None = None) -> None:
        """Takes this rank out of the rounds, while the other ranks continue. Not collective.

        When this function returns, this rank's round in progress has ended, and nothing writes to its weights any more.
        No effect if the rank is out already. ``bagua_module`` is the model. ``timeout`` is in seconds; None means the
        group's timeout. Raises BaguaTimeoutError after the timeout, and errors of the averaging.
        """
        self._check_module(bagua_module)
        self._aborted = True
        if self._averager is not None:
            self._check_unlocked("abort")
            self._averager.abort(self._communicator().timeout if timeout is None else timeout)
            self._lock.order(**self._stream)

    def resume(self, bagua_module: Any) -> None:
        """Takes part in rounds again from the next one on, with this rank's current weights. Not collective; returns at
        once.

        ``bagua_module`` is the model. Raises errors of the averaging.
        """
        self._check_module(bagua_module)
        self._aborted = False
        if self._averager is not None:
            # While no rounds ran, the weights may have been used without the lock.
            self._lock.mark(**self._stream)
            self._averager.resume()

    @contextlib.contextmanager
    def _pause(self) -> Iterator[None]:
        """Calls :meth:`abort`, and at the end of the block :meth:`resume` if this rank took part before."""
        took_part = not self._aborted
        self.abort(self.bagua_ddp)
        try:
            yield
        finally:
            if took_part:
                self.resume(self.bagua_ddp)

    def synchronize(self, bagua_module: Any, timeout: float | None = None) -> None:
        """Runs one round during which all ranks hold their locks, so that all ranks that take part have bitwise equal
        weights.

        Collective among the ranks that take part. ``bagua_module`` is the model. ``timeout`` is in seconds; None means
        the group's timeout. Has no effect during the warm-up, when the ranks are equal anyway. Raises BaguaTimeoutError
        with the ranks that did not call, and ValueError on a rank that does not take part.
        """
        self._check_module(bagua_module)
        if self._averager is not None:
            self._check_unlocked("synchronize")
            if self._weights is not None and self._weights.have_moved():
                with self.lock(bagua_module):
                    """Which puts them back."""
            self._averager.synchronize(self._communicator().timeout if timeout is None else timeout)
            self._lock.order(**self._stream)

    def stats(self) -> dict[str, Any]:
        """Returns the state of the averaging on this rank.

        - "state": "warmup", "running" or "stopped".
        - "view": a number that grows with each change of membership.
        - "ranks": sorted world ranks that take part.
        - "rounds": number of rounds that this rank has completed.
        - "round_s": seconds that the last round took.
        - "staleness": optimizer steps between snapshot and update in the last round.
        - "unaveraged_steps": optimizer steps of this rank that no round has averaged yet.
        - "lock_wait_s": seconds that this rank's threads have waited for the lock.
        - "lost": {rank: reason}.
        - "joined": number of times that this rank was taken back.
        - "payload_bytes": bytes of weights in rounds.
        - "wire_bytes_sent", "wire_bytes_received": bytes on sockets.
        """
        found: dict[str, Any] = {
            "state": "warmup",
            "view": 1,
            "ranks": list(self._communicator().ranks),
            "rounds": 0,
            "round_s": 0.0,
            "staleness": 0,
            "unaveraged_steps": 0,
            "payload_bytes": 0,
            "wire_bytes_sent": 0,
            "wire_bytes_received": 0,
            "lost": {},
            "joined": 0,
        }
        if self._averager is not None:
            found.update(self._averager.stats())
        return {**found, "lock_wait_s": self._lock.waited}

    def _communicator(self) -> extension.Communicator:
        communicator = self.process_group.get_global_communicator()
        assert isinstance(communicator, Communicator)
        return communicator.raw

    def _check_unlocked(self, what: str) -> None:
        if self._lock.is_used_here():
            raise BaguaError(f"{what} on a thread that holds the weight lock: release the lock first, a round needs it")

    def _check_module(self, bagua_module: Any) -> None:
        """Raises ValueError unless given the model, its ``bagua_ddp``, or a wrapper with ``.inner``."""
        found = bagua_module
        for _ in range(8):
            if getattr(found, "bagua_algorithm", None) is self:
                return
            found = getattr(found, "inner", None)
            if found is None:
                break
        raise ValueError(f"{type(bagua_module).__name__} is not the model that this algorithm averages")

    def state_dict(self) -> dict[str, Any]:
        """Like :meth:`AlgorithmImpl.state_dict`. "optimizer_steps" decides whether the warm-up is over."""
        return {**super().state_dict(), "optimizer_steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Like :meth:`AlgorithmImpl.load_state_dict`. A state past the warm-up ends the warm-up at the next forward."""
        # The base class moves the parameters' values aside and back.
        with self.lock(self.bagua_ddp):
            super().load_state_dict(state)
        self._steps = int(state["optimizer_steps"])


@dataclass(eq=False, repr=False)
class AsyncModelAverageAlgorithm(Algorithm):
    """Trains each rank alone, and averages the weights of all ranks every ``sync_interval_ms`` milliseconds.

    - ``peer_selection_mode``: Must be "all".
    - ``sync_interval_ms``: Milliseconds from one averaging round to the next.
    - ``warmup_steps``: Number of steps of the first optimizer that use gradient_allreduce before averaging begins.
    - ``compression``: A codec's name or a :class:`bagua.Codec` for the differences to the last average, or None.

    Raises ValueError for another mode, ``sync_interval_ms`` <= 0, ``warmup_steps`` < 0, or an unknown codec.
    """

    _implementation = AsyncModelAverageAlgorithmImpl

    peer_selection_mode: str = "all"
    sync_interval_ms: float = 500
    warmup_steps: int = 0
    _: KW_ONLY
    compression: Compression = None

    def __post_init__(self) -> None:
        check_options(self.peer_selection_mode, self.sync_interval_ms, self.warmup_steps)
        raw_codec(self.compression)

    @property
    def needs_optimizers(self) -> bool:
        """True if there is a warm-up, because it counts optimizer steps."""
        return self.warmup_steps > 0


GlobalAlgorithmRegistry.register(
    "async", AsyncModelAverageAlgorithm, "weights averaged every interval by a thread, during training"
)
