"""Optimizer steps: calls a model's engine around them, and knows which steps its weights wait for.

Optimizers given to ``with_bagua`` get hooks of their own. Any other ``torch.optim.Optimizer`` that holds parameters of
the model, such as a new one for a second phase of training, is covered by two hooks that torch calls for every
optimizer of the process.
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

from .algorithm_interface import Exchange, WrappedModel
from .state import model_state


class Follower(Protocol):
    """The engine of a model."""

    bagua_optimizers: list[torch.optim.Optimizer]

    def holds_parameters_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """Returns True if the optimizer holds parameters that the engine communicates for."""

    def before_optimizer(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> bool:
        """Called before a step. Returns True if :meth:`optimizer_returned` must be called."""

    def after_optimizer(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """Called after a step that did not raise."""

    def optimizer_returned(self) -> None:
        """Called after a step. If the step raised, called when no reference to the exception is left."""


class _StepArguments(dict[str, Any]):
    """The keyword arguments of an optimizer's step. A step that raised ends when they are freed, because torch has no
    hook for its end.
    """

    def __init__(self, engines: Sequence[Follower], arguments: Any) -> None:
        super().__init__(arguments)
        self._engines = [weakref.ref(engine) for engine in engines]

    def __del__(self) -> None:
        for reference in self._engines:
            if (engine := reference()) is not None:
                engine.optimizer_returned()


def _has_closure(args: Any, kwargs: Any) -> bool:
    """Returns True if a step computes its gradients itself. The first argument is the optimizer."""
    return any(callable(each) for each in (*args[1:], kwargs.get("closure")))


def _begin_step(engines: Sequence[Follower], optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    has_closure = _has_closure(args, kwargs)
    notified = [engine for engine in engines if engine.before_optimizer(optimizer, has_closure=has_closure)]
    return (args, _StepArguments(notified, kwargs)) if notified else None


def follow_given(engine: Follower, optimizers: Sequence[torch.optim.Optimizer]) -> list[RemovableHandle]:
    """Calls an engine around the steps of these optimizers."""
    this = weakref.ref(engine)

    def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        return None if (engine := this()) is None else _begin_step([engine], optimizer, args, kwargs)

    def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if (engine := this()) is not None:
            engine.after_optimizer(optimizer, has_closure=_has_closure(args, kwargs))

    handles = []
    for optimizer in optimizers:
        handles.append(optimizer.register_step_pre_hook(before_step))
        handles.append(optimizer.register_step_post_hook(after_step))
    return handles


def follow_others() -> None:
    """Calls engines around the steps of optimizers that they were not given. Called once per process.

    The hooks are never removed: torch iterates over them while they run, and an engine may be collected meanwhile.
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


# Not compiled, like torch's own hooks around a step.
@torch._disable_dynamo  # type: ignore[attr-defined]
def _before_any_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    return _begin_step(_engines_of_other(optimizer), optimizer, args, kwargs)


@torch._disable_dynamo  # type: ignore[attr-defined]
def _after_any_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for engine in _engines_of_other(optimizer):
        engine.after_optimizer(optimizer, has_closure=_has_closure(args, kwargs))


def gradients_are_finite(params: Sequence[torch.Tensor]) -> bool:
    """Returns False if GradScaler would find an overflow and skip the optimizer."""
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
    """Finds the optimizer step after which a model's weights are communicated.

    Expected are the optimizers given to ``with_bagua``, and other optimizers after their first step. After a backward,
    the weights wait until each parameter that has a gradient and belongs to an expected optimizer was part of a step. A
    new optimizer with the parameters of an old one thus takes its place. If no optimizer is known yet, all parameters
    with a gradient count. A step inside another optimizer's step is part of that step.
    """

    def __init__(self, model: str, parameters: Sequence[torch.Tensor], given: Sequence[torch.optim.Optimizer]) -> None:
        self._model = model
        self._parameters = {id(param): param for param in parameters}
        self._expected: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        for optimizer in given:
            if self._held(optimizer):
                self._expected.add(optimizer)
        # Optimizers that GradScaler skips in this step because their gradients are not finite.
        self._skipping: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        # Ids of the parameters that were part of a step since the last backward.
        self._stepped: set[int] = set()
        # Ids of optimizers whose steps run, outermost first. The id of a step that raised stays until the next.
        self._running: list[int] = []
        # True if the weights were communicated since the last backward.
        self._complete = False

    def _held(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        return [param for param in parameters_of(optimizer) if id(param) in self._parameters]

    def backward_ended(self, *, looks_at_gradients: bool) -> bool:
        """Starts to wait for steps.

        With ``looks_at_gradients``, returns True if GradScaler will skip all optimizers because gradients are not
        finite.
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
        """Records that the last awaited step has returned and the weights were communicated."""
        self._complete = True

    def begins(self, optimizer: torch.optim.Optimizer) -> bool:
        """Records that a step begins. Returns True if the optimizer holds parameters of the model.

        Raises BaguaError for an unexpected optimizer after the last expected one has stepped.
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
        """Records that a step has returned. Returns True if no other step is awaited."""
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
    """Tensors that are communicated between two steps.

    The ranks communicate after the last optimizer has stepped with the gradients of a step's backward. If an optimizer
    does not step, they communicate before the next step.
    """

    def __init__(self, bagua_ddp: WrappedModel) -> None:
        super().__init__(bagua_ddp)
        # Knows which optimizers have yet to step before this rank sends its part.
        self._steps = AwaitedSteps(
            self._module_name, [param for _, param in self._parameters], bagua_ddp.bagua_optimizers
        )
        # True from the beginning of a step that communicates until its backward ends.
        self._open = False
        # True from the end of that backward until this rank sends its part.
        self._due = False
        # True from when the part is sent until the result is taken over.
        self._sent = False
        # True if an optimizer has stepped since this rank sent its part.
        self._changed = False

    @abstractmethod
    def _send(self, *, waits: bool) -> None:
        """Gives this rank's part to the engine. ``waits``: :meth:`_take_over` follows at once."""

    @abstractmethod
    def _take_over(self) -> None:
        """Changes the parameters by the result, which has been received."""

    @abstractmethod
    def _forget(self) -> None:
        """Called instead of :meth:`_take_over` if nothing may change any more."""

    def begin(self) -> None:
        """Begins a step after which the ranks communicate."""
        self._open = True

    def finish(self) -> None:
        """Ends the step's backward. Its optimizers step next.

        If GradScaler will skip every optimizer because gradients are not finite, this rank sends its part at once and
        does not wait. No other rank then waits for its next forward.
        """
        self._due = self._due or self._open
        self._open = False
        if self._steps.backward_ended(looks_at_gradients=self._due):
            self._start(waits=False)

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Records an optimizer step. After the last one, the ranks communicate; the call is collective then."""
        self._changed = True
        if self._steps.is_last(optimizer) and self._due:
            self.before_step()
            self._steps.communicated()

    def before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes over a result sent after backward if an optimizer steps with gradients that are not finite."""
        if self._steps.begins(optimizer) and self._sent:
            self.before_step()

    def before_step(self) -> None:
        """Communicates if a backward has ended since the last time. Collective then."""
        if self._due:
            self._start(waits=True)
        self.before_load()

    def before_load(self) -> None:
        """Takes over a pending result, which would otherwise replace the loaded weights in the next step."""
        if self._waited_for_sent():
            self._take_over()

    def before_flags(self) -> None:
        """Takes over a result that this rank did not wait for, because GradScaler was going to skip its optimizers."""
        self.before_load()

    def drop(self) -> bool:
        """Waits for what was sent, and sends nothing. Returns True if changes were not sent."""
        if self._waited_for_sent():
            self._forget()
        return self._due and self._changed

    def _start(self, *, waits: bool) -> None:
        # Reset first: if sending fails, the group is unusable, but the state can still be saved.
        self._due = self._changed = False
        self._send(waits=waits)
        self._sent = True

    def _waited_for_sent(self) -> bool:
        """Waits for the result if a part was sent. Returns True if one was."""
        sent, self._sent = self._sent, False
        if sent:
            self._backend.wait_pending_comm_ops()
        return sent
