"""``fuse_optimizer``: steps one large tensor instead of many small parameters.

1. The parameters of one group, dtype and device are moved into one piece of memory, and so are their states.
2. Before each step, their gradients are copied into one flat tensor.
3. A second optimizer of the same type steps one flat parameter over that memory.

The second optimizer runs the original's own formulas, so an element-wise optimizer computes the same values.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ...bucket_memory import layout_of
from . import memory_layout
from .elementwise import plain_step, require_elementwise, twin
from .flat_parameters import FlatParameters, signature

# Entries of a group that are not options of the update.
_MEMBERS = ("params", "param_names")


def fuse_optimizer(optimizer: Optimizer, do_flatten: bool = True, check_flatten: bool = True) -> Optimizer:
    """Adds the method ``fuse_step(closure=None, *, grad_scaler=None)`` to an optimizer, and returns the optimizer.

    - ``optimizer``: The optimizer to fuse. Its ``step`` and ``state_dict`` work as before, and both kinds of step may
      alternate.
    - ``do_flatten``: Moves the parameters of each group, dtype and device into one piece of memory. False fuses only
      parameters that are contiguous already.
    - ``check_flatten``: Checks before each step that the parameters are still contiguous, and makes them so again.

    ``fuse_step`` calls ``closure`` like ``step`` does. With ``grad_scaler`` it steps like
    ``grad_scaler.step(optimizer)``, which skips a step whose gradients overflowed. It raises NotImplementedError for a
    sparse gradient, before anything changes.

    Raises ValueError, with the reason, if the optimizer is fused already or is not element-wise (LARS, LAMB, LBFGS,
    Muon, Adafactor, SparseAdam).
    """
    if is_fused_optimizer(optimizer):
        raise ValueError(f"this {type(optimizer).__name__} is fused already")
    require_elementwise(optimizer)
    FusedOptimizer(optimizer, do_flatten, check_flatten)
    return optimizer


def is_fused_optimizer(optimizer: Optimizer) -> bool:
    """Returns True if the optimizer has ``fuse_step``."""
    return isinstance(vars(optimizer).get("_bagua_fused_optimizer"), FusedOptimizer)


class _Group:
    """The plan for stepping one group. Valid until a parameter, gradient layout or state changes."""

    def __init__(self, params: Sequence[torch.nn.Parameter]) -> None:
        self.params = list(params)
        self.runs: list[FlatParameters] = []
        # Parameters stepped one by one.
        self.single: list[torch.nn.Parameter] = []
        # Parameters without a gradient.
        self.idle: list[torch.nn.Parameter] = []


class FusedOptimizer:
    """The fused form of an optimizer, stored in its attribute ``_bagua_fused_optimizer``."""

    def __init__(self, optimizer: Optimizer, do_flatten: bool, check_flatten: bool) -> None:
        self._optimizer = optimizer
        self._do_flatten = do_flatten
        self._check_flatten = check_flatten
        self._inner = twin(optimizer)
        self._groups: list[_Group] | None = None
        # The states after the last fused step, to notice when the program replaced one.
        self._entries: list[dict[str, Any]] = []
        # Keys of states that do not belong to a parameter.
        self._common: list[Any] = []
        # True if the program called ``step`` since the last fused step.
        self._stepped_plainly = False
        self._fused_just_now = False
        if do_flatten:
            for group in optimizer.param_groups:
                _flatten(group["params"])
        optimizer.__dict__["_bagua_fused_optimizer"] = self
        optimizer.__dict__["_bagua_fused_count"] = 0
        optimizer.__dict__["fuse_step"] = self.fuse_step
        # Runs the step between the original optimizer's hooks.
        self._hooked: Callable[..., Any] = Optimizer.profile_hook_step(_step_of)
        optimizer.register_step_post_hook(self._after_step)

    def fuse_step(self, closure: Callable[[], Any] | None = None, *, grad_scaler: Any = None) -> Any:
        """Runs one step of the optimizer, with one update per group, dtype and device.

        Returns the result of ``closure``, or of ``grad_scaler.step``.
        """
        if grad_scaler is None:
            return self._fused_step(closure)
        before = vars(self._optimizer).get("step")
        # fuse_step itself has an argument ``grad_scaler``, and a scaler passes itself to any step that has one.
        self._optimizer.__dict__["step"] = self._fused_step
        try:
            if closure is not None:
                return grad_scaler.step(self._optimizer, closure=closure)
            return grad_scaler.step(self._optimizer)
        finally:
            if before is None:
                del self._optimizer.__dict__["step"]
            else:
                self._optimizer.__dict__["step"] = before

    def _fused_step(self, closure: Callable[[], Any] | None = None) -> Any:
        return self._hooked(self._optimizer, closure)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._stepped_plainly |= not self._fused_just_now
        self._fused_just_now = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Runs the step without its hooks."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._step()
        self._fused_just_now = True
        # Without this mark, a learning-rate scheduler warns that its step came before the optimizer's.
        self._optimizer._opt_called = True  # type: ignore[attr-defined]
        return loss

    def _step(self) -> None:
        outer, inner = self._optimizer, self._inner
        groups = self._current()
        inner.__dict__.update(_own_attributes(outer))
        for name in [name for name in vars(inner) if name not in vars(outer)]:
            del inner.__dict__[name]
        inner.state = defaultdict(dict, {key: outer.state[key] for key in self._common})
        inner.param_groups = []
        for group, options in zip(groups, outer.param_groups, strict=True):
            params: list[torch.nn.Parameter] = []
            for run in group.runs:
                run.take_gradients()
                inner.state[run.flat] = dict(run.state)
                params.append(run.flat)
            for param in group.single:
                inner.state[param] = outer.state[param]
                params.append(param)
            inner.param_groups.append({**{k: v for k, v in options.items() if k not in _MEMBERS}, "params": params})
        plain_step(inner)()
        for group, options, stepped in zip(groups, outer.param_groups, inner.param_groups, strict=True):
            options.update({key: value for key, value in stepped.items() if key not in _MEMBERS})
            for run in group.runs:
                run.spread(inner.state[run.flat], outer.state)
            if group.runs:
                outer.__dict__["_bagua_fused_count"] += 1
        self._common = [key for key in inner.state if not isinstance(key, torch.Tensor)]
        outer.state.update({key: inner.state[key] for key in self._common})
        outer.__dict__.update(_own_attributes(inner))
        self._entries = list(outer.state.values())

    def _refuse_sparse(self) -> None:
        for number, group in enumerate(self._optimizer.param_groups):
            for i, param in enumerate(group["params"]):
                if param.grad is not None and param.grad.layout is not torch.strided:
                    raise NotImplementedError(
                        f"the gradient of parameter {i} of group {number}, of shape {list(param.shape)}, is "
                        f"{param.grad.layout}: a fused step would also update the rows that it leaves out; call step()"
                    )

    def _current(self) -> list[_Group]:
        """Returns the plan of the last step if it is still valid; otherwise makes a new one."""
        if self._groups is None or not self._holds(self._groups):
            self._refuse_sparse()
            self._groups = [self._plan(group["params"]) for group in self._optimizer.param_groups]
            self._common = [key for key in self._optimizer.state if not isinstance(key, torch.Tensor)]
        self._stepped_plainly = False
        return self._groups

    def _holds(self, groups: list[_Group]) -> bool:
        outer = self._optimizer
        if len(groups) != len(outer.param_groups):
            return False
        entries = list(outer.state.values())
        if len(entries) != len(self._entries) or not all(map(operator.is_, entries, self._entries)):
            return False
        for group, options in zip(groups, outer.param_groups, strict=True):
            params = options["params"]
            if len(params) != len(group.params) or not all(map(operator.is_, params, group.params)):
                return False
            if any(param.grad is not None for param in group.idle):
                return False
            if any(param.grad is None or param.grad.layout is not torch.strided for param in group.single):
                return False
            for run in group.runs:
                if not run.look_for_gradients() or not run.intact():
                    return False
                if self._check_flatten and not run.in_place():
                    return False
                if self._stepped_plainly and not run.uniform():
                    return False
        return True

    def _plan(self, params: Sequence[torch.nn.Parameter]) -> _Group:
        group = _Group(params)
        if self._do_flatten and self._check_flatten:
            _flatten(params)
        state = self._optimizer.state
        stretch: list[torch.nn.Parameter] = []
        last: Any = None

        def end() -> None:
            if len(stretch) > 1:
                group.runs.append(FlatParameters(stretch, state))
                group.runs[-1].look_for_gradients()
            else:
                group.single.extend(stretch)
            stretch.clear()

        movable = {id(param) for param in _movable(params)}
        group.idle = [param for param in params if param.grad is None]
        active = [param for param in params if param.grad is not None]
        group.single = [param for param in active if id(param) not in movable]
        for param in sorted((p for p in active if id(p) in movable), key=lambda p: p.data_ptr()):
            form = signature(param, state.get(param, {}))
            kind = (form, param.dtype, param.device)
            if stretch and (form is None or kind != last or not memory_layout.adjacent(stretch[-1], param)):
                end()
            stretch.append(param)
            last = kind
        end()
        return group


def _step_of(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
    fused: FusedOptimizer = vars(optimizer)["_bagua_fused_optimizer"]
    return fused.step(closure)


def _own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Returns attributes that an update may read or write, such as a step counter or a gradient scale."""
    ours = ("param_groups", "state", "step", "fuse_step", "_bagua_fused_optimizer", "_bagua_fused_count")
    return {name: value for name, value in vars(optimizer).items() if name not in ours and "_hooks" not in name}


def _movable(params: Sequence[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """Returns the parameters that own dense, ordinary memory which they share with no other parameter."""
    found = []
    for param in params:
        if is_lazy(param):
            raise ValueError("a parameter has no shape yet: run one forward before fuse_optimizer")
        plain = type(param) in (torch.Tensor, torch.nn.Parameter) and param.layout is torch.strided
        # States of a scalar parameter cannot be told from a step counter.
        if plain and param.dim() > 0 and param.numel() > 0 and param.stride() == layout_of(param):
            found.append(param)
    ordered = sorted(found, key=lambda p: (str(p.device), p.data_ptr()))
    shared: set[int] = set()
    end, owner = 0, None
    for param in ordered:
        if owner is not None and param.device == owner.device and param.data_ptr() < end:
            shared.update((id(owner), id(param)))
        stop = param.data_ptr() + param.numel() * param.element_size()
        if owner is None or param.device != owner.device or stop > end:
            end, owner = stop, param
    return [param for param in found if id(param) not in shared]


def _flatten(params: Sequence[torch.nn.Parameter]) -> None:
    """Moves parameters of one dtype and device into one piece of memory, unless they are contiguous already."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.nn.Parameter]] = defaultdict(list)
    for param in _movable(params):
        kinds[param.dtype, param.device].append(param)
    for members in kinds.values():
        # Frozen parameters come last, so that they do not separate the others.
        members.sort(key=lambda p: not p.requires_grad)
        with torch.no_grad():
            if memory_layout.whole(sorted(members, key=lambda p: p.data_ptr())) is not None:
                continue
            flat = memory_layout.room_for(members)
            for param, view in zip(members, memory_layout.cut(flat, members), strict=True):
                view.copy_(param)
                param.data = view
