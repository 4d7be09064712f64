"""The steps of optimizers: how the engine of a model is called for them, and which of them its weights wait for.

The optimizers that were given to ``with_bagua`` have hooks of their own. Any other ``torch.optim.Optimizer`` that holds
parameters of the model, such as a new one for a second phase of training, is followed by two hooks that torch calls for
every optimizer of the process.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from bagua.errors import BaguaError

from .exchange_interface import Exchange, WrappedModel
from .state import model_state


class Follower(Protocol):
    """The engine of a model."""

    bagua_optimizers: list[torch.optim.Optimizer]

    def holds_parameters_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer holds parameters that the engine communicates for."""

    def before_optimizer(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> bool:
        """Before a step. Whether :meth:`optimizer_returned` has to be called."""

    def after_optimizer(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """After a step that did not raise."""

    def optimizer_returned(self) -> None:
        """After a step, also when it raised: then when no reference to the exception is left."""


class _StepArguments(dict[str, Any]):
    """The keyword arguments of an optimizer's step. They last as long: torch calls no hook when it raises."""

    def __init__(self, engines: Sequence[Follower], arguments: Any) -> None:
        super().__init__(arguments)
        self._engines = [weakref.ref(engine) for engine in engines]

    def __del__(self) -> None:
        for reference in self._engines:
            if (engine := reference()) is not None:
                engine.optimizer_returned()


def _has_closure(args: Any, kwargs: Any) -> bool:
    """Whether a step computes its gradients itself; the first argument is the optimizer."""
    return any(callable(each) for each in (*args[1:], kwargs.get("closure")))


def _begin(engines: Sequence[Follower], optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    has_closure = _has_closure(args, kwargs)
    notified = [engine for engine in engines if engine.before_optimizer(optimizer, has_closure=has_closure)]
    return (args, _StepArguments(notified, kwargs)) if notified else None


def follow_given(engine: Follower, optimizers: Sequence[torch.optim.Optimizer]) -> list[RemovableHandle]:
    """Calls an engine around the steps of these optimizers."""
    this = weakref.ref(engine)

    def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        return None if (engine := this()) is None else _begin([engine], optimizer, args, kwargs)

    def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if (engine := this()) is not None:
            engine.after_optimizer(optimizer, has_closure=_has_closure(args, kwargs))

    handles = []
    for optimizer in optimizers:
        handles.append(optimizer.register_step_pre_hook(before_step))
        handles.append(optimizer.register_step_post_hook(after_step))
    return handles


def follow_others() -> None:
    """Calls the engines around the steps of optimizers that they were not given. Called once per process.

    The hooks stay: torch iterates over them while they run, and an engine may be collected meanwhile.
    """
    register_optimizer_step_pre_hook(_before_any_step)
    register_optimizer_step_post_hook(_after_any_step)


def _engines_of_other(optimizer: torch.optim.Optimizer) -> list[Follower]:
    engines: list[Follower] = list(model_state.wrapped.values())
    return [
        engine
        for engine in engines
        if not any(optimizer is given for given in engine.bagua_optimizers) and engine.holds_parameters_of(optimizer)
    ]


# Not compiled: torch's own hooks around the step are no part of a graph either.
@torch._disable_dynamo  # type: ignore[attr-defined]
def _before_any_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    return _begin(_engines_of_other(optimizer), optimizer, args, kwargs)


@torch._disable_dynamo  # type: ignore[attr-defined]
def _after_any_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for engine in _engines_of_other(optimizer):
        engine.after_optimizer(optimizer, has_closure=_has_closure(args, kwargs))


def gradients_are_finite(params: Sequence[torch.Tensor]) -> bool:
    """False where GradScaler finds an overflow, and skips their optimizer."""
    for param in params:
        grad = param.grad
        if grad is None:
            continue
        values = grad._values() if grad.is_sparse else grad
        if not bool(torch.isfinite(values).all()):
            return False
    return True


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All parameters of its groups."""
    return [param for group in optimizer.param_groups for param in group["params"]]


class AwaitedSteps:
    """After which step of which optimizer the weights of a model are communicated.

    Expected are the optimizers given to ``with_bagua``, and others from their first step on. After a backward the
    weights wait until each parameter that has a gradient, and that an expected optimizer holds, was in a step: so a new
    optimizer with the parameters of an old one takes its place. Where no optimizer is known yet, all parameters that
    have a gradient count. An optimizer that steps inside another one's step is a part of that one.
    """

    def __init__(self, model: str, parameters: Sequence[torch.Tensor], given: Sequence[torch.optim.Optimizer]) -> None:
        self._model = model
        self._parameters = {id(param): param for param in parameters}
        self._expected: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        for optimizer in given:
            if self._held(optimizer):
                self._expected.add(optimizer)
        # Those that GradScaler skips in this step, as their gradients are not finite.
        self._skipping: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        # Ids of the parameters that were in a step since the last backward.
        self._stepped: set[int] = set()
        # Ids of the optimizers whose steps have begun and not returned, one inside the other. One whose step raised
        # stays until its next step.
        self._running: list[int] = []
        # The weights were communicated since the last backward.
        self._complete = False

    def _held(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        return [param for param in parameters_of(optimizer) if id(param) in self._parameters]

    def backward_ended(self, *, looks_at_gradients: bool) -> bool:
        """Steps are awaited from now on. With ``looks_at_gradients``: whether none will come, as GradScaler skips the
        optimizers where gradients are not finite.
        """
        self._stepped = set()
        self._complete = False
        self._skipping.clear()
        if not looks_at_gradients:
            return False
        if not self._expected:
            return not gradients_are_finite(list(self._parameters.values()))
        for optimizer in self._expected:
            if not gradients_are_finite(parameters_of(optimizer)):
                self._skipping.add(optimizer)
        return len(self._skipping) == len(self._expected)

    def communicated(self) -> None:
        """The last awaited step has returned, and the weights were communicated."""
        self._complete = True

    def begins(self, optimizer: torch.optim.Optimizer) -> bool:
        """A step begins. Whether the optimizer holds parameters of the model. BaguaError for an optimizer that was not
        expected, when the last of those that were has stepped.
        """
        if id(optimizer) in self._running:
            del self._running[self._running.index(id(optimizer)) :]
        holds = bool(self._held(optimizer))
        if self._complete and not self._running and optimizer not in self._expected and holds:
            raise BaguaError(
                f"the first step of a {type(optimizer).__name__} with parameters of model {self._model!r} comes after "
                "the weights of this training step were communicated: give with_bagua all optimizers of the model"
            )
        self._running.append(id(optimizer))
        return holds

    def is_last(self, optimizer: torch.optim.Optimizer) -> bool:
        """Called when a step has returned: whether no other is awaited."""
        place = self._running.index(id(optimizer)) if id(optimizer) in self._running else 0
        del self._running[place:]
        held = self._held(optimizer)
        if place > 0 or not held:
            return False
        self._stepped.update(id(param) for param in held)
        if self._expected:
            expected = [other for other in self._expected if other not in self._skipping]
            awaited = [param for other in expected for param in self._held(other)]
        else:
            awaited = list(self._parameters.values())
        self._expected.add(optimizer)
        return all(id(param) in self._stepped for param in awaited if param.grad is not None)


class BetweenSteps(Exchange):
    """What is communicated between two steps: after the last optimizer has stepped with the gradients of a step's
    backward, or before the next step when one of them did not.
    """

    def __init__(self, bagua_ddp: WrappedModel) -> None:
        super().__init__(bagua_ddp)
        # Which optimizers are to step before this rank sends its part.
        self._steps = AwaitedSteps(
            self._module_name, [param for _, param in self._parameters], bagua_ddp.bagua_optimizers
        )
        # A step that communicates has begun, and its backward has not ended.
        self._open = False
        # Its backward has ended, and this rank has not sent its part since.
        self._due = False
        # The part was sent, and the result has not been taken over.
        self._sent = False
        # An optimizer has stepped since this rank sent its part.
        self._changed = False

    @abstractmethod
    def _send(self, *, waits: bool) -> None:
        """Hands this rank's part to the engine. ``waits``: :meth:`_take_over` follows at once."""

    @abstractmethod
    def _take_over(self) -> None:
        """Changes the parameters by the result, which has come."""

    @abstractmethod
    def _forget(self) -> None:
        """Instead of :meth:`_take_over` where nothing may change any more."""

    def begin(self) -> None:
        """A step begins after whose optimizers the ranks communicate."""
        self._open = True

    def finish(self) -> None:
        """The step's backward is done; its optimizers come next.

        Where each of them will skip its step, as GradScaler does where gradients are not finite, this rank sends its
        part at once, without a wait: no other rank waits for its next forward then.
        """
        self._due = self._due or self._open
        self._open = False
        if self._steps.backward_ended(looks_at_gradients=self._due):
            self._start(waits=False)

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped; after the last one the ranks communicate. Collective then."""
        self._changed = True
        if self._steps.is_last(optimizer) and self._due:
            self.before_step()
            self._steps.communicated()

    def before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes over what was sent after the backward: an optimizer steps in spite of its gradients."""
        if self._steps.begins(optimizer) and self._sent:
            self.before_step()

    def before_step(self) -> None:
        """Communicates, if a step's backward has ended since the last time. Collective then."""
        if self._due:
            self._start(waits=True)
        self.before_load()

    def before_load(self) -> None:
        """See :meth:`Exchange.before_load`: the next step would put them in place of the weights that are loaded."""
        if self._waited_for_sent():
            self._take_over()

    def drop(self) -> bool:
        """The model was collected: waits for what was sent, and sends nothing. Whether changes were due to be sent."""
        if self._waited_for_sent():
            self._forget()
        return self._due and self._changed

    def _start(self, *, waits: bool) -> None:
        # First: after a failure the group is of no more use, and the state can still be saved.
        self._due = self._changed = False
        self._send(waits=waits)
        self._sent = True

    def _waited_for_sent(self) -> bool:
        """Waits for the result of what was sent. Whether something was."""
        sent, self._sent = self._sent, False
        if sent:
            self._backend.wait_pending_comm_ops()
        return sent
