"""The way of a gradient from the hook that sees it first to the moment when backward returns.

With flattening each bucket owns one piece of memory, and a gradient that autograd put elsewhere (always after
``zero_grad()``, which drops it) is copied there once and then replaced by its place in the bucket. Without, the core
works on the gradient's own memory, or on a copy: where another tensor may have that memory, and where the gradient is a
lazy negation or conjugate (``is_neg()``, ``is_conj()``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from bagua.errors import BaguaError

from ..bucket import BaguaBucket
from ..process_group import ReduceOp
from ..tensor import BaguaTensor, is_lazy_value, layout_of, registration, resolved
from .backend import Backend
from .exchange import Exchange
from .sparse import SparseExchange


def _grad_of(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _set_grad(parameter: torch.Tensor, grad: torch.Tensor) -> None:
    parameter.grad = grad


_references: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


def _is_in_use(grad: torch.Tensor) -> bool:
    """True if another tensor may have its memory: one that autograd still reads in this backward, or the gradient of
    another parameter, as after ``a.view(-1) + b.view(-1)``.
    """
    # One reference is the tensor's, one that of the Python object.
    return _references is None or _references(grad.untyped_storage()._cdata) > 2


def _one() -> float:
    return 1.0


@dataclass
class Slot:
    """One parameter's gradient."""

    name: str
    param: torch.nn.Parameter
    # Had a gradient before it was registered; otherwise it goes back to None until there is one.
    had_grad: bool
    # Its place in the bucket's memory; None when the bucket is not flattened.
    view: torch.Tensor | None = None
    # What the core was told of last; alive as long as it may look there.
    wire: torch.Tensor | None = None
    # Handed to the engine in this backward.
    sent: bool = False
    # The engine's number of it, from the first backward on.
    number: int | None = None
    # In a static graph: gradients that came in this backward, and how many come in each (0: not known yet).
    came: int = 0
    expected: int = 0


@dataclass
class _Backward:
    """What happened since the last backward that communicated."""

    # Accumulated under no_sync: these hold gradients that the others have not seen.
    touched: set[str] = field(default_factory=set)
    # Gradients whose communicated values must be copied back, as their own memory could not be used.
    write_back: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    # The first thing that the engine refused; raised at the end, where an unused parameter would explain it better.
    failure: Exception | None = None


class GradientExchange(Exchange):
    """The gradients of one model and what has become of them in this backward."""

    needs_gradients = True

    def __init__(
        self,
        backend: Backend,
        module_name: str,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        find_unused: bool,
        sparse: SparseExchange,
    ) -> None:
        self._backend = backend
        self._module_name = module_name
        self._parameters = [(name, param) for name, param in parameters if name not in sparse]
        self._sparse = sparse
        self._find_unused = find_unused
        #: Called with the name of a parameter that no rank used, its communicated gradient, and the gradient of this
        #: rank, which comes back.
        self.discarded: Callable[[str, torch.Tensor, torch.Tensor | None], None] | None = None
        #: By what the communicated gradients are multiplied before backward returns.
        self.factor: Callable[[], float] = _one
        #: The graph is the same in each step: a parameter may get several gradients in one backward.
        self.is_static = False
        #: A gradient to which a backward brought nothing is communicated: the user may have put it there.
        self.takes_given = False
        self._slots: dict[str, Slot] = {}
        self._now = _Backward()

    def register(self) -> list[torch.Tensor]:
        """The parameters as Bagua tensors whose effective tensor is their gradient, the last of the model first.

        Without those whose gradients are sparse, which have no place in a bucket.
        """
        self._slots = {}
        tensors = []
        for name, param in reversed(self._parameters):
            had_grad = param.grad is not None
            if param.grad is not None and (is_lazy_value(param.grad) or layout_of(param.grad) != param.grad.stride()):
                param.grad = resolved(param.grad).contiguous()
            BaguaTensor.bagua_ensure_grad(param)
            tensors.append(BaguaTensor.ensure_bagua_tensor(param, name, self._module_name, _grad_of, _set_grad))
            self._slots[name] = Slot(name, param, had_grad)
        return tensors

    def bind(self, buckets: Sequence[BaguaBucket]) -> None:
        """Takes over what the buckets made of the gradients; called when they are registered with the engine."""
        for bucket in buckets:
            for tensor in bucket.tensors:
                slot = self._slots.get(registration(tensor).name)
                if slot is None:
                    continue
                slot.wire = slot.param.grad
                slot.view = slot.param.grad if bucket.flatten else None
                if not slot.had_grad:
                    # An optimizer steps where there is a gradient, even of zeros: none until backward brings one.
                    slot.param.grad = None

    def accumulated(self, name: str) -> None:
        """A gradient that is not communicated yet."""
        self._now.touched.add(name)

    def arrived(self, name: str, param: torch.nn.Parameter) -> None:
        """A gradient is complete on this rank: hands it to the engine."""
        if name in self._sparse:
            self._sparse.arrived(name)
            return
        slot = self._slots.get(name)
        if slot is None:
            return
        if slot.sent:
            raise BaguaError(
                f"parameter {name!r} got a second gradient in one backward, after the first was sent: used in "
                "several re-entrant checkpoints; pass use_reentrant=False to torch.utils.checkpoint"
            )
        if self.is_static:
            slot.came += 1
            # In the first backward they go when it is over.
            if slot.came != slot.expected:
                return
        self._send(slot)

    def _send(self, slot: Slot) -> None:
        grad = slot.param.grad
        if grad is None:
            raise BaguaError(
                f"the gradient of {slot.name!r} was removed by another hook before it could be communicated"
            )
        if grad.layout != torch.strided:
            raise self._backend.reported(
                NotImplementedError(
                    f"the gradient of {slot.name!r} of model {self._module_name!r} is {grad.layout} on rank "
                    f"{self._backend.rank}: only weights of Embedding and EmbeddingBag modules with "
                    "sparse=True when the model was wrapped can have sparse gradients"
                )
            )
        slot.sent = True
        if slot.view is not None:
            self._into_view(slot, slot.view, grad)
            self._mark(slot, None)
        else:
            self._mark(slot, self._own_memory(slot, grad))

    def _into_view(self, slot: Slot, view: torch.Tensor, grad: torch.Tensor) -> None:
        same_memory = grad.data_ptr() == view.data_ptr() and grad.stride() == view.stride()
        if grad is view or (same_memory and not is_lazy_value(grad)):
            return
        with torch.no_grad():
            view.copy_(grad)
        if grad.requires_grad:
            # create_graph=True: this tensor carries a graph that somebody may still differentiate.
            self._now.write_back.append((grad, view))
        else:
            slot.param.grad = view

    def _own_memory(self, slot: Slot, grad: torch.Tensor) -> torch.Tensor:
        if slot.wire is not None and slot.wire.data_ptr() != grad.data_ptr():
            # Its reference to memory that the gradient was given again must not count as another tensor's.
            slot.wire = None
        in_use = slot.wire is None and _is_in_use(grad)
        wire = grad.detach()
        # The other ranks expect the parameter's layout.
        expected = slot.param.stride() if layout_of(slot.param) == slot.param.stride() else layout_of(grad)
        fits = grad.stride() == expected == layout_of(grad) and grad.dtype == slot.param.dtype
        # The core reads memory, and torch's lazy negation and conjugate change no memory: without a copy, the gradients
        # of the ranks that have one would be averaged with the wrong sign.
        if in_use or not fits or is_lazy_value(grad):
            with torch.no_grad():
                wire = torch.empty_like(slot.param, requires_grad=False).copy_(grad)
            self._now.write_back.append((grad, wire))
        slot.wire = wire
        return wire

    def _mark(self, slot: Slot, wire: torch.Tensor | None) -> None:
        if self._now.failure is not None:
            return
        try:
            if slot.number is None:
                slot.number = self._backend.number(slot.name)
            self._backend.mark_ready(slot.number, wire)
        except (BaguaError, ValueError) as failure:
            self._now.failure = failure

    def finish(self) -> None:
        """Waits until every gradient is communicated; what went wrong is raised here, out of ``backward()``."""
        try:
            unused = self._rest()
            if self.is_static:
                for slot in self._slots.values():
                    slot.expected = slot.expected or slot.came
            names = [slot.name for slot in unused] + self._sparse.unused(self._now.touched)
            if names and not self._find_unused:
                raise self._unused(names)
            if self._now.failure is not None:
                raise self._now.failure
            nowhere: set[str] = set()
            if self._find_unused:
                nowhere = self._wait_and_agree(unused)
            else:
                self._wait()
            for grad, wire in self._now.write_back:
                # Not through autograd: the values are averaged, the graph stays that of this rank.
                grad.data.copy_(wire)
            self._sparse.exchange(self._now.touched)
            self._scale(nowhere)
            self._completed(nowhere)
        finally:
            self._reset()

    def _wait(self) -> None:
        """Waits until every bucket is communicated."""
        self._backend.wait_pending_comm_ops()

    def _scale(self, nowhere: set[str]) -> None:
        factor = self.factor()
        if factor == 1:
            return
        for name, param in [*self._parameters, *self._sparse.parameters()]:
            if param.grad is not None and name not in nowhere:
                param.grad.data.mul_(factor)

    def shadow(self) -> None:
        """Takes part in the exchange of a backward that this rank does not make, with zeros. Its gradients stay."""
        own = [(param, param.grad) for _, param in [*self._parameters, *self._sparse.parameters()]]
        kept = [(param, None if grad is None else grad.clone()) for param, grad in own]
        try:
            for param, _ in own:
                param.grad = None
            if self._find_unused:
                self._wait_and_agree(list(self._slots.values()))
            else:
                for slot in self._slots.values():
                    slot.param.grad = torch.zeros_like(slot.param, requires_grad=False)
                    self._send(slot)
                self._wait()
            if self._now.failure is not None:
                raise self._now.failure
            self._sparse.exchange(())
        finally:
            self._reset()
            for param, grad in kept:
                param.grad = grad

    def _completed(self, nowhere: set[str]) -> None:
        """Every bucket is communicated. ``nowhere``: names of the parameters that no rank has a gradient for."""

    def _rest(self) -> list[Slot]:
        """Sends what was accumulated under no_sync and got nothing now; returns what has no gradient to send."""
        unused = []
        for slot in self._slots.values():
            if slot.sent:
                continue
            came = self.takes_given or slot.came > 0 or slot.name in self._now.touched
            if came and slot.param.grad is not None:
                self._send(slot)
            else:
                unused.append(slot)
        return unused

    def _unused(self, unused: Sequence[str]) -> Exception:
        names = ", ".join(map(repr, unused))
        # The others wait for buckets that will never be complete.
        return self._backend.reported(
            BaguaError(
                f"no gradient for {names} of model {self._module_name!r} in this backward on rank "
                f"{self._backend.rank}: the loss does not depend on them; pass "
                "find_unused_parameters=True if that is meant"
            )
        )

    def _wait_and_agree(self, unused: Sequence[Slot]) -> set[str]:
        """Names of the parameters that no rank used."""
        before: dict[str, torch.Tensor | None] = {}
        for slot in unused:
            grad = slot.param.grad
            before[slot.name] = None if grad is None else grad.clone()
            if grad is None:
                slot.param.grad = torch.zeros_like(slot.param, requires_grad=False)
            self._send(slot)
        used = torch.tensor([slot.name not in before for slot in self._slots.values()], dtype=torch.uint8)
        handle = self._backend.all_reduce(used, ReduceOp.MAX)
        self._wait()
        handle.wait()
        nowhere = {name for name, anywhere in zip(self._slots, used.tolist(), strict=True) if not anywhere}
        for name in nowhere:
            slot = self._slots[name]
            if self.discarded is not None and slot.param.grad is not None:
                self.discarded(name, slot.param.grad, before[name])
            # As if there had been no communication, so that an optimizer leaves the parameter alone.
            slot.param.grad = before[name]
        return nowhere

    def abandon(self) -> None:
        """Forgets a backward that never came to its end."""
        with contextlib.suppress(BaguaError, ValueError):
            # Incomplete buckets are an error that nobody needs to hear twice; what broke the backward was raised there.
            self._backend.wait_pending_comm_ops()
        self._reset()

    def _reset(self) -> None:
        self._now = _Backward()
        self._sparse.reset()
        for slot in self._slots.values():
            slot.sent, slot.came = False, 0
