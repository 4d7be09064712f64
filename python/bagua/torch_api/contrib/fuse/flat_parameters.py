"""Parameters that are contiguous in memory and are stepped as one, together with their gradients and state."""

from __future__ import annotations

import operator
from collections.abc import MutableMapping, Sequence
from typing import Any

import torch

from bagua.errors import BaguaError

from . import memory_layout

State = MutableMapping[Any, dict[str, Any]]

# Checking a thousand parameters costs as much as stepping them. Mapping C functions takes half the time of a loop.
_grad_of, _layout_of = operator.attrgetter("grad"), operator.attrgetter("layout")

_PLAIN = (bool, int, float, complex, str, type(None))


def kind_of(value: Any, param: torch.Tensor) -> str | None:
    """Returns the kind of a state: ``elements`` (like the parameter), ``scalar``, ``value`` (not a tensor), or None."""
    if isinstance(value, torch.Tensor):
        if value.shape == param.shape and value.layout == torch.strided:
            return "elements"
        return "scalar" if value.dim() == 0 else None
    return "value" if isinstance(value, _PLAIN) else None


def signature(param: torch.Tensor, entry: dict[str, Any]) -> tuple[Any, ...] | None:
    """Returns what must be equal in the states of two parameters to step them together, or None if they cannot be."""
    parts: list[Any] = []
    for key, value in entry.items():
        kind = kind_of(value, param)
        if kind is None:
            return None
        if kind == "elements":
            parts.append((key, kind, value.dtype, value.device))
        elif kind == "scalar":
            parts.append((key, kind, value.dtype, value.device, value.item()))
        else:
            parts.append((key, kind, value))
    return tuple(parts)


class FlatParameters:
    """Two or more parameters, and one flat parameter over the same memory that replaces them in a fused step.

    Between steps, each parameter's state is a view of the flat state, so a plain ``step`` can come between fused ones.
    """

    def __init__(self, params: Sequence[torch.nn.Parameter], state: State) -> None:
        self.params = list(params)
        flat = memory_layout.whole([param.detach() for param in params])
        assert flat is not None
        self.flat = torch.nn.Parameter(flat)
        self._pointers = [param.data_ptr() for param in params]
        self._grad = memory_layout.room_for(params)
        self._grad_views = memory_layout.cut(self._grad, params)
        self._vectors_only = all(param.dim() == 1 for param in params)
        # The parameter whose gradient object shows whether gradients are kept from step to step. The smallest is
        # chosen, because its gradient is kept alive for the comparison.
        self._watched = min(range(len(params)), key=lambda i: params[i].numel())
        self._last: torch.Tensor | None = None
        self._found: list[torch.Tensor] = []
        # Number of times that gradients were moved into the flat memory and then replaced by the program.
        self._taken_away = 0
        self._entries: list[dict[str, Any]] = []
        # State name -> each parameter's view of the flat state.
        self._views: dict[str, list[torch.Tensor]] = {}
        # State name -> the scalars of all parameters in one tensor.
        self._vectors: dict[str, torch.Tensor] = {}
        self.state: dict[str, Any] = {}
        if any(param in state for param in params):
            self._entries = [state[param] for param in params]
            for key, value in self._entries[0].items():
                self._gather(key, kind_of(value, params[0]))

    def _gather(self, key: str, kind: str | None) -> None:
        values = [entry[key] for entry in self._entries]
        if kind == "value":
            self.state[key] = values[0]
            return
        models = self.params if kind == "elements" else values
        flat = None
        if all(value.stride() == model.stride() for value, model in zip(values, models, strict=True)):
            flat = memory_layout.whole(values)
        if flat is None:
            flat = memory_layout.room_for(values)
            views = memory_layout.cut(flat, models)
            for view, value, entry in zip(views, values, self._entries, strict=True):
                view.copy_(value)
                entry[key] = view
            values = views
        self._keep(key, kind, flat, values)

    def _keep(self, key: str, kind: str | None, flat: torch.Tensor, views: list[torch.Tensor]) -> None:
        self._views[key] = views
        if kind == "scalar":
            self._vectors[key] = flat
            self.state[key] = flat[0]
        else:
            self.state[key] = flat

    def in_place(self) -> bool:
        """Returns True if no parameter has moved in memory."""
        return list(map(torch.Tensor.data_ptr, self.params)) == self._pointers

    def intact(self) -> bool:
        """Returns True if each parameter's state is still a view of the flat state, and its scalars equal the flat
        ones.
        """
        if not set(map(len, self._entries)) <= {len(self.state)}:
            return False
        for key, views in self._views.items():
            try:
                if not all(map(operator.is_, map(operator.itemgetter(key), self._entries), views)):
                    return False
            except KeyError:
                return False
        # On CUDA, reading the values would wait for the device. They are checked there only after a plain step.
        return all(_equal(vector) for vector in self._vectors.values() if vector.device.type == "cpu") and all(
            all(entry.get(key) == value for entry in self._entries)
            for key, value in self.state.items()
            if key not in self._views
        )

    def uniform(self) -> bool:
        """Returns True if the scalars of all parameters are equal."""
        return all(_equal(vector) for vector in self._vectors.values())

    def look_for_gradients(self) -> bool:
        """Returns True if every parameter has a dense gradient, and keeps the gradients for :meth:`take_gradients`."""
        self._found = list(map(_grad_of, self.params))
        try:
            return set(map(_layout_of, self._found)) == {torch.strided}
        except AttributeError:
            return False

    def take_gradients(self) -> None:
        """Copies the gradients into one flat tensor, where they stay if the program uses ``set_to_none=False``."""
        grads, self._found = self._found, []
        views = self._grad_views
        if any(map(operator.is_, grads, views)):
            moved = [(view, grad) for view, grad in zip(views, grads, strict=True) if grad is not view]
            views, elsewhere = [view for view, _ in moved], [grad for _, grad in moved]
        else:
            elsewhere = grads
        if elsewhere:
            if self._vectors_only and elsewhere is grads:
                # Takes a quarter of the time of single copies. Gradients with more dimensions would need a view each.
                torch.cat(grads, out=self._grad)
            else:
                torch._foreach_copy_(views, elsewhere)
            kept = self._last is not None and grads[self._watched] is self._last
            if self._last is self._grad_views[self._watched]:
                self._taken_away += 1
            if kept and self._taken_away < 2:
                for param, view in zip(self.params, self._grad_views, strict=True):
                    param.grad = view
        self._last = self.params[self._watched].grad
        self.flat.grad = self._grad

    def spread(self, flat_state: dict[str, Any], state: State) -> None:
        """Distributes the flat parameter's state among the parameters after a step."""
        if flat_state and not self._entries:
            self._entries = [state[param] for param in self.params]
        for key in [key for key in self.state if key not in flat_state]:
            del self.state[key]
            self._views.pop(key, None)
            self._vectors.pop(key, None)
            for entry in self._entries:
                entry.pop(key, None)
        for key, value in flat_state.items():
            if isinstance(value, torch.Tensor):
                known = value is self.state.get(key)
                if not known:
                    self._adopt(key, value)
                elif (vector := self._vectors.get(key)) is not None:
                    vector[1:].copy_(value)
            else:
                self._adopt_value(key, value)

    def _adopt(self, key: str, value: torch.Tensor) -> None:
        kind = kind_of(value, self.flat)
        if kind is None:
            raise BaguaError(
                f"state {key!r} of {len(self.params)} fused parameters has shape {list(value.shape)}, which cannot be "
                "divided among them: this optimizer is not element-wise"
            )
        if kind == "scalar":
            flat = value.expand(len(self.params)).clone()
            views = list(flat.unbind())
        else:
            flat = value.contiguous()
            views = memory_layout.cut(flat, self.params)
        for entry, view in zip(self._entries, views, strict=True):
            entry[key] = view
        self._keep(key, kind, flat, views)

    def _adopt_value(self, key: str, value: Any) -> None:
        if kind_of(value, self.flat) is None:
            raise BaguaError(f"state {key!r} is a {type(value).__name__}, which cannot be divided among parameters")
        self._views.pop(key, None)
        self._vectors.pop(key, None)
        self.state[key] = value
        for entry in self._entries:
            entry[key] = value


def _equal(vector: torch.Tensor) -> bool:
    return torch.equal(vector, vector[0].expand_as(vector))
