"""Reduces the gradients of an optimizer: in an order that is equal on all ranks, each message as early as possible."""

from __future__ import annotations

import operator
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from bagua.handle import Handle
from bagua.torch_api import env
from bagua.torch_api.model_engine.bucketing import split
from bagua.torch_api.model_engine.engine import owner_of
from bagua.torch_api.process_group import check_on_cpu

from .reductions import Reduction, reduce_all


class GradientReducer:
    """The gradients of one DistributedOptimizer.

    The parameters are divided into units: messages, in the reverse of the optimizer's order, which is about the order
    in which a backward makes the gradients. A unit is sent when all of its gradients are there and the units before it
    were sent; those that are left in :meth:`synchronize`. So every rank sends the same units in the same order,
    whichever gradients it has.
    """

    def __init__(self, how: Reduction, passes: int) -> None:
        #: How gradients are reduced.
        self.how = how
        #: Whether step() calls synchronize().
        self.step_synchronizes = True
        #: Whether synchronize() was called since the last step.
        self.synchronized = False
        # Backward passes per step.
        self._passes = 1
        self._names: dict[torch.Tensor, str] = {}
        self._units: list[list[torch.Tensor]] = []
        # Parameter -> the number of its unit, and of the backward passes of this step that gave it a gradient.
        self._unit_of: dict[torch.Tensor, int] = {}
        self._arrived: dict[torch.Tensor, int] = {}
        # How many gradients each unit waits for; and the handles of the units that were sent, which are the first ones.
        self._waiting: list[int] = []
        self._sent: list[tuple[list[torch.Tensor], Handle[Any]]] = []
        self._hooks: dict[torch.Tensor, RemovableHandle] = {}
        self.set_passes(passes)

    def set_passes(self, passes: int) -> None:
        """Sets the number of backward passes per step. AssertionError while gradients are being reduced."""
        passes = operator.index(passes)
        if passes < 1:
            raise ValueError(f"backward_passes_per_step is {passes}, which is not positive")
        if passes != self._passes:
            self.forget()
        self._passes = passes

    def name(self, named: Iterable[tuple[str, torch.Tensor]], param_groups: list[dict[str, Any]]) -> None:
        """Takes over the parameters' names. ValueError for a name twice, or a parameter without one."""
        pairs = list(named)
        for pair in pairs:
            if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], torch.Tensor)):
                raise ValueError("named_parameters are pairs of a name and a parameter, as model.named_parameters()")
        names = [name for name, _ in pairs]
        if twice := sorted(name for name, times in Counter(names).items() if times > 1):
            raise ValueError(f"named_parameters has these names twice: {', '.join(twice)}")
        self._names = {param: name for name, param in pairs}
        nameless = sum(param not in self._names for group in param_groups for param in group["params"])
        if nameless:
            raise ValueError(f"named_parameters lacks {nameless} of the optimizer's parameters")

    def watch(self, param_groups: list[dict[str, Any]]) -> None:
        """Divides the parameters of an optimizer into units, and watches their gradients."""
        self.forget()
        params = [param for group in param_groups for param in group["params"] if param.requires_grad]
        self._check(params)
        self._units = split(params[::-1], env.get_default_bucket_size())
        self._number()
        self._reset()

    def _watch_unfrozen(self, param_groups: list[dict[str, Any]]) -> None:
        """Watches parameters that need gradients only now. They are sent in units of their own, behind the others."""
        params = [param for group in param_groups for param in group["params"]]
        new = [param for param in params if param.requires_grad and param not in self._unit_of]
        if new:
            self._check(new)
            self._units += split(new[::-1], env.get_default_bucket_size())
            self._number()

    def _check(self, params: list[torch.Tensor]) -> None:
        for param in params:
            what = f"the gradient of {self._called(param)}"
            if (owner := owner_of(param)) is not None:
                raise ValueError(
                    f"{what} is communicated by model {owner.bagua_module_name!r} already, so that the ranks would "
                    "send it twice: keep one of them. To keep the wrapped model, use the plain optimizer. To keep "
                    "DistributedOptimizer, call bagua.torch_api.unwrap on the model"
                )
            check_on_cpu(param, what)
            self.how.core_op(param, what)

    def _number(self) -> None:
        """Numbers the units, and watches those of their parameters that are not watched yet."""
        self._unit_of = {param: number for number, unit in enumerate(self._units) for param in unit}
        reference = weakref.ref(self)
        param: Any  # torch's method has no types
        for param in self._unit_of:
            if param not in self._hooks:
                self._hooks[param] = param.register_post_accumulate_grad_hook(_Arrived(reference))

    def _called(self, param: torch.Tensor) -> str:
        if name := self._names.get(param):
            return f"parameter {name!r}"
        return f"a parameter of shape {list(param.shape)}"

    def _reset(self) -> None:
        self._arrived = dict.fromkeys(self._unit_of, 0)
        self._waiting = [len(unit) for unit in self._units]
        self._sent = []

    def arrived(self, param: torch.Tensor) -> None:
        """A backward pass has added to a parameter's gradient. Sends what can be sent."""
        count = self._arrived.get(param)
        if count is None:
            return
        if count >= self._passes:
            raise AssertionError(
                f"{self._called(param)} got a gradient in more than {self._passes} backward pass(es) before step(): "
                "raise backward_passes_per_step"
            )
        self.synchronized = False
        self._arrived[param] = count + 1
        if count + 1 < self._passes:
            return
        self._waiting[self._unit_of[param]] -= 1
        while len(self._sent) < len(self._units) and self._waiting[len(self._sent)] == 0:
            self._send()

    def _send(self) -> None:
        """Starts the next unit's reduction, without parameters that are frozen since."""
        unit = [param for param in self._units[len(self._sent)] if param.requires_grad]
        grads = [self._dense(param) for param in unit]
        self._sent.append((unit, reduce_all(grads, self.how, None) if grads else Handle([], list)))

    def _dense(self, param: torch.Tensor) -> torch.Tensor:
        grad = param.grad
        if grad is None:
            return torch.zeros_like(param, memory_format=torch.contiguous_format)
        if grad.layout != torch.strided:
            raise NotImplementedError(
                f"the gradient of {self._called(param)} is sparse: use nn.Embedding(sparse=False), or "
                "bagua.torch_api.with_bagua"
            )
        return grad

    @torch.no_grad()
    def synchronize(self, param_groups: list[dict[str, Any]]) -> None:
        """Sends what was not sent, waits for all, and puts the results into ``.grad``."""
        self._watch_unfrozen(param_groups)
        while len(self._sent) < len(self._units):
            self._send()
        sent = self._sent
        self._reset()
        for unit, handle in sent:
            for param, value in zip(unit, handle.wait(), strict=True):
                if param.grad is None or param.grad.layout != torch.strided:
                    param.grad = value.to(param.dtype)
                else:
                    param.grad.copy_(value)
        self.synchronized = True

    def forget(self) -> None:
        """Begins a step anew. AssertionError when gradients of this one are being reduced, or ready for it."""
        if any(count >= self._passes for count in self._arrived.values()):
            raise AssertionError(
                "gradients are being reduced: call optimizer.step() or optimizer.synchronize() after backward first"
            )
        self._reset()

    def close(self) -> None:
        """Removes the hooks from the parameters."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}


class _Arrived:
    """The hook of a parameter. Holds no reference that would keep the optimizer alive."""

    def __init__(self, reducer: weakref.ref[GradientReducer]) -> None:
        self._reducer = reducer

    def __call__(self, param: torch.Tensor) -> None:
        reducer = self._reducer()
        if reducer is not None:
            reducer.arrived(param)
