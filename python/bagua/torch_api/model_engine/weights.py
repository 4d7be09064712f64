"""Communicates weights instead of gradients: copies them for the core, and applies its results to the parameters.

Two classes, for two kinds of algorithms:

- :class:`WeightAverage`: the exchange begins with a step's first forward and its result is taken over when the step's
  backward ends. The core reads a copy of the weights that is made when the exchange begins, and never the parameters:
  nothing that runs meanwhile (an ``optimizer.step()`` between forward and backward, a user's assignment) can race with
  the communication thread. Without the copy such a write would be a data race, of which other ranks could see one
  half, and the result of the exchange would overwrite it. With the copy, a weight that torch's version counter shows as
  changed keeps its change: it becomes weight + (mean - copy). An unchanged one becomes the mean to the bit. The price
  is one copy of the weights per communication, and their size in memory.
- :class:`WeightUpdate`: the exchange runs between two steps and replaces the weights in place. The training thread
  waits for it, so no other code writes the weights.

Both raise the version counters of the parameters that they write: a graph that saved weights before (a second backward
with ``retain_graph=True``) raises torch's error about in-place changes, instead of silently using other weights; a
graph of the model's output under :class:`WeightAverage` one of ours. ``no_sync()`` around all but the last backward
avoids that.
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
from .exchange_interface import Exchange, Parameters, WrappedModel, always
from .steps import BetweenSteps


def check_floating(parameters: Parameters) -> None:
    """TypeError for the first parameter whose elements are not real floating-point numbers."""
    for name, param in parameters:
        if not param.is_floating_point():
            raise TypeError(f"parameter {name!r} is {param.dtype}: this algorithm averages real weights only")


def _itself(parameter: torch.Tensor) -> torch.Tensor:
    return parameter


@dataclass
class _Slot:
    """One parameter."""

    name: str
    param: torch.nn.Parameter
    # Its place in the bucket's memory, in which the core may work where the parameter lies in it; None when the bucket
    # is not flattened. The parameter lies there until torch or its user gives it other memory.
    place: BucketSlice | None
    # Of the layout in which the ranks exchange it.
    like: torch.Tensor
    # The engine's number of it.
    number: int

    def in_place(self) -> bool:
        """True if the parameter lies in its place."""
        return self.place is not None and self.place.holds(self.param)


class WeightTensors(Exchange):
    """The parameters of one model as the tensors of its buckets."""

    def __init__(self, bagua_ddp: WrappedModel) -> None:
        super().__init__(bagua_ddp)
        self._slots: list[_Slot] = []

    def register(self) -> list[torch.Tensor]:
        """The parameters as Bagua tensors, the last of the model first.

        The effective tensor is the parameter itself; of one whose memory has gaps or lazy values, a copy without.
        """
        tensors = []
        for name, param in reversed(self._parameters):
            getter: Getter = _itself
            if is_lazy_value(param) or layout_of(param) != param.stride():
                getter = always(resolved(param.detach()).clone(memory_format=torch.contiguous_format))
            tensors.append(BaguaTensor.ensure_bagua_tensor(param, name, self._module_name, getter))
        return tensors

    def bind(self, buckets: Sequence[BaguaBucket]) -> None:
        """Takes over what the buckets made of the weights; called when they are registered with the engine."""
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
    # Its part of the copy that the core reads, and of the result.
    copy: torch.Tensor
    mean: torch.Tensor
    # The parameter's version counter and address when the copy was made.
    version: int = 0
    address: int = 0

    def is_unchanged(self) -> bool:
        """True if nothing was assigned to the parameter since. torch counts no assignment to ``param.data``."""
        param = self.slot.param
        same = param._version == self.version
        return same and (param.data_ptr() == self.address or torch.equal(param, self.copy))


class WeightAverage(WeightTensors):
    """Weights that are averaged with peers during forward and backward; each bucket has its ``_peer_weight``.

    See the module for what the core reads, and for weights that change meanwhile.
    """

    def __init__(self, bagua_ddp: WrappedModel) -> None:
        super().__init__(bagua_ddp)
        self._averaged: list[_Averaged] = []
        # Communicated since the step's first forward, and not taken over yet.
        self._begun = False
        # How often the weights were replaced.
        self._taken_over = 0

    def bind(self, buckets: Sequence[BaguaBucket]) -> None:
        """See :meth:`WeightTensors.bind`."""
        super().bind(buckets)
        self._averaged = []
        slots = {slot.name: slot for slot in self._slots}
        for bucket in buckets:
            if bucket._peer_weight is None:
                raise ValueError(f"bucket {bucket.name!r} has no peer weight: init_operations gives it one")
            copies = bucket.parts_of(bucket.extra_memory("weights"))
            means = bucket.parts_of(bucket._peer_weight)
            self._averaged += [_Averaged(slots[name], copies[name], means[name]) for name in copies]

    def begin(self) -> None:
        """Copies the weights and hands the copy to the engine. Nothing in a world of one rank."""
        if self._backend.size == 1 or not self._averaged:
            return
        self._begun = True
        with torch.no_grad():
            torch._foreach_copy_([entry.copy for entry in self._averaged], [e.slot.param for e in self._averaged])
        for entry in self._averaged:
            entry.version, entry.address = entry.slot.param._version, entry.slot.param.data_ptr()
        for entry in self._averaged:
            self._backend.mark_ready(entry.slot.number, entry.copy)

    def finish(self) -> None:
        """The backward is done: waits for what :meth:`begin` began, and takes it over. Nothing when nothing was begun,
        as in the second backward of a step.
        """
        if not self._begun:
            return
        self._begun = False
        self._backend.wait_pending_comm_ops()
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
        """A backward of this output of the model must begin before the weights are replaced: BaguaError otherwise."""
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
        """The step ends without its backward: waits for the exchange, as the peers do, and drops its result."""
        if not self._begun:
            return
        self._begun = False
        with contextlib.suppress(BaguaError, ValueError):
            # A failure of the group is raised by the next call to the engine.
            self._backend.wait_pending_comm_ops()

    def before_load(self) -> None:
        """The mean of the weights of before does not count."""
        self.abandon()


class WeightUpdate(BetweenSteps, WeightTensors):
    """Weights that are communicated between two steps, in place."""

    def __init__(self, bagua_ddp: WrappedModel) -> None:
        super().__init__(bagua_ddp)
        # What was handed to the engine and not taken over: each parameter, and its copy if it is not in place.
        self._handed: list[tuple[_Slot, torch.Tensor | None]] = []

    def abandon(self) -> None:
        """The peers communicate after this step, and wait for this rank."""
        self._due = self._due or self._open
        self._open = False

    def _send(self, *, waits: bool) -> None:
        """Copies of the weights, until they are taken over, except where a wait follows at once: a rank that goes on
        may read its weights meanwhile.
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
