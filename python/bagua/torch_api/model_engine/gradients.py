"""Communicates gradients, from the hook that first sees a gradient until backward returns.

- **With flattening**, each bucket owns one piece of memory. A gradient that lies elsewhere is copied there, and then
  replaced by a tensor over its place in the bucket. That is always so after ``zero_grad()``, which drops gradients.
- **Without flattening**, the core works on the gradient's own memory, which becomes the core's (see ``bucket_memory``).
  The core works on a copy if another tensor may have that memory, if the layout differs from the other ranks', or if
  the gradient is a lazy negation or conjugate (``is_neg()``, ``is_conj()``).

Changes of a gradient since the last backward are noticed when it is handed to the engine. Later changes are noticed
when all gradients have been communicated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch

from bagua.errors import BaguaError

from ..bucket import BaguaBucket
from ..bucket_memory import BucketSlice, is_lazy_value, layout_of, over
from ..process_group import ReduceOp
from ..tensor import register
from .algorithm_interface import Exchange, Parameters, WrappedModel
from .votes import divide


def grad_of(parameter: torch.Tensor) -> torch.Tensor:
    """Returns the gradient of a parameter, which must have one."""
    assert parameter.grad is not None
    return parameter.grad


def _set_grad(parameter: torch.Tensor, grad: torch.Tensor) -> None:
    parameter.grad = grad


_references: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


def _is_in_use(grad: torch.Tensor) -> bool:
    """Returns True if another tensor may use the gradient's memory.

    That is one that autograd still reads in this backward, or the gradient of another parameter, as after ``a.view(-1)
    + b.view(-1)``.
    """
    # Two references are expected: the tensor's, and that of the Python object of its storage.
    return _references is None or _references(grad.untyped_storage()._cdata) > 2


def _one() -> float:
    return 1.0


@dataclass(slots=True)
class Slot:
    """The gradient of one parameter."""

    name: str
    param: torch.nn.Parameter
    # True if the parameter had a gradient before it was registered. If not, its gradient is None until a backward.
    had_grad: bool
    # Equal on all ranks, whatever happens to the parameter. The strides have no gaps.
    strides: tuple[int, ...]
    dtype: torch.dtype
    # Place in the memory of a flattened bucket; None in others.
    place: BucketSlice | None = None
    # If the bucket is not flattened: the tensor marked ready last. Users have no reference to it. Kept alive
    # because the core may still read it.
    wire: torch.Tensor | None = None
    # State of this backward: True if handed to the engine; the gradient that was; and its version counter then.
    sent: bool = False
    grad: torch.Tensor | None = None
    version: int = 0
    # The engine's number of the tensor; None if it is in no bucket.
    number: int | None = None
    # In a static graph: number of gradients so far in this backward, and in each one (0: unknown).
    came: int = 0
    expected: int = 0

    def empty(self, device: torch.device) -> torch.Tensor:
        """Returns memory for a gradient in the layout of all ranks."""
        return torch.empty_strided(self.param.shape, self.strides, dtype=self.dtype, device=device)


@dataclass
class _Backward:
    """Events since the last backward that communicated."""

    # Names of parameters with gradients that other ranks have not seen: accumulated under no_sync, or not marked ready
    # by a user's own backward hook.
    touched: set[str] = field(default_factory=set)
    # True if this rank has written its vote.
    voted: bool = False
    # The engine's first error. Raised at the end, because an unused parameter would be the better explanation.
    failure: Exception | None = None


class GradientExchange(Exchange):
    """The gradients of one model, and their state in this backward."""

    needs_gradients = True

    def __init__(self, bagua_ddp: WrappedModel) -> None:
        super().__init__(bagua_ddp)
        self._find_unused = bagua_ddp.find_unused_parameters
        #: Called for a parameter that no rank used, with its name, the communicated gradient, and this rank's gradient,
        #: which is put back.
        self.discarded: Callable[[str, torch.Tensor, torch.Tensor | None], None] | None = None
        #: Returns the factor for communicated gradients, applied before backward returns.
        self.factor: Callable[[], float] = _one
        #: True if the graph is the same in each step. A parameter may then get several gradients in one backward.
        self.is_static = False
        #: True if a gradient that a backward did not touch is communicated, because the user may have set it.
        self.takes_given = False
        # True if a hook of the algorithm marks tensors ready, possibly with memory elsewhere.
        self._has_other_marks = False
        # Recorded before init_tensors gives every parameter a gradient.
        self._had_grad = {name for name, param in self._parameters if param.grad is not None}
        self._slots: dict[str, Slot] = {}
        self._now = _Backward()

    def register(self) -> list[torch.Tensor]:
        """Registers the parameters in reverse order. The communicated tensor of each is its gradient."""
        self._make_slots()
        tensors: list[torch.Tensor] = []
        for name, slot in self._slots.items():
            param, grad = slot.param, slot.param.grad
            if grad is None:
                param.grad = slot.empty(param.device).zero_()
            elif is_lazy_value(grad) or grad.stride() != slot.strides:
                param.grad = slot.empty(grad.device).copy_(grad)
            known = register(param, name, self._module_name, grad_of, _set_grad)
            known.is_stand_in = not slot.had_grad
            tensors.append(param)
        return tensors

    def _make_slots(self) -> None:
        self._slots = {
            name: Slot(name, param, name in self._had_grad, layout_of(param), param.dtype)
            for name, param in reversed(self._parameters)
        }

    def bind(self, buckets: Sequence[BaguaBucket]) -> None:
        """Connects the gradients to their buckets. Called when the buckets are registered with the engine."""
        if not self._slots:
            # The algorithm has its own init_tensors, which registers gradients like the original Bagua's.
            self._make_slots()
        of_grad = {id(grad): slot for slot in self._slots.values() if (grad := slot.param.grad) is not None}
        for bucket in buckets:
            # The padding, which comes last, is left out.
            for number, (tensor, known) in enumerate(zip(bucket.tensors, bucket.registrations, strict=False)):
                slot = of_grad.get(id(known.effective(tensor)))
                if slot is None:
                    continue
                known.is_stand_in = False
                slot.number = self._backend.number(known.name)
                slot.place = bucket.places[number] if bucket.flatten else None
                slot.strides = layout_of(grad_of(slot.param)) if slot.place is None else slot.place.strides
                if not slot.had_grad:
                    # An optimizer would step a gradient of zeros, so there is none until a backward brings one.
                    slot.param.grad = None

    def accumulated(self, name: str) -> None:
        """Records a gradient that is not communicated yet."""
        self._now.touched.add(name)

    def arrived(self, name: str, param: torch.nn.Parameter) -> None:
        """Hands a gradient that is complete on this rank to the engine."""
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
            # In the first backward, gradients are sent when it has ended.
            if slot.came != slot.expected:
                return
        self._send(slot)

    def _send(self, slot: Slot) -> None:
        grad = slot.param.grad
        if grad is None:
            raise BaguaError(
                f"the gradient of {slot.name!r} is None when it is to be communicated: another hook removed it, or the "
                "parameter was frozen between forward and backward"
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
        if not self._now.voted:
            self._now.voted = True
            self._votes.write()
        wire = self._prepare(slot, grad)
        slot.grad = grad = grad_of(slot.param)
        slot.version = grad._version
        self._mark(slot, wire)

    def _prepare(self, slot: Slot, grad: torch.Tensor) -> torch.Tensor | None:
        """Puts a gradient's values where the engine reads them. Returns the tensor that holds them if it is new."""
        place = slot.place
        if place is None:
            wire = self._own_memory(slot, grad)
            self._votes.scale([wire])
            return wire
        if place.holds(grad):
            self._votes.scale([place.own])
        else:
            place.take(grad, self._votes.factor)
            # With create_graph=True, a gradient whose graph may still be differentiated stays.
            if not grad.requires_grad:
                try:
                    slot.param.grad = place.tensor()
                except RuntimeError as error:
                    raise self._backend.reported(
                        BaguaError(
                            f"the gradient of {slot.name!r} of model {self._module_name!r} is {grad.dtype}"
                            f"{list(grad.shape)} on rank {self._backend.rank}, and was {place.dtype}{list(place.shape)}"
                            " when the model was wrapped: wrap the model again after such a change"
                        )
                    ) from error
        return None

    def _own_memory(self, slot: Slot, grad: torch.Tensor) -> torch.Tensor:
        wire = slot.wire
        # The core reads memory, and torch's lazy negation and conjugate do not change memory. Without a copy, such
        # gradients would be averaged with the wrong sign. The layout must be that of the other ranks.
        fits = grad.stride() == slot.strides and grad.dtype is slot.dtype and not is_lazy_value(grad)
        if fits and wire is not None and wire.data_ptr() == grad.data_ptr():
            return wire
        # Dropped first, because its reference to the memory must not count as another tensor's.
        slot.wire = wire = None
        if not fits or grad.requires_grad or _is_in_use(grad):
            wire = slot.empty(grad.device).copy_(grad.detach())
        else:
            wire = grad.detach()
            if not grad.is_cuda:
                grad.data = over(wire)
        slot.wire = wire
        return wire

    def _mark(self, slot: Slot, wire: torch.Tensor | None) -> None:
        if self._now.failure is not None:
            return
        if slot.number is None:
            self._now.failure = BaguaError(
                f"no bucket has the gradient of {slot.name!r} of model {self._module_name!r}, so that the ranks would "
                "not exchange it: an init_tensors of your own has to return it, or the algorithm needs its own "
                "init_backward_hook and init_post_backward_hook for what it returns instead"
            )
            return
        if self._has_other_marks and slot.place is not None:
            wire = slot.place.own
        try:
            self._backend.mark_ready(slot.number, wire)
        except (BaguaError, ValueError) as failure:
            self._now.failure = failure

    def finish(self) -> None:
        """Waits until every gradient is communicated. Raises all errors, out of ``backward()``."""
        try:
            unused = self._rest()
            if self.is_static:
                for slot in self._slots.values():
                    slot.expected = slot.expected or slot.came
            names = [slot.name for slot in unused] + self._unused_beside(self._now.touched)
            if names and not self._find_unused:
                raise self._unused(names)
            if self._now.failure is not None:
                # Other ranks take part in the communication that this rank has begun.
                self._wait_for_begun()
                raise self._now.failure
            nowhere: set[str] = set()
            if self._find_unused:
                nowhere = self._wait_and_agree(unused)
            else:
                self._wait()
                self._settle()
            divisor = self._votes.read()
            self._exchange_beside(self._now.touched, divisor)
            self._scale(nowhere, divisor)
            self._completed(nowhere, divisor)
        finally:
            self._reset()

    def _wait(self) -> None:
        self._backend.wait_pending_comm_ops()

    def _settle(self) -> None:
        """Copies results to gradients that lie elsewhere."""
        for slot in self._slots.values():
            grad = slot.grad
            if grad is None:
                continue
            if slot.param.grad is not grad or grad._version != slot.version:
                what = "changed" if slot.param.grad is grad else "replaced"
                raise BaguaError(
                    f"the gradient of {slot.name!r} of model {self._module_name!r} was {what} on rank "
                    f"{self._backend.rank} while it was communicated: by a hook on a node of the graph, or by another "
                    "thread; a hook that changes gradients belongs to the parameter "
                    "(register_hook, register_post_accumulate_grad_hook)"
                )
            own = slot.wire if slot.place is None else slot.place.own
            if own is not None and grad.data_ptr() != own.data_ptr():
                # Bypasses autograd: values are averaged, but the graph stays that of this rank.
                grad.data.copy_(own)

    def skip(self) -> None:
        """Sends zeros, and drops gradients that were accumulated."""
        self._now.touched.clear()
        for _, param in self._all_parameters():
            param.grad = None
        # Otherwise, all parameters count as unused on this rank.
        if not self._find_unused:
            for slot in self._slots.values():
                slot.param.grad = torch.zeros_like(slot.param, requires_grad=False)
                self._send(slot)

    def _scale(self, nowhere: set[str], divisor: float) -> None:
        if divisor == 0 and self.discarded is not None:
            # This result is not used. It contains accumulated errors, which go back to the memory of error feedback.
            for name, slot in self._slots.items():
                if name not in nowhere and slot.param.grad is not None:
                    self.discarded(name, slot.param.grad, None)
        divide(self._results(nowhere), divisor)
        # With votes, a rank without inputs has weight 0.
        factor = self.factor() if self._votes.room is None else 1
        if factor == 1:
            return
        for name, param in self._all_parameters():
            if param.grad is not None and name not in nowhere:
                param.grad.data.mul_(factor)

    def _results(self, nowhere: set[str]) -> list[torch.Tensor]:
        """Returns the received tensors, except those of parameters for which no rank has a gradient."""
        params = [param for name, param in self._parameters if name not in nowhere]
        return [param.grad.data for param in params if param.grad is not None]

    def shadow(self) -> None:
        """Contributes zeros to the exchange of a backward that this rank does not run. Its gradients do not change."""
        own = [(param, param.grad) for _, param in self._all_parameters()]
        kept = [(param, None if grad is None else grad.clone()) for param, grad in own]
        try:
            self._now.voted = True
            self._votes.write(weight=0)
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
            self._exchange_beside((), self._votes.read())
        finally:
            self._reset()
            for param, grad in kept:
                param.grad = grad

    def _all_parameters(self) -> Parameters:
        """Returns all parameters, including those whose gradients are in no bucket."""
        return self._parameters

    def _unused_beside(self, touched: Collection[str]) -> list[str]:
        """Returns the names of parameters that are in no bucket, have no gradient to send and are not ``touched``."""
        return []

    def _exchange_beside(self, touched: Collection[str], divisor: float) -> None:
        """Communicates gradients that are in no bucket, after the buckets, and divides by ``divisor``. Collective."""

    def _completed(self, nowhere: set[str], divisor: float) -> None:
        """Called when every bucket is communicated and its tensors were divided by ``divisor``. ``nowhere``: names of
        parameters for which no rank has a gradient.
        """

    def _rest(self) -> list[Slot]:
        """Sends gradients that only backwards under no_sync touched. Returns slots without a gradient to send."""
        unused: list[Slot] = []
        rest = [slot for slot in self._slots.values() if not slot.sent]
        # A hook of the algorithm may have marked a tensor ready.
        unready = self._backend.unready() if rest else set()
        for slot in rest:
            if slot.number is not None and slot.number not in unready:
                self._has_other_marks = True
                continue
            came = self.takes_given or slot.came > 0 or slot.name in self._now.touched
            if came and slot.param.grad is not None:
                self._send(slot)
            else:
                unused.append(slot)
        return unused

    def given_gradient(self, params: Collection[int]) -> str | None:
        """Returns the name of a parameter whose gradient was not exchanged; see :meth:`Exchange.given_gradient`."""
        for name, param in self._all_parameters():
            if id(param) in params and param.grad is not None and not self._is_result(name, param.grad):
                values = param.grad._values() if param.grad.layout == torch.sparse_coo else param.grad
                if bool((values != 0).any()):
                    return name
        return None

    def _is_result(self, name: str, grad: torch.Tensor) -> bool:
        """Returns True if a gradient is the unchanged result of the last exchange."""
        slot = self._slots.get(name)
        if slot is None or grad._version != slot.version:
            return False
        if slot.place is not None:
            return slot.place.holds(grad)
        return slot.wire is not None and slot.wire.data_ptr() == grad.data_ptr()

    def _unused(self, unused: Sequence[str]) -> Exception:
        names = ", ".join(map(repr, unused))
        # The other ranks wait for buckets that will never be complete.
        return self._backend.reported(
            BaguaError(
                f"no gradient for {names} of model {self._module_name!r} in this backward on rank "
                f"{self._backend.rank}: the loss does not depend on them; pass "
                "find_unused_parameters=True if that is meant"
            )
        )

    def _wait_and_agree(self, unused: Sequence[Slot]) -> set[str]:
        """Sends zeros for unused parameters. Returns the names of parameters that no rank used."""
        before: dict[str, torch.Tensor | None] = {}
        for slot in unused:
            grad = slot.param.grad
            before[slot.name] = None if grad is None else grad.clone()
            if grad is None:
                slot.param.grad = torch.zeros_like(slot.param, requires_grad=False)
            self._send(slot)
        nowhere = self._wait_and_compare(before)
        self._settle()
        for name in nowhere:
            slot = self._slots[name]
            if self.discarded is not None and slot.param.grad is not None:
                given = before[name]
                if given is not None and self._votes.factor != 1:
                    given = given * self._votes.factor
                self.discarded(name, slot.param.grad, given)
            # Put back, so that an optimizer does not step the parameter.
            slot.param.grad = before[name]
        return nowhere

    def _wait_and_compare(self, without: Collection[str]) -> set[str]:
        """Waits until every bucket is communicated. Returns the names in ``without`` that all ranks have there."""
        present = torch.tensor([name not in without for name in self._slots], dtype=torch.uint8)
        handle = self._backend.all_reduce(present, ReduceOp.MAX)
        self._wait()
        handle.wait()
        return {name for name, anywhere in zip(self._slots, present.tolist(), strict=True) if not anywhere}

    def abandon(self) -> None:
        """Forgets a backward that never completed."""
        self._wait_for_begun()
        self._reset()

    def _wait_for_begun(self) -> None:
        """Waits for communication that a failed backward has begun."""
        with contextlib.suppress(BaguaError, ValueError):
            # Incomplete buckets raise a second error. The first one ended the backward and was raised there.
            self._backend.wait_pending_comm_ops()

    def _reset(self) -> None:
        self._now = _Backward()
        for slot in self._slots.values():
            slot.sent, slot.came, slot.grad = False, 0, None
