"""Checks a model when it is wrapped, and later checks that it has not changed since."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from bagua.errors import BaguaError, MismatchError
from bagua.process_state import process

from .. import devices
from ..bucket import BaguaBucket
from ..process_group import dtype_code
from ..process_group.state import group_state
from .algorithm_interface import WrappedModel
from .grad_hook import owner_of
from .state import model_state
from .sync_model_state import describe

# Module or wrapper -> name of a model whose group has ended, and the hook that refuses its training, if any.
_ended = model_state.ended


def _never() -> bool:
    return False


# torch before 2.7 does not distinguish export from compilation.
_is_exporting = getattr(torch.compiler, "is_exporting", _never)
_is_tracing: Callable[[], bool] = torch.jit.is_tracing  # type: ignore[attr-defined]


def is_recorded() -> bool:
    """Returns True while a forward is recorded as a program, which must not contain communication."""
    return _is_exporting() or _is_tracing()


class Tracked:
    """The parameters whose gradients are communicated, as they were when the model was wrapped."""

    def __init__(self, model_name: str, parameters: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        self._model_name = model_name
        self._parameters = list(parameters)
        # Equal entries share one object, because a model with many parameters has few kinds of them.
        kinds: dict[Any, Any] = {}
        found = ((param.dtype, param.shape) for _, param in parameters)
        self._kinds: list[tuple[torch.dtype, torch.Size]] = [kinds.setdefault(kind, kind) for kind in found]

    def is_frozen(self, current: Callable[[], Sequence[object]]) -> bool:
        """Returns True if no parameter needs a gradient now, for example because another model is trained through this
        one.

        A forward then counts as evaluation. ``current`` returns the parameters that need a gradient now.
        """
        frozen = not any(param.requires_grad for _, param in self._parameters)
        return bool(self._parameters) and frozen and not current()

    def check(self, module: torch.nn.Module, current: Sequence[tuple[str, torch.nn.Parameter]], may_go: bool) -> None:
        """Raises BaguaError if the parameters have changed, because the ranks would differ unnoticed otherwise.

        ``may_go`` allows parameters that no longer need a gradient. During ``torch.func.functional_call``, plain
        tensors replace parameters; that is not a change.
        """
        differs = len(current) != len(self._parameters) or any(
            mine is not theirs for (_, mine), (_, theirs) in zip(current, self._parameters, strict=True)
        )
        if differs and all(isinstance(param, torch.nn.Parameter) for param in module.parameters()):
            self._refuse(dict(current), may_go)
        for (name, param), (dtype, shape) in zip(self._parameters, self._kinds, strict=True):
            if param.dtype is not dtype or param.shape != shape:
                raise BaguaError(
                    f"parameter {name!r} of model {self._model_name!r} is {param.dtype}{list(param.shape)} and was "
                    f"{dtype}{list(shape)} when the model was wrapped: wrap the model again after a conversion "
                    "(.double(), .half(), .to(dtype)) or other data"
                )

    def _refuse(self, after: dict[str, torch.nn.Parameter], may_go: bool) -> None:
        before = dict(self._parameters)
        new = [name for name in after if name not in before]
        replaced = [name for name, param in after.items() if before.get(name, param) is not param]
        gone = [name for name in before if name not in after]
        # ``may_go`` allows that a parameter no longer needs a gradient: the model then treats it as unused.
        if not new and not replaced and may_go:
            return
        changes = (
            (new, "now needs one", "now need one"),
            (gone, "no longer does", "no longer do"),
            (replaced, "is another Parameter object", "are other Parameter objects"),
        )
        parts = [f"{names} {one if len(names) == 1 else more}" for names, one, more in changes if names]
        if replaced:
            parts[-1] += ", as after load_state_dict(assign=True)"
        hint = ""
        if new and not replaced:
            hint = (
                ". If you cannot wrap it again, as under Lightning: let all of them need gradients when it is wrapped, "
                "pass find_unused_parameters=True, and freeze them afterwards"
            )
        elif not replaced:
            hint = ", or pass find_unused_parameters=True to freeze and unfreeze some of them"
        raise BaguaError(
            f"the parameters of model {self._model_name!r} that need a gradient changed since it was wrapped: "
            f"{'; '.join(parts)}; wrap the model again after such a change{hint}"
        )


class KeptWeights:
    """Notices changes of weights, for an algorithm that keeps state derived from them: anchors, or replicas of
    neighbours.

    If other code changed the weights without loading the algorithm's state, the algorithm would treat the change as
    training.
    """

    def __init__(
        self, model_name: str, algorithm_name: str, parameters: Sequence[tuple[str, torch.nn.Parameter]]
    ) -> None:
        self._model_name = model_name
        self._algorithm_name = algorithm_name
        self._parameters = list(parameters)
        # Parameter name -> weights before the first change since the last training forward or step.
        self._before: dict[str, torch.Tensor] | None = None
        # Name of a parameter that had changed when an optimizer stepped.
        self._changed: str | None = None
        #: True if the algorithm's state was loaded since the last training forward.
        self.state_is_loaded = False

    def remember(self) -> None:
        """Records the weights, which are about to change."""
        if self._before is None:
            self._before = {name: param.detach().clone() for name, param in self._parameters}

    def before_step(self) -> None:
        """Looks for changes since :meth:`remember` before an optimizer step, because the step changes the weights
        itself.
        """
        if self._before is not None:
            self._changed, self._before = self._find(), None

    def accept(self) -> None:
        """Accepts the current weights, from which the algorithm has derived its state."""
        self._before, self._changed, self.state_is_loaded = None, None, False

    def check(self) -> None:
        """Raises BaguaError if weights have changed and the algorithm's state was not loaded. Called before training
        forwards.

        Weights that were changed and put back, for example to evaluate averaged ones, are accepted.
        """
        name = None if self.state_is_loaded else self._find()
        if name is not None:
            raise BaguaError(
                f"parameter {name!r} of model {self._model_name!r} was changed outside of training, which "
                f"{self._algorithm_name} would take for training: after load_state_dict load the algorithm's state "
                "too (model.bagua_algorithm.load_state_dict), use bagua.torch_api.checkpoint.load_checkpoint, or "
                "call with_bagua again on all ranks"
            )
        self.accept()

    def _find(self) -> str | None:
        """Returns the name of the first changed parameter, or None."""
        before = self._before or {}
        for name, param in self._parameters if before and self._changed is None else ():
            if not torch.allclose(param.detach(), before[name], rtol=0, atol=0, equal_nan=True):
                return name
        return self._changed


class WrappedBuffers:
    """The communicated buffers, as they were when the model was wrapped.

    Buffers may change later, but only in the same way on all ranks. A rank cannot know whether other ranks changed
    theirs before they communicate.
    """

    def __init__(self, model_name: str, buffers: Mapping[str, torch.Tensor], ignored: frozenset[str]) -> None:
        self._model_name = model_name
        self._ignored = ignored
        self._before = self._described(buffers.items())

    def _described(self, named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
        return {name: describe("buffer", name, buffer) for name, buffer in named if name not in self._ignored}

    def _changes(self, module: torch.nn.Module) -> Iterator[str]:
        before, after = self._before, self._described(module.named_buffers())
        yield from (f"{line} is new" for name, line in after.items() if name not in before)
        yield from (f"{line} is gone" for name, line in before.items() if name not in after)
        yield from (f"{line} was {before[name]}" for name, line in after.items() if before.get(name, line) != line)

    @contextlib.contextmanager
    def explain(self, rank: int, module: torch.nn.Module) -> Iterator[None]:
        """Adds this rank's changes to a MismatchError in the block, which otherwise only says numbers of bytes."""
        try:
            yield
        except MismatchError as error:
            changes = "; ".join(self._changes(module))
            if not changes:
                raise
            text = (
                f"{error}; rank {rank} changed the buffers of model {self._model_name!r} after it was wrapped: "
                f"{changes}; such a change must be the same on all ranks"
            )
            raise MismatchError(text, record=error.record) from error


def refuse_training(wrapped: torch.nn.Module) -> None:
    """Raises BaguaError in a training forward of a model whose group has ended, if this process has another group.

    Its ranks would differ unnoticed. Without a group, each model may train alone. Accepts a forward that a checkpoint
    computes again.
    """
    found = _ended.get(wrapped)
    if found is None or (group_state.default_group is None and process.torchs_world is None):
        return
    if wrapped.training and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
        raise BaguaError(
            f"model {found[0]!r} was wrapped for a process group that has ended: wrap it again to train with the ranks "
            "of another one, or call bagua.torch_api.unwrap on it to train it alone"
        )


def allow_training(wrapped: torch.nn.Module) -> None:
    """Ends the refusal of :func:`refuse_training`."""
    _, handle = _ended.pop(wrapped, ("", None)) if _ended else ("", None)
    if handle is not None:
        handle.remove()


class Rounds:
    """Number of times that each bucket had been communicated when a training step began."""

    def __init__(self) -> None:
        self._before: list[tuple[BaguaBucket, int]] = []

    def begin_round(self, buckets: Sequence[BaguaBucket]) -> None:
        """Begins a step in which each of these buckets must be communicated."""
        self._before = [(bucket, bucket.backend_bucket.step) for bucket in buckets]

    def forget(self) -> None:
        """Forgets the step, which was not completed."""
        self._before = []

    def end(self, model: WrappedModel) -> None:
        """Ends the step. Raises BaguaError if a bucket was not communicated since :meth:`begin`."""
        before, self._before = self._before, []
        buckets = [bucket.name for bucket, step in before if bucket.backend_bucket.step == step]
        if not buckets:
            return
        which = f"bucket {buckets[0]!r} was" if len(buckets) == 1 else f"buckets {buckets} were"
        error = BaguaError(
            f"{which} not communicated in step {model.step} of model {model.bagua_module_name!r} on rank "
            f"{model.backend.rank}, so that the ranks train apart: an algorithm has to mark each tensor of a bucket "
            "ready in each step (tensor.bagua_mark_communication_ready())"
        )
        # The other ranks may wait for these buckets.
        raise model.backend.reported(error)


class OwnSteps:
    """If weights are exchanged: refuses optimizer steps without a training forward.

    One such step stays on this rank until the next exchange. Ranks that take two in a row would train alone.
    """

    def __init__(self) -> None:
        self._forwards = 0
        # True if a backward outside a step has communicated since the last training forward.
        self._outside = False
        # Optimizer -> number of forwards at its last step, and True if that step had no training forward.
        self._last: MutableMapping[torch.optim.Optimizer, tuple[int, bool]] = weakref.WeakKeyDictionary()

    def forward_begins(self) -> None:
        """Called before each training forward."""
        self._forwards += 1
        self._outside = False

    def backward_begins(self, in_step: bool) -> None:
        """Called before each backward that communicates. ``in_step`` is True after a training forward began a step."""
        self._outside = self._outside or not in_step

    def check(self, model: WrappedModel, algorithm: str, optimizer: torch.optim.Optimizer) -> None:
        """Called before each optimizer step. Raises BaguaError for two in a row without a training forward."""
        before, was = self._last.get(optimizer, (0, False))
        now = self._outside and before == self._forwards
        self._last[optimizer] = (self._forwards, now)
        if now and was:
            error = BaguaError(
                f"optimizer.step() on rank {model.backend.rank}, for the second time in a row after a backward of "
                f"model {model.bagua_module_name!r} without a training forward: with {algorithm} a step begins with a "
                "call of the model itself, model(...), in training mode; call model.train() before, and neither "
                "model.forward(...) nor a part or another method of the model instead"
            )
            raise model.backend.reported(error)


class PassingForwards:
    """If weights are exchanged: finds forwards through which another model is trained.

    An example is a GAN's discriminator in the loss of the generator. Its backward reaches the parameters, but no step
    follows. An input of such a forward needs a gradient, but so does an input in a chain of models that are trained
    together. The first such backward decides: either a step of this model follows, or not. The result is the same on
    all ranks, which run the same program.
    """

    def __init__(self) -> None:
        # For each forward since the last backward: True if an input needed a gradient.
        self._passing: list[bool] = []
        # True if the last backward followed only such forwards and no optimizer of the model has stepped since.
        self._pending = False
        # True if no step of the model follows such a backward; None if unknown.
        self._no_step_follows: bool | None = None

    def are_of_another(self, inputs: Any) -> bool:
        """Called before each training forward. Returns True if the forward belongs to the training of another model."""
        if self._pending and self._no_step_follows is None:
            self._no_step_follows = True
        passing = any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves(inputs))
        self._passing.append(passing)
        return passing and self._no_step_follows is True

    def backward_ends(self) -> None:
        """Called after each backward that communicates."""
        self._pending = bool(self._passing) and all(self._passing)
        self._passing = []

    def stepped(self) -> None:
        """Called after each step of an optimizer of the model."""
        if self._pending:
            self._no_step_follows = self._pending = False


def require_exchanged(model: WrappedModel, optimizer: torch.optim.Optimizer) -> None:
    """Raises BaguaError if a gradient was not exchanged. Called if no backward has run since the optimizer's last step.

    Accepts optimizers that the wrapper was not given (torch's DDP is given none), whose program may average gradients
    itself.
    """
    if not any(optimizer is given for given in model.bagua_optimizers):
        return
    name = model.exchange.given_gradient({id(param) for group in optimizer.param_groups for param in group["params"]})
    if name is not None:
        error = BaguaError(
            f"optimizer.step() on rank {model.backend.rank} would use a gradient of {name!r} of model "
            f"{model.bagua_module_name!r} that no backward() has computed, so the ranks did not average it: "
            "torch.autograd.grad computed it, or it was assigned or changed since; call backward(), or average such "
            "gradients yourself and do not give the optimizer to the wrapper"
        )
        # The other ranks wait for this rank's gradients.
        raise model.backend.reported(error)


@contextlib.contextmanager
def explain_empty_steps(model: WrappedModel) -> Iterator[None]:
    """If the block raises a MismatchError about step numbers, adds how often this rank left out a backward."""
    try:
        yield
    except MismatchError as error:
        if not model.exchange.needs_gradients or " in step " not in str(error):
            raise
        text = (
            f"{error}; rank {model.backend.rank} has called optimizer.step() {model.empty_steps} times after a forward "
            f"of model {model.bagua_module_name!r} without a backward: if a rank leaves out a backward, all ranks must"
        )
        raise MismatchError(text, record=error.record) from error


@contextlib.contextmanager
def explain_weights(model: WrappedModel) -> Iterator[None]:
    """If the block raises a MismatchError of two all_reduces, adds whether this rank exchanges weights of ranks."""
    try:
        yield
    except MismatchError as error:
        # Both ranks do an all_reduce. A message that was changed on its way is another mismatch.
        if " in step " in str(error) or str(error).count("all_reduce") < 2:
            raise
        has = "has not" if model.votes.room is None else "has"
        text = (
            f"{error}; rank {model.backend.rank} {has} called set_weight() of model {model.bagua_module_name!r}: all "
            "ranks must call it for the first time before the same exchange"
        )
        raise MismatchError(text, record=error.record) from error


def step_inside_backward(rank: int, model_name: str) -> BaguaError:
    """Returns the error for an optimizer step in a hook of a backward, if gradients are exchanged."""
    return BaguaError(
        f"optimizer.step() on rank {rank} inside a backward, before the gradients of model {model_name!r} are "
        "communicated: step when backward() has returned, not in a hook"
    )


def ignored_names(
    modules: Mapping[str, torch.nn.Module], parameters: Mapping[str, torch.nn.Parameter]
) -> frozenset[str]:
    """Returns the names of tensors that are not communicated: those that the user listed, and those of experts.

    ``modules`` and ``parameters`` are the model's, by name. The model itself has the name "".
    """
    names = {name for name, param in parameters.items() if getattr(param, "expert", False) is True}
    for path, child in modules.items():
        # `is True`: a module may have a child of that name.
        if getattr(child, "expert", False) is True:
            names.update(f"{path}.{name}" if path else name for name, _ in child.named_buffers())
    for attribute in ("_bagua_params_and_buffers_to_ignore", "_ddp_params_and_buffers_to_ignore"):
        names.update(getattr(modules[""], attribute, ()))
    return frozenset(names)


def refuse_torchs_wrapper(module: torch.nn.Module, model_name: str, inside: Any) -> None:
    """Raises BaguaError if ``inside``, a DistributedDataParallel of torch, also sends gradients of ``module``."""
    own = {id(param) for param in module.parameters() if param.requires_grad}
    for name, param in inside.module.named_parameters():
        if id(param) in own and name not in inside.parameters_to_ignore and not getattr(param, "_ddp_ignored", False):
            raise BaguaError(
                f"model {model_name!r} is wrapped by Bagua and by torch's DistributedDataParallel, so that the ranks "
                "would send each gradient twice: keep one of them. To keep Bagua's, do not pass the model to torch's "
                "DistributedDataParallel (accelerate: call prepare() without the model; Lightning: use the strategy "
                '"bagua" instead of "ddp"). To keep torch\'s, do not call with_bagua'
            )


def check_module(
    modules: Iterable[torch.nn.Module],
    parameters: Mapping[str, torch.nn.Parameter],
    buffers: Mapping[str, torch.Tensor],
    older: Any,
) -> None:
    """Raises an error if the model cannot be wrapped.

    ``modules`` are the model and all modules in it, ``parameters`` and ``buffers`` those to communicate. ``older`` is
    the wrapper that communicates for the model now and will end, or None.
    """
    if any(isinstance(child, torch.nn.parallel.DistributedDataParallel) for child in modules):
        raise ValueError(
            "the model is, or holds, torch's DistributedDataParallel, which sends the gradients too: wrap its .module "
            "instead, and do not use torch's wrapper"
        )
    # Name and device of the first tensor.
    first: tuple[str, torch.device] | None = None
    # Combinations of properties that passed the checks. Other parameters with the same properties pass, too.
    passed: set[Any] = set()
    for name, param in parameters.items():
        what = f"parameter {name!r}"
        kind = type(param), param.device, param.layout, param.dtype, param.requires_grad
        if kind not in passed:
            if is_lazy(param):
                raise ValueError(f"{what} has no shape yet: run one forward before it is wrapped")
            if hasattr(param, "placements"):
                raise NotImplementedError(
                    f"{what} is a DTensor, whose parts are on several ranks: such models cannot be wrapped"
                )
            devices.check_place(param, what)
            first = first or (what, param.device)
            _check_same_place(first, what, param)
            if param.requires_grad:
                dtype_code(param, what)
            passed.add(kind)
        if param.requires_grad:
            if model_state.optimizer_reducers:
                _check_not_reduced(param, what)
            # Keeps only the owner's name: an exception keeps its frame's variables alive, and so the engine.
            owner = owner_of(param)
            other = None if owner is older else getattr(owner, "bagua_module_name", None)
            del owner
            if other is not None:
                raise ValueError(
                    f"{what} is already communicated by model {other!r}, and can belong to one wrapped "
                    "model: drop the other wrapper first (del model), or call bagua.torch_api.unwrap on it"
                )
    for name, buffer in buffers.items():
        _check_buffer(name, buffer)
        # A host buffer of a model on a device is broadcast separately.
        if first is not None and buffer.is_cuda:
            _check_same_place(first, f"buffer {name!r}", buffer)


def _check_not_reduced(param: torch.Tensor, what: str) -> None:
    """Raises ValueError for a parameter of an ``hvd.DistributedOptimizer``."""
    reducer = model_state.optimizer_reducers.get(param)
    if reducer is not None and reducer() is not None:
        raise ValueError(
            f"the gradient of {what} is communicated by an hvd.DistributedOptimizer already, so that the ranks would "
            "send it twice: keep one of them. To keep DistributedOptimizer, do not wrap the model. To keep the wrapped "
            "model, pass it the plain optimizer, and drop the DistributedOptimizer before (del optimizer)"
        )


def _check_buffer(name: str, buffer: torch.Tensor) -> None:
    """Raises an error for a buffer that cannot receive rank 0's values."""
    if is_lazy(buffer):
        raise ValueError(f"buffer {name!r} has no shape yet: run one forward before it is wrapped")
    devices.check_place(buffer, f"buffer {name!r}")
    if buffer.is_quantized:
        raise NotImplementedError(f"buffer {name!r} is quantized, {buffer.dtype}: such tensors are not communicated")
    if any(stride == 0 and size > 1 for stride, size in zip(buffer.stride(), buffer.shape, strict=True)):
        raise ValueError(
            f"buffer {name!r} of shape {list(buffer.shape)} is expanded: several of its elements share one place in "
            "memory, which cannot be written; register expanded.clone()"
        )


def _check_same_place(first: tuple[str, torch.device], what: str, tensor: torch.Tensor) -> None:
    """Raises TypeError for a tensor on another device than the model's first tensor."""
    if tensor.device != first[1]:
        raise TypeError(
            f"{first[0]} is on {first[1]}, and {what} on {tensor.device}: a model is on the host or on one device"
        )
