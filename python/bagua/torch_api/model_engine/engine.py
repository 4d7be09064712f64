"""The engine of one model on several ranks, for every kind of wrapper: buckets, readiness of gradients, and steps."""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from threading import get_ident
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.hooks import RemovableHandle

from bagua import hints
from bagua.errors import BaguaError

from .. import env
from ..algorithms._policy import ExchangePolicy, TrainingCallbacks
from ..algorithms.base import Algorithm, AlgorithmImpl, chosen
from ..bucket import BaguaBucket
from ..membership import elastic
from ..process_group import Communicator, ProcessGroup
from ..tensor import forget
from . import bucket_engine as backends
from . import bucketing
from .algorithm_interface import Exchange, Parameters
from .buffer_broadcast import BufferSchedule
from .grad_hook import GradHook
from .grad_hook import owner_of as _owner_of
from .model_checks import (
    KeptWeights,
    OwnSteps,
    PassingForwards,
    Rounds,
    Tracked,
    WrappedBuffers,
    allow_training,
    check_module,
    explain_empty_steps,
    explain_weights,
    ignored_names,
    require_exchanged,
    step_inside_backward,
)
from .optimizer_steps import follow_given, parameters_of
from .sparse import exchange_gradients, sparse_parameters
from .state import model_state
from .sync_model_state import (
    broadcast_optimizer,
    broadcast_tensors,
    describe,
    is_sharded,
    require_equal,
    start_broadcast,
)
from .torch_hooks import EndOfBackward, at_end_of_backward, follow_loads
from .votes import Votes

#: The algorithms in which ranks have votes.
VOTING = (
    "gradient_allreduce, bytegrad, powersgd, qadam, local_sgd, diloco, and decentralized with peer_selection_mode='all'"
)

_wrapped: MutableMapping[torch.nn.Module, ModelEngine] = model_state.wrapped

TensorT = TypeVar("TensorT", bound=torch.Tensor)

#: Called with the name of a parameter, and the parameter, when its gradient is computed.
BackwardHook = Callable[[str, torch.nn.Parameter], None]


class Progress(NamedTuple):
    """How far the training of a model has come."""

    #: Number of completed steps of the first optimizer.
    steps: int = 0
    #: Number of the step after the last completed one.
    next_step: int = 0
    #: Number of training forwards up to the last completed step.
    forwards: int = 0


class ModelEngine:
    """The communication of one model, however the model is wrapped.

    The owner calls :meth:`before_forward` and :meth:`after_forward` around each forward. Hooks of the engine report
    gradients and optimizer steps. The engine ends with its model, its group, or :meth:`close`.

    ``older`` is an earlier wrapper of the same parameters. It ends when all ranks have accepted the arguments, so that
    an error in the arguments leaves it as it is.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        algorithm: Algorithm | str,
        process_group: ProcessGroup,
        do_flatten: bool,
        *,
        name: str,
        find_unused_parameters: bool = False,
        broadcast_buffers: bool = True,
        bucket_size: int | None = None,
        broadcast_state: bool = True,
        flags: Sequence[str] | None = None,
        weight: float | None = None,
        older: torch.nn.Module | None = None,
    ) -> None:
        communicator = process_group.get_global_communicator()
        if not isinstance(communicator, Communicator):
            raise ValueError(f"this rank is not in {process_group}, so it cannot train there")
        # Weak, so that the engine ends when the model is collected.
        self._module = weakref.ref(module)
        if isinstance(optimizers, torch.optim.Optimizer):
            raise TypeError(f"optimizers must be a list of optimizers: [{type(optimizers).__name__}(...)]")
        self.bagua_module_name = name
        self.bagua_optimizers = list(optimizers)
        self.process_group = process_group
        self.do_flatten = do_flatten
        self.find_unused_parameters = find_unused_parameters
        self.broadcast_buffers = broadcast_buffers
        self.bucket_size = env.get_default_bucket_size() if bucket_size is None else bucket_size
        named = dict(module.named_parameters())
        modules = dict(module.named_modules())
        self.parameters_to_ignore = ignored_names(modules, named)
        has_buffers = any(child._buffers for child in modules.values())
        parameters, buffers = self._shared(named.items()), self._shared(module.named_buffers() if has_buffers else ())
        self.require_backward_grad_sync = True
        self.bagua_train_step_counter = 0
        self.step = -1
        self.empty_steps = 0
        #: The rank whose buffers are sent to all ranks.
        self.root = 0
        self.buffer_schedule = BufferSchedule()
        #: Progress at the end of the last completed step.
        self.progress = Progress()
        # True from the first forward of a step until its backward has ended.
        self._in_step = False
        self.bagua_buckets: list[BaguaBucket] = []
        self.votes = Votes(communicator.rank(), communicator.nranks(), flags)
        # Descriptions of the buckets, which must be equal on all ranks.
        self._layout: list[str] = []
        self._in_backward = False
        # Thread that runs the backward.
        self._thread = 0
        # Gradients of this backward that a later hook of the user may still change.
        self._late: list[tuple[str, torch.nn.Parameter]] = []
        # True during any backward, also under ``no_sync``. Only kept for an algorithm that uses hooks around passes.
        self._in_any_backward = False
        # True if a training forward waits for a backward that communicates, and no gradient has come since.
        self._forward_waits = False
        # Number of backwards that reached a parameter, now and at the last step of each optimizer.
        self._backwards = 0
        self._stepped_at: MutableMapping[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._own_steps = OwnSteps()
        self._passing = PassingForwards()
        self._rounds = Rounds()
        # True if the algorithm's state was loaded since the last step that communicated.
        self._state_is_loaded = False
        self._handles: list[RemovableHandle] = []
        self._grad_hook: GradHook | None = None
        self._communicator = communicator
        self._ending: weakref.finalize[..., Any] | None = None

        self._tracked = [(name, param) for name, param in parameters.items() if param.requires_grad]
        self._tracked_ids = {id(param) for _, param in self._tracked}
        #: Name and parameter of every gradient to communicate, when the algorithm began.
        self.parameters: Parameters = self._tracked
        self._agree(module, algorithm, None if older is None else _wrapped.get(older), modules, parameters, buffers)
        if older is not None:
            unwrap(older)
        self._unchanged = Tracked(name, self._tracked)
        self._wrapped_buffers = WrappedBuffers(name, buffers, self.parameters_to_ignore)
        self._kept = KeptWeights(name, self.bagua_algorithm.name, self._tracked)
        # Algorithms written for the original Bagua use the second name.
        self.backend = self._bagua_backend = backends.BucketEngine(name, process_group)
        backends.adopt(self.backend)
        try:
            if broadcast_state:
                own = [param for name, param in named.items() if name not in parameters]
                self._broadcast_state([*parameters.values(), *buffers.values()], own)
            self._init_algorithm()
            if weight is not None:
                self.set_weight(weight)
            elif flags is not None:
                self._begin_votes()
            require_equal(self._communicator, self._layout)
            if self.policy.fixes_initial_weights:
                self._weights_change()
            self._hook(module, modules.values())
            for child in modules.values():
                allow_training(child)
        except BaseException:
            self.close()
            raise

    def options(self) -> dict[str, Any]:
        """Returns the keyword arguments for an engine like this one on another group."""
        return {
            "find_unused_parameters": self.find_unused_parameters,
            "broadcast_buffers": self.broadcast_buffers,
            "bucket_size": self.bucket_size,
            "flags": self.votes.names,
            "weight": None if self.votes.room is None else self.votes.weight,
        }

    @property
    def module(self) -> torch.nn.Module:
        """The model."""
        module = self._module()
        if module is None:
            raise BaguaError(f"model {self.bagua_module_name!r} no longer exists")
        return module

    def bagua_build_params(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Returns name and parameter of every gradient to communicate, in the model's order; shared parameters once."""
        return [
            (name, param)
            for name, param in self.module.named_parameters()
            if param.requires_grad and name not in self.parameters_to_ignore
        ]

    def _shared(self, named: Iterable[tuple[str, TensorT]]) -> dict[str, TensorT]:
        """Returns the tensors that are communicated, by name."""
        return {name: tensor for name, tensor in named if name not in self.parameters_to_ignore}

    def _agree(
        self,
        module: torch.nn.Module,
        given: Algorithm | str,
        older: ModelEngine | None,
        modules: dict[str, torch.nn.Module],
        parameters: dict[str, torch.nn.Parameter],
        buffers: dict[str, torch.Tensor],
    ) -> None:
        """Compares the ranks' models and settings, so that a difference is an error instead of garbage or a hang."""
        failure: Exception | None = None
        lines: list[str] = []
        try:
            self.algorithm = algorithm = chosen(given, self.bagua_optimizers)
            check_module(modules.values(), parameters, buffers, older)
            self._use(algorithm.reify(self.process_group), algorithm.registered_name)
            if elastic.rejoined() and not self.policy.can_rejoin:
                raise BaguaError(
                    f"{type(algorithm).__name__} cannot be used by a rank that rejoined an elastic job: use "
                    "AsyncModelAverageAlgorithm"
                )
            sparse = sparse_parameters(modules.values(), self._tracked)
            if sparse and sparse[0][1].is_cuda:
                raise NotImplementedError(
                    f"parameter {sparse[0][0]!r} on {sparse[0][1].device} has sparse gradients, which are communicated "
                    "on the CPU only: make its embedding with sparse=False"
                )
            if sparse and self.policy.sparse_op is None:
                raise NotImplementedError(
                    f"parameter {sparse[0][0]!r} has sparse gradients, "
                    f"which {type(algorithm).__name__} does not communicate yet"
                )
            self.policy.check_model(self)
            if self.votes.names is not None and not self._can_vote():
                raise NotImplementedError(f"{algorithm!r} has no flags: they are for {VOTING}")
            kinds = [type(optimizer).__name__ for optimizer in self.bagua_optimizers]
            lines = [
                f"algorithm {algorithm.describe()}",
                f"find_unused_parameters={self.find_unused_parameters}, broadcast_buffers={self.broadcast_buffers}, "
                f"bucket_size={self.bucket_size}",
                f"optimizers {kinds}",
                f"flags {self.votes.names}",
                f"sparse gradients of {[name for name, _ in sparse]}",
                *(describe("parameter", name, param) for name, param in parameters.items()),
                *(describe("buffer", name, buffer) for name, buffer in buffers.items()),
            ]
        except Exception as found:
            failure = found
        self.digest = hashlib.sha256("\n".join(lines).encode()).digest()
        require_equal(self._communicator, lines, failure)

    def _use(self, algorithm: AlgorithmImpl, name: str) -> None:
        """Communicates with this algorithm, registered under ``name``, from now on."""
        self.bagua_algorithm = algorithm
        algorithm._attach(self, name)
        self.policy: ExchangePolicy = algorithm._policy()
        self._callbacks = self.policy.callbacks or TrainingCallbacks()

    def _state(self) -> list[torch.Tensor]:
        named: tuple[Iterable[tuple[str, torch.Tensor]], ...] = (
            self.module.named_parameters(),
            self.module.named_buffers(),
        )
        return [tensor for each in named for tensor in self._shared(each).values()]

    def _begin_algorithm_anew(self) -> None:
        self.parameters = self.bagua_build_params()
        self._init_algorithm()

    def _init_algorithm(self) -> None:
        make, sparse_op = self.policy.make_exchange, self.policy.sparse_op
        self.exchange: Exchange = exchange_gradients(self, sparse_op) if make is None else make(self)
        tensors = self.bagua_algorithm.init_tensors(self)
        buckets = self.bagua_algorithm.tensors_to_buckets(
            bucketing.split_effective(tensors, self.bucket_size), self.do_flatten
        )
        if self.votes.room is not None:
            self._use_votes(buckets)
        for bucket in buckets:
            self.bagua_algorithm.init_operations(self, bucket)
        self.backend.register_ordered_buckets(buckets)
        self.bagua_buckets = buckets
        self._layout = self._describe_buckets(buckets)
        self.exchange.bind(buckets)
        self._forward_pre_hook = self.bagua_algorithm.init_forward_pre_hook(self)
        self._backward_hook = self._complete(self.bagua_algorithm.init_backward_hook(self))
        self._post_backward_hook = self.bagua_algorithm.init_post_backward_hook(self)
        self._post_step_hook = self.bagua_algorithm.init_post_optimizer_step_hook(self)

    def set_weight(self, weight: float) -> None:
        """Sets this rank's weight in averages. See :func:`bagua.torch_api.set_weight`."""
        if not (self.policy.votes_divide and self._can_vote()):
            raise NotImplementedError(f"{self.algorithm!r} has no weights: they are for {VOTING}, and average=True")
        if self.votes.room is None:
            self._begin_votes()
        self.votes.weight = weight

    def _can_vote(self) -> bool:
        # A subclass of a built-in algorithm may append other operations.
        own = type(self.bagua_algorithm).__module__.startswith(AlgorithmImpl.__module__.rpartition(".")[0])
        return own and self.policy.votes_divide is not None

    def flags(self) -> frozenset[str]:
        """Returns the flags of the last exchange. See :func:`bagua.torch_api.flags`."""
        self._require_votes("flags()")
        self.exchange.before_flags()
        return self.votes.flags

    def skip_step(self) -> None:
        """Takes part in a step without a batch. See :func:`bagua.torch_api.skip_step`."""
        self._require_votes("skip_step()")
        module = self.module
        if not module.training or self._in_step or self._in_backward:
            raise BaguaError(
                f"skip_step() of model {self.bagua_module_name!r} takes the place of forward and backward of a step: "
                "call it in training mode, and not between a forward and its backward"
            )
        if not self.require_backward_grad_sync:
            return
        before = self.step
        self.votes.skips = True
        try:
            with torch.enable_grad():
                self.before_forward(module, ())
            self.forward_returned()
            if self.step > before:
                self._forward_waits = False
                self._backwards += 1
                self._own_steps.backward_begins(True)
                self.exchange.skip()
                self._after_backward()
        finally:
            # Some algorithms send the vote of a step that communicates after an optimizer's step.
            self.votes.skips = self.votes.skips and self.policy.communicates(self.step)

    def forward_returned(self) -> None:
        """Called after each forward that did not raise, by a wrapper that needs it."""

    def _require_votes(self, what: str) -> None:
        if self.votes.room is None:
            raise BaguaError(
                f"{what} of model {self.bagua_module_name!r} needs flags: pass flags=[...] to the call that wraps the "
                "model on all ranks; the list may be empty"
            )

    def _begin_votes(self) -> None:
        """Exchanges votes from the next exchange on. All ranks must begin before the same exchange."""
        if self._in_backward or (self._in_step and not self.exchange.needs_gradients):
            raise BaguaError(
                f"the first set_weight() of model {self.bagua_module_name!r} in the middle of an exchange: call it "
                "before the forward of a step"
            )
        if not self.bagua_buckets:
            raise NotImplementedError(
                f"model {self.bagua_module_name!r} has no gradient that is exchanged as it is: weights travel with one"
            )
        self.exchange.before_load()
        steps = [bucket.backend_bucket.step for bucket in self.bagua_buckets]
        before = self.bagua_algorithm._tensors_of_state()
        self._use_votes(self.bagua_buckets)
        for bucket in self.bagua_buckets:
            self.bagua_algorithm.init_operations(self, bucket)
        # Error memory, which belongs to the operations.
        for kind, tensors in self.bagua_algorithm._tensors_of_state().items():
            for name, tensor in tensors.items():
                tensor.copy_(before[kind][name])
        self.backend.register_ordered_buckets(self.bagua_buckets)
        for bucket, step in zip(self.bagua_buckets, steps, strict=True):
            bucket.backend_bucket.set_step(step)

    def _use_votes(self, buckets: Sequence[BaguaBucket]) -> None:
        """Makes room for votes in the last bucket. Operations must be appended again."""
        self.votes.use(buckets[-1].reserve(), bool(self.policy.votes_divide))
        self.bagua_algorithm._only_adds = True

    def _complete(self, hook: BackwardHook) -> BackwardHook:
        """Returns a backward hook that also reports gradients to the exchange, which sends those that a user's ``hook``
        does not mark ready at the end of backward.
        """
        exchange = self.exchange
        if hook == exchange.arrived:
            return hook

        def reported(name: str, param: torch.nn.Parameter) -> None:
            exchange.accumulated(name)
            hook(name, param)

        return reported

    def _describe_buckets(self, buckets: Sequence[BaguaBucket]) -> list[str]:
        """Returns the names of the parameters in each bucket.

        A user's algorithm may order its tensors differently on each rank, so that buckets of the same size would add up
        different parameters.
        """
        names = {id(param): name for name, param in self._tracked}
        if any(id(each) not in names for bucket in buckets for each in bucket.tensors):
            names |= {id(param.grad): name for name, param in self._tracked}
        lines = []
        for bucket in buckets:
            held = [names.get(id(each), f"{each.dtype}{list(each.shape)}") for each in bucket.tensors]
            lines.append(f"bucket {bucket.name!r} of {', '.join(held)}")
        return lines

    def _broadcast_state(self, shared: list[torch.Tensor], own: list[torch.nn.Parameter]) -> None:
        self.broadcast(shared)
        # Each rank keeps its own state of a sharded optimizer, which belongs to different parameters on each rank.
        for optimizer in (each for each in self.bagua_optimizers if not is_sharded(each)):
            broadcast_optimizer(self._communicator, lambda room: self.backend.broadcast(room, 0), optimizer, own)

    def _hook(self, module: torch.nn.Module, modules: Iterable[torch.nn.Module]) -> None:
        self._grad_hook = GradHook(self, self._tracked)
        # torch.utils.swap_tensors would leave the hook on the other tensor. It refuses a tensor with a weak reference,
        # such as one in a Bagua tensor's registration.
        registered = {id(tensor) for bucket in self.bagua_buckets for tensor in bucket.tensors}
        self._references = [weakref.ref(param) for _, param in self._tracked if id(param) not in registered]
        self._hook_forward(module)
        self._handles.append(follow_loads(self, modules))
        self._handles += follow_given(self, self.bagua_optimizers)

    def holds_parameters_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """Returns True if the optimizer holds parameters that this engine communicates for."""
        return bool(self._handles) and any(id(param) in self._tracked_ids for param in parameters_of(optimizer))

    def before_optimizer(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> bool:
        """Called before each step of an optimizer. Returns True if :meth:`optimizer_returned` must be called."""
        if self.exchange.needs_gradients:
            self._check_outside_of_backward()
        if not has_closure:
            self._check_step(optimizer)
        self._kept.before_step()
        self.exchange.before_optimizer_step(optimizer)
        self._callbacks.before_optimizer_step(optimizer)
        return self.policy.callbacks is not None

    def after_optimizer(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """Called after each step of an optimizer that did not raise."""
        if has_closure:
            self._check_step(optimizer)
        if self.bagua_optimizers and optimizer is self.bagua_optimizers[0]:
            self.progress = Progress(self.progress.steps + 1, self.step + 1, self.bagua_train_step_counter)
        self._passing.stepped()
        self._post_step_hook(optimizer)

    def before_load(self) -> None:
        """Called before ``load_state_dict`` of the model or of a module in it."""
        self.exchange.before_load()
        self._weights_change()

    def _weights_change(self) -> None:
        """Records the weights, which may change until the next training forward for reasons other than training."""
        if self.policy.has_weight_state:
            self._kept.remember()

    def begin_anew(self) -> None:
        """Restarts an algorithm that keeps state derived from weights, after all ranks have loaded weights. Collective.

        The algorithm starts with the weights of :attr:`root`, unless its own state was loaded too.
        """
        if self.policy.has_weight_state and not self._kept.state_is_loaded:
            self.broadcast(self._state())
            self._begin_algorithm_anew()
            self._kept.accept()

    def optimizer_returned(self) -> None:
        """Called after each step of an optimizer, also if it raised."""
        self._callbacks.after_optimizer_step()

    def _hook_forward(self, module: torch.nn.Module) -> None:
        """Arranges the calls around forwards. Does nothing if the owner makes them."""

    def before_forward(self, module: torch.nn.Module, inputs: Any) -> None:
        """Called before each forward of the model. Does nothing when a checkpoint computes the forward again."""
        if torch._C._current_graph_task_id() != -1:
            return
        if not self._in_step:
            self.exchange.before_step()
        if not self._trains(module):
            self._callbacks.before_forward(False)
            return
        if self._unchanged.is_frozen(self.bagua_build_params):
            # torch's DDP also sends buffers here. The algorithm "async" keeps its lock for a backward.
            self._send_waiting_buffers(False)
            self._callbacks.before_forward(torch.is_grad_enabled())
            return
        if self._in_backward:
            self._end_broken_backward()
        self._unchanged.check(module, self.bagua_build_params(), may_go=self.find_unused_parameters)
        self._kept.check()
        self.bagua_train_step_counter += 1
        self._own_steps.forward_begins()
        counts = self.require_backward_grad_sync and torch.is_grad_enabled()
        if counts and not self.exchange.needs_gradients:
            counts = not self._passing.are_of_another(inputs)
        self._forward_waits = self._forward_waits or counts
        begins = counts and not self._in_step
        if begins:
            # An algorithm's hooks may communicate until here.
            self._rounds.end(self)
            self.step += 1
            self._in_step = True
        self._forward_is_announced()
        if self.bagua_algorithm.need_reset():
            self._begin_algorithm_anew()
        self._send_waiting_buffers(begins)
        if begins and self.policy.communicates(self.step):
            # If gradients are exchanged, a state contains no weights that could make the ranks drift apart.
            after_load = self._state_is_loaded and not self.exchange.needs_gradients
            self.backend.set_step(self._compared_step(), after_load=after_load)
            self._state_is_loaded = False
            if self.exchange.uses_buckets and self.backend.size > 1:
                self._rounds.begin_round(self.bagua_buckets)
            self.exchange.begin()
        self._forward_pre_hook(inputs)
        self._callbacks.before_forward(torch.is_grad_enabled())

    def _compared_step(self) -> int:
        if self.policy.compared_step is not None:
            return self.policy.compared_step()
        return self.empty_steps if self.exchange.needs_gradients else self.step + 1

    def _trains(self, module: torch.nn.Module) -> bool:
        """Returns True if the forward that begins now is a training forward. Other forwards do not communicate."""
        return module.training

    def _forward_is_announced(self) -> None:
        """Called before the first communication of a training forward. Decides :attr:`root`."""

    def _buffers_due(self) -> bool:
        return self.policy.sends_buffers and self.policy.communicates(self.step)

    def _send_waiting_buffers(self, begins: bool) -> None:
        """Sends due buffers of :attr:`root` before a training forward. ``begins``: the forward begins a step."""
        syncs = self.require_backward_grad_sync
        if not self._buffers_due():
            return
        if self.buffer_schedule.forward_begins(syncs=syncs) if self.exchange.needs_gradients else syncs and begins:
            self.send_buffers()

    def _gradients_are_exchanged(self) -> None:
        """Called after a backward that exchanged gradients: sends the buffers of :attr:`root` if they are due."""
        if self._buffers_due() and self.buffer_schedule.gradients_are_exchanged():
            self.send_buffers()

    def _backward_communicates(self) -> bool:
        """Returns True if gradients of this backward are communicated. Otherwise they only accumulate."""
        return self.require_backward_grad_sync

    def after_forward(self, output: Any) -> None:
        """Called after each forward that :meth:`before_forward` handled. ``output`` is None if the forward raised."""
        if torch._C._current_graph_task_id() == -1:
            self._callbacks.after_forward(output)

    def after_any_backward(self) -> None:
        """Called after each backward, also if it raised."""
        self._in_any_backward = False
        self._callbacks.after_backward()

    def _end_broken_backward(self) -> None:
        """Cleans up after a backward that raised.

        If weights are exchanged, the step continues with the next backward, because this rank must communicate once in
        each step, like the other ranks.
        """
        if self.exchange.needs_gradients:
            self._end_broken_step()
        self._in_backward = False

    def _end_broken_step(self) -> None:
        """Ends a step whose backward raised or never came."""
        self._in_backward = self._in_step = self._forward_waits = False
        self._late = []
        self._rounds.forget()
        self.exchange.abandon()

    def restart(self, step: int) -> None:
        """Makes the next training forward begin step number ``step``."""
        self._rounds.forget()
        if self._in_step:
            self._end_broken_step()
        self._kept.state_is_loaded = self._state_is_loaded = True
        self.step = step - 1
        self.progress = self.progress._replace(next_step=step)

    def resume(self, progress: Progress) -> None:
        """Continues after the last completed step of a model that was wrapped before."""
        self.progress = progress
        self.bagua_train_step_counter = progress.forwards
        self.restart(progress.next_step)
        self._state_is_loaded = False

    def send_buffers(self) -> None:
        """Copies the buffers of :attr:`root` to every rank, unless ``broadcast_buffers`` is False. Collective."""
        with self._wrapped_buffers.explain(self.backend.rank, self.module):
            self.broadcast(self.buffers())

    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copies the values of :attr:`root` to every rank. Collective."""
        root = self.root
        broadcast_tensors(lambda room: self.backend.broadcast(room, root), self.backend.rank, tensors, root)

    def start_buffers(self) -> Callable[[], None]:
        """Starts :meth:`send_buffers`. Returns a function that waits for it and then changes the buffers."""

        def start(room: torch.Tensor) -> Callable[[], None]:
            return self.backend.start_broadcast(room, 0).wait

        wait = start_broadcast(start, self.backend.rank, self.buffers())
        return self._wrapped_buffers.explain(self.backend.rank, self.module)(wait)

    def buffers(self) -> list[torch.Tensor]:
        """Returns the buffers that :attr:`root` sends."""
        if not self.broadcast_buffers:
            return []
        return [buffer for name, buffer in self.module.named_buffers() if name not in self.parameters_to_ignore]

    def on_gradient(self, name: str, param: torch.nn.Parameter, is_final: bool = True) -> None:
        """Handles a gradient. Its local value is final now, or at the end of the backward if not ``is_final``."""
        if self.policy.callbacks is not None and not self._in_any_backward:
            self._in_any_backward = True
            self._callbacks.before_backward()
            at_end_of_backward(EndOfBackward(self))
        if not self._backward_communicates():
            self._backwards += 1
            self.exchange.accumulated(name)
            return
        self._forward_waits = False
        if not self._in_backward:
            self._in_backward = True
            self._own_steps.backward_begins(self._in_step)
            self._thread = get_ident()
            self._backwards += 1
            at_end_of_backward(self._after_backward)
        elif self._thread != get_ident():
            error = BaguaError(
                f"two threads on rank {self.backend.rank} run a backward of model {self.bagua_module_name!r} at the "
                "same time, so that their gradients are mixed: run one backward at a time"
            )
            # The first thread's gradients contain parts of the second's, and the other ranks wait for them.
            raise self.backend.reported(error)
        if is_final:
            self._backward_hook(name, param)
        else:
            self._late.append((name, param))

    def _check_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Ends a step without a backward, or whose backward reached no parameter.

        Raises BaguaError if the optimizer would step with gradients that were not exchanged.
        """
        needs_gradients = self.exchange.needs_gradients
        if not needs_gradients:
            self._own_steps.check(self, self.bagua_algorithm.name, optimizer)
        before, self._stepped_at[optimizer] = self._stepped_at.get(optimizer, 0), self._backwards
        if not (self._forward_waits and self._tracked and before == self._backwards):
            return
        if not needs_gradients:
            # The step ends here as after a backward. Otherwise this rank would begin the next one later than others.
            self._forward_waits = self._in_step = False
            self._post_backward_hook()
            return
        require_exchanged(self, optimizer)
        if self._in_step:
            # If this rank alone has left out a backward, the next exchange notices.
            self._in_step = False
            self._rounds.forget()
            self.empty_steps += 1

    def _check_outside_of_backward(self) -> None:
        """Raises BaguaError for an optimizer step in a hook of a backward, when gradients are not communicated yet."""
        if torch._C._current_graph_task_id() != -1 and self._backward_communicates():
            raise self.backend.reported(step_inside_backward(self.backend.rank, self.bagua_module_name))

    def _after_backward(self) -> None:
        # None outside of any node, which the declared type does not say.
        node: Any = torch._C._current_autograd_node()
        if node is not None:
            # A backward inside a node of another one (a re-entrant checkpoint) has ended, but the outer one continues.
            # Only a hook of that node can queue a callback for the outer backward.
            handles: list[Any] = []

            def in_outer(*_: Any) -> None:
                handles.pop().remove()
                at_end_of_backward(self._after_backward)

            handles.append(node.register_hook(in_outer))
            return
        late, self._late = self._late, []
        for name, param in late:
            self._backward_hook(name, param)
        self._passing.backward_ends()
        ends = self._in_step
        self._in_backward = self._in_step = False
        explained = self._wrapped_buffers.explain(self.backend.rank, self.module)
        with explained, explain_empty_steps(self), explain_weights(self):
            self._post_backward_hook()
        if not self.exchange.needs_gradients:
            return
        if ends and self._post_backward_hook == self.exchange.finish:
            self._rounds.end(self)
        self._gradients_are_exchanged()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulates gradients inside the block. The first backward afterwards communicates their sum."""
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def end_with(self, wrapped: torch.nn.Module) -> None:
        """Closes this engine when the last reference to ``wrapped`` is gone."""
        self._ending = weakref.finalize(wrapped, self.close, collected=True)
        self._ending.atexit = False

    def close(self, *, at_exit: bool = False, collected: bool = False) -> None:
        """Removes all hooks and ends the engine. The model keeps its weights and trains alone. May be called twice.

        Work of the last step is communicated first, because other ranks wait for it. ``at_exit`` cuts off an open step.
        ``collected`` means that the model was garbage-collected, which happens at a different moment on each rank:
        communication that was begun completes, and none begins.
        """
        if self._ending is not None:
            self._ending.detach()
        undone = False
        # An error of the group was raised before, or will be when the group is used next.
        with contextlib.suppress(BaguaError, ValueError):
            if self.bagua_buckets and collected:
                undone = self.exchange.drop()
            if self._in_step and not at_exit:
                self._end_broken_step()
            if self.bagua_buckets and not collected:
                self.exchange.before_step()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._grad_hook is not None:
            for _, param in self._tracked:
                self._grad_hook.remove(param)
        for bucket in self.bagua_buckets:
            for tensor in bucket.tensors:
                forget(tensor)
        self.bagua_buckets = []
        self.policy.close()
        backends.release(self.backend)
        if undone:
            hints.warn(
                f"model {self.bagua_module_name!r} was collected before the ranks communicated its last step: their "
                "weights differ; call model.bagua_algorithm.state_dict() on all ranks after the last step",
                RuntimeWarning,
            )

    def __del__(self) -> None:
        # Absent if the constructor refused its arguments.
        if hasattr(self, "backend"):
            self.close(collected=True)


def unwrap(wrapped: torch.nn.Module) -> None:
    """Ends a model's communication, or the refusal of its training. No effect on other models."""
    ddp = _wrapped.pop(wrapped, None)
    if ddp is not None:
        ddp.close()
    allow_training(wrapped)


def engines_of(model: torch.nn.Module) -> list[ModelEngine]:
    """Returns the engines that communicate for the model or for modules in it."""
    owners = {id(owner): owner for param in model.parameters() if (owner := owner_of(param)) is not None}
    return list(owners.values())


def owner_of(param: torch.Tensor) -> ModelEngine | None:
    """Returns the engine that communicates the gradient of a parameter, or None."""
    owner: ModelEngine | None = _owner_of(param)
    return owner
