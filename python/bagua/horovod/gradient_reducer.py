"""Reduces the gradients of an optimizer: in an order that is equal on all ranks, each message as early as possible."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from bagua.handle import Handle
from bagua.torch_api import env
from bagua.torch_api.model_engine.bucketing import split
from bagua.torch_api.model_engine.engine import owner_of
from bagua.torch_api.model_engine.state import model_state

from .collectives import Reduction


class GradientReducer:
    """Reducer of the gradients of one DistributedOptimizer.

    The parameters are divided into units. A unit is one message of one dtype. Units are in the reverse of the
    optimizer's order, which is about the order in which backward computes gradients. A unit is sent when all its
    gradients are there and all earlier units were sent; :meth:`synchronize` sends the rest. Every rank therefore sends
    the same units in the same order, even if some of its gradients are missing.
    """

    def __init__(
        self, params: Sequence[torch.Tensor], how: Reduction, passes: int, names: Mapping[torch.Tensor, str]
    ) -> None:
        self._how = how
        self._names = names
        #: True if step() calls synchronize(), and true if synchronize() was called since the last step.
        self.step_synchronizes, self.synchronized = True, False
        self._units: list[list[torch.Tensor]] = []
        self._unit_of: dict[torch.Tensor, int] = {}
        self._hooks: list[RemovableHandle] = []
        # In this step: each parameter's number of backward passes, the number of gradients that each unit still needs,
        # the number of units that were sent, and the messages with their parameters.
        self._arrived: dict[torch.Tensor, int] = {}
        self._missing: list[int] = []
        self._sent = 0
        self._messages: list[tuple[list[torch.Tensor], Handle[Any]]] = []
        self._passes = 1
        self.set_passes(passes)
        self.watch(params)

    def set_passes(self, passes: int) -> None:
        """Sets the number of backward passes per step. Raises AssertionError while gradients are being reduced."""
        if passes < 1:
            raise ValueError(f"backward_passes_per_step must be at least 1, got {passes}")
        if passes != self._passes:
            self.forget()
        self._passes = passes

    def watch(self, params: Sequence[torch.Tensor]) -> None:
        """Adds parameters that need gradients and are not watched yet. They form new units behind the existing ones."""
        new: list[Any] = [param for param in params if param.requires_grad and param not in self._unit_of]
        for param in new:
            what = f"the gradient of {self._called(param)}"
            if (owner := owner_of(param)) is not None:
                raise ValueError(
                    f"{what} is communicated by model {owner.bagua_module_name!r} already, so that the ranks would "
                    "send it twice: keep one of them. To keep the wrapped model, use the plain optimizer. To keep "
                    "DistributedOptimizer, call bagua.torch_api.unwrap on the model"
                )
            self._how.core_op(param, what)
        for unit in split(new[::-1], env.get_default_bucket_size()):
            self._unit_of.update(dict.fromkeys(unit, len(self._units)))
            self._units.append(unit)
            self._missing.append(len(unit))
        for param in new:
            self._hooks.append(param.register_post_accumulate_grad_hook(self._arrive))
            # Bagua's wrappers refuse these parameters.
            model_state.optimizer_reducers[param] = weakref.ref(self)

    def _called(self, param: torch.Tensor) -> str:
        return f"parameter {self._names[param]!r}" if param in self._names else f"a parameter of shape {[*param.shape]}"

    def _arrive(self, param: torch.Tensor) -> None:
        """Notes that a backward pass has added to a parameter's gradient. Sends the units that are complete."""
        count = self._arrived.get(param, 0) + 1
        if count > self._passes:
            raise AssertionError(
                f"{self._called(param)} got a gradient in more than {self._passes} backward pass(es) before step(): "
                "raise backward_passes_per_step"
            )
        self.synchronized = False
        self._arrived[param] = count
        if count == self._passes:
            self._missing[self._unit_of[param]] -= 1
            while self._sent < len(self._units) and self._missing[self._sent] == 0:
                self._send()

    @torch.no_grad()
    def _send(self) -> None:
        """Starts to reduce the next unit, without parameters that were frozen meanwhile."""
        unit = [param for param in self._units[self._sent] if param.requires_grad]
        if unit:
            flat = torch.cat([self._grad(param).reshape(-1) for param in unit])
            self._messages.append((unit, self._how.start(flat, overwrite=True)))
        self._sent += 1

    def _grad(self, param: torch.Tensor) -> torch.Tensor:
        if param.grad is None:
            return torch.zeros_like(param)
        if param.grad.layout != torch.strided:
            raise NotImplementedError(
                f"the gradient of {self._called(param)} is sparse: use nn.Embedding(sparse=False), or "
                "bagua.torch_api.with_bagua"
            )
        return param.grad

    @torch.no_grad()
    def synchronize(self, params: Sequence[torch.Tensor]) -> None:
        """Sends the rest, waits for all reductions, and puts the results into ``.grad``."""
        self.watch(params)
        while self._sent < len(self._units):
            self._send()
        messages = self._messages
        self._reset()
        for unit, handle in messages:
            parts = torch.split(handle.wait(), [param.numel() for param in unit])
            for param, part in zip(unit, parts, strict=True):
                if param.grad is None:
                    param.grad = torch.empty_like(param)
                param.grad.copy_(part.view(param.shape))
        self.synchronized = True

    def forget(self) -> None:
        """Begins a step again. Raises AssertionError if gradients of this one are being reduced, or ready for it."""
        if any(count >= self._passes for count in self._arrived.values()):
            raise AssertionError(
                "gradients are being reduced: call optimizer.step() or optimizer.synchronize() after backward first"
            )
        self._reset()

    def _reset(self) -> None:
        self._arrived, self._missing = {}, [len(unit) for unit in self._units]
        self._sent, self._messages = 0, []

    def close(self) -> None:
        """Removes the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()
