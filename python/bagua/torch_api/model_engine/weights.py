"""Communicates weights instead of gradients: copies them for the core, and applies its results to the parameters.

Two classes serve two kinds of algorithms:

- :class:`WeightAverage` begins the exchange with a step's first forward and takes over the result when the step's
  backward ends. The core reads a copy of the weights that is made at the beginning. Without the copy, a write during
  the exchange (an ``optimizer.step()`` between forward and backward, a user's assignment) would be a data race, and the
  result would overwrite it. With the copy, a weight that torch's version counter shows as changed becomes weight +
  (mean - copy), and an unchanged one becomes exactly the mean. The price is one copy of the weights per exchange, and
  the memory for it.
- :class:`WeightUpdate` runs the exchange between two steps and replaces the weights in place. The training thread waits
  for it, so no other code writes the weights.

Both increment the version counters of parameters that they write. A graph that saved the old weights (a second backward
with ``retain_graph=True``) then raises torch's error about in-place changes instead of silently using other weights.
Under :class:`WeightAverage`, a graph of the model's output raises BaguaError. Running all but the last backward under
``no_sync()`` avoids both.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from bagua.errors import BaguaError

from ..bucket import BaguaBucket
from ..bucket_memory import BucketSlice, is_lazy_value, layout_of, resolved
from ..tensor import BaguaTensor, Getter, effective, registration
from .algorithm_interface import Exchange, Parameters, WrappedModel, always
from .optimizer_steps import BetweenSteps
from .votes import divide


def check_floating(parameters: Parameters) -> None:
    """Raises TypeError for the first parameter that is not of a real floating-point dtype."""
    for name, param in parameters:
        if not param.is_floating_point():
            raise TypeError(f"parameter {name!r} is {param.dtype}: this algorithm averages real weights only")


def _itself(parameter: torch.Tensor) -> torch.Tensor:
    return parameter


@dataclass
class _Slot:
    name: str
    param: torch.nn.Parameter
    # Place in the memory of a flattened bucket; None in others. The core may work there if the parameter lies there,
    # which is so until torch or the user gives it other memory.
    place: BucketSlice | None
    # A tensor with the layout in which the ranks exchange the parameter.
    like: torch.Tensor
    # The engine's number of the tensor.
    number: int

    def in_place(self) -> bool:
        return self.place is not None and self.place.holds(self.param)


class WeightTensors(Exchange):
    """The parameters of one model as the tensors of its buckets."""

    def __init__(self, bagua_ddp: WrappedModel) -> None:
        super().__init__(bagua_ddp)
        self._slots: list[_Slot] = []

    def register(self) -> list[torch.Tensor]:
        """Registers the parameters in reverse order. The communicated tensor of each is the parameter itself.

        If its memory has gaps or lazy values, a dense copy is communicated.
        """
        tensors = []
        for name, param in reversed(self._parameters):
            getter: Getter = _itself
            if is_lazy_value(param) or layout_of(param) != param.stride():
                getter = always(resolved(param.detach()).clone(memory_format=torch.contiguous_format))
            tensors.append(BaguaTensor.ensure_bagua_tensor(param, name, self._module_name, getter))
        return tensors

    def bind(self, buckets: Sequence[BaguaBucket]) -> None:
        """Connects the weights to their buckets. Called when the buckets are registered with the engine."""
        params = dict(self._parameters)
        self._slots = []
        for bucket in buckets:
            for number, tensor in enumerate(bucket.tensors):
                name = registration(tensor).name
                place = bucket.places[number] if bucket.flatten else None
                like = effective(tensor).detach() if place is None else place.own
                self._slots.append(_Slot(name, params[name], place, like, self._backend.number(name)))


@dataclass
class _Averaged:
    """One parameter in a :class:`WeightAverage`."""

    slot: _Slot
    # The parameter's part of the copy that the core reads, and of the result.
    copy: torch.Tensor
    mean: torch.Tensor
    # Version counter and address of the parameter when the copy was made.
    version: int = 0
    address: int = 0

    def is_unchanged(self) -> bool:
        """Returns True if the parameter was not changed since. torch does not count assignments to ``param.data``."""
        param = self.slot.param
        same = param._version == self.version
        return same and (param.data_ptr() == self.address or torch.equal(param, self.copy))


class WeightAverage(WeightTensors):
    """Weights that are averaged with peers during forward and backward. Each bucket has a ``_peer_weight`` for the
    result.

    The module's docstring explains the copies, and what happens to weights that change meanwhile.
    """

    def __init__(self, bagua_ddp: WrappedModel) -> None:
        super().__init__(bagua_ddp)
        self._averaged: list[_Averaged] = []
        # True from the step's first forward until the result is taken over.
        self._begun = False
        # Number of times that the weights were replaced.
        self._taken_over = 0

    def bind(self, buckets: Sequence[BaguaBucket]) -> None:
        """Like :meth:`WeightTensors.bind`."""
        super().bind(buckets)
        self._averaged = []
        slots = {slot.name: slot for slot in self._slots}
        for bucket in buckets:
            if bucket._peer_weight is None:
                raise ValueError(f"bucket {bucket.name!r} has no _peer_weight: set it in init_operations")
            copies = bucket.parts_of(bucket.extra_memory("weights"))
            means = bucket.parts_of(bucket._peer_weight)
            self._averaged += [_Averaged(slots[name], copies[name], means[name]) for name in copies]

    def begin(self) -> None:
        """Copies the weights and hands the copy to the engine. Does nothing on a single rank."""
        if self._backend.size == 1 or not self._averaged:
            self._votes.write()
            self._votes.read()
            return
        self._begun = True
        with torch.no_grad():
            torch._foreach_copy_([entry.copy for entry in self._averaged], [e.slot.param for e in self._averaged])
        for entry in self._averaged:
            entry.version, entry.address = entry.slot.param._version, entry.slot.param.data_ptr()
        self._votes.write()
        if self._votes.room is not None:
            means = [entry.mean for entry in self._averaged]
            torch._foreach_copy_(means, [entry.copy for entry in self._averaged])
            self._votes.scale(means)
        for entry in self._averaged:
            self._backend.mark_ready(entry.slot.number, entry.copy if self._votes.room is None else entry.mean)

    def finish(self) -> None:
        """Waits for the exchange, and takes over its result. Does nothing in a step's second backward."""
        if not self._begun:
            return
        self._begun = False
        self._backend.wait_pending_comm_ops()
        divisor = self._votes.read()
        if divisor == 0:
            return
        divide([entry.mean for entry in self._averaged], divisor)
        self._taken_over += 1
        same: list[_Averaged] = []
        changed: list[_Averaged] = []
        for entry in self._averaged:
            (same if entry.is_unchanged() else changed).append(entry)
        with torch.no_grad():
            if same:
                torch._foreach_copy_([entry.slot.param for entry in same], [entry.mean for entry in same])
            for entry in changed:
                entry.slot.param.add_(entry.mean - entry.copy)

    def guard(self, output: Any) -> None:
        """Makes a backward of this output raise BaguaError if it begins after the weights were replaced."""
        this, before = weakref.ref(self), self._taken_over

        def check(*_: Any) -> None:
            exchange = this()
            if exchange is not None and exchange._taken_over != before:
                raise BaguaError(
                    f"a backward of model {exchange._module_name!r} through a forward whose weights have been replaced:"
                    " the first backward of a step ends with the average of the ranks' weights; add the losses up, or "
                    "run all but the last backward under no_sync() (with retain_graph=True where they share a forward)"
                )

        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(check)

    def abandon(self) -> None:
        """Ends a step without its backward: waits for the exchange, as the peers do, and drops its result."""
        if not self._begun:
            return
        self._begun = False
        with contextlib.suppress(BaguaError, ValueError):
            # The next call to the engine raises a failure of the group.
            self._backend.wait_pending_comm_ops()

    def before_load(self) -> None:
        """Drops the mean of the weights from before the load."""
        self.abandon()


class WeightUpdate(BetweenSteps, WeightTensors):
    """Weights that are communicated in place between two steps."""

    def __init__(self, bagua_ddp: WrappedModel) -> None:
        super().__init__(bagua_ddp)
        # Parameters whose result is not taken over yet, with their copies; None for a parameter in place.
        self._handed: list[tuple[_Slot, torch.Tensor | None]] = []

    def abandon(self) -> None:
        """Ends the step. An exchange that was open becomes due later, because the peers wait for this rank's part."""
        self._due = self._due or self._open
        self._open = False

    def _send(self, *, waits: bool) -> None:
        """Hands weights to the engine: in place if a wait follows at once, else as copies, because this rank may read
        its weights meanwhile.
        """
        with torch.no_grad():
            for slot in self._slots:
                copy = None if waits and slot.in_place() else torch.empty_like(slot.like).copy_(slot.param)
                values = slot.like if copy is None else copy
                self._handed.append((slot, copy))
                self._backend.mark_ready(slot.number, values)

    def _take_over(self) -> None:
        with torch.no_grad():
            for slot, copy in self._handed:
                if copy is not None or not slot.in_place():
                    slot.param.copy_(slot.like if copy is None else copy)
        self._forget()
        for slot in self._slots:
            torch.autograd.graph.increment_version(slot.param)

    def _forget(self) -> None:
        self._handed = []
