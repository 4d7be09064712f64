"""Bagua tensors: torch tensors that are registered for communication, with a name and a model.

``patches`` adds the methods of :class:`BaguaTensor` to :class:`torch.Tensor`; their names contain "bagua". The
registered tensor is permanent. Its *effective* tensor, whose values are communicated, is the result of the getter at
each access; for a parameter this is usually ``.grad``. Registrations are stored outside the tensors, so that a pickled
or copied tensor is a plain one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .bucket_memory import layout_of
from .model_engine.state import model_state

Getter = Callable[[torch.Tensor], torch.Tensor]
Setter = Callable[[torch.Tensor, torch.Tensor], None]


@dataclass(slots=True)
class Registration:
    """Name, model, getter and setter of a tensor."""

    name: str
    module_name: str | None
    getter: Getter | None
    setter: Setter | None
    # True while the effective tensor is zeros that stand for a future gradient, until the model's buckets are made.
    is_stand_in: bool = False

    def effective(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensor whose values are communicated. Raises ValueError if the getter returns None."""
        found: torch.Tensor | None = tensor if self.getter is None else self.getter(tensor)
        if found is None:
            raise ValueError(
                f"the getter of tensor {self.name!r} returned None: if it returns a gradient, call "
                "bagua_ensure_grad() on the parameter before"
            )
        return found


_registrations = model_state.registrations


@dataclass(frozen=True)
class BackendTensor:
    """Address, number of elements and dtype of a tensor's values, as the core takes them."""

    name: str
    ptr: int
    count: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        """Returns the address of the first element."""
        return self.ptr

    def num_elements(self) -> int:
        """Returns the number of elements."""
        return self.count


def registration(tensor: torch.Tensor) -> Registration:
    """Returns the registration of a Bagua tensor. Raises ValueError for any other tensor."""
    found: Registration | None = _registrations.get(tensor)
    if found is None:
        raise ValueError(
            f"a tensor of shape {list(tensor.shape)} is not a Bagua tensor: call ensure_bagua_tensor(name) on it"
        )
    return found


def _attribute_of(tensor: torch.Tensor) -> Registration:
    # AttributeError makes hasattr, and getattr with a default, work on any tensor.
    found: Registration | None = _registrations.get(tensor)
    if found is None:
        raise AttributeError("this tensor is not a Bagua tensor: call ensure_bagua_tensor(name) on it")
    return found


def register(
    tensor: torch.Tensor, name: str | None, module_name: str | None, getter: Getter | None, setter: Setter | None
) -> Registration:
    """Registers a tensor; see :meth:`BaguaTensor.ensure_bagua_tensor`."""
    new = Registration(name if name is not None else f"tensor_{id(tensor)}", module_name, getter, setter)
    known: Registration = _registrations.setdefault(tensor, new)
    if known is new:
        return known
    if name is not None and name != known.name:
        raise ValueError(f"this tensor is already registered as {known.name!r} and cannot become {name!r}")
    if module_name is not None and known.module_name not in (None, module_name):
        raise ValueError(f"tensor {known.name!r} belongs to model {known.module_name!r}, not to {module_name!r}")
    known.module_name = module_name or known.module_name
    known.getter = getter or known.getter
    known.setter = setter or known.setter
    return known


def effective(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor whose values are communicated."""
    return registration(tensor).effective(tensor)


def forget(tensor: torch.Tensor) -> None:
    """Removes the registration."""
    _registrations.forget(tensor)


class BaguaTensor:
    """The methods that are added to :class:`torch.Tensor`."""

    @property
    def bagua_tensor_name(self: Any) -> str:
        """Name of the tensor, unique in its model. Raises AttributeError unless the tensor is registered."""
        return _attribute_of(self).name

    @property
    def bagua_module_name(self: Any) -> str | None:
        """Name of the tensor's model. Raises AttributeError unless the tensor is registered."""
        return _attribute_of(self).module_name

    def is_bagua_tensor(self: Any) -> bool:
        """Returns True if the tensor is registered."""
        return _registrations.get(self) is not None

    def ensure_bagua_tensor(
        self: Any,
        name: str | None = None,
        module_name: str | None = None,
        getter_closure: Getter | None = None,
        setter_closure: Setter | None = None,
    ) -> torch.Tensor:
        """Registers this tensor, and returns it.

        - ``name``: Unique name in the model.
        - ``module_name``: Name of the model.
        - ``getter_closure``: Takes this tensor and returns its effective tensor, by default itself.
        - ``setter_closure``: Takes this tensor and a new effective tensor, and replaces the old one.

        A second call with the same names replaces the closures. Raises ValueError for other names.
        """
        register(self, name, module_name, getter_closure, setter_closure)
        return _as_tensor(self)

    def to_bagua_tensor(
        self: Any,
        name: str | None = None,
        module_name: str | None = None,
        getter_closure: Getter | None = None,
        setter_closure: Setter | None = None,
    ) -> torch.Tensor:
        """Registers a new tensor over the same memory, and returns it. Arguments as in :meth:`ensure_bagua_tensor`."""
        view = self.detach().view(self.shape) if self.is_contiguous() else self.detach()
        return BaguaTensor.ensure_bagua_tensor(view, name, module_name, getter_closure, setter_closure)

    def bagua_getter_closure(self: Any) -> torch.Tensor:
        """Returns the effective tensor."""
        return effective(self)

    def bagua_setter_closure(self: Any, tensor: torch.Tensor) -> None:
        """Replaces the effective tensor. Raises ValueError without a setter."""
        setter = registration(self).setter
        if setter is None:
            raise ValueError(f"Bagua tensor {registration(self).name!r} was registered without a setter")
        setter(self, tensor)

    def bagua_backend_tensor(self: Any) -> BackendTensor:
        """Returns the current address, number of elements and dtype of the values."""
        values = effective(self)
        return BackendTensor(registration(self).name, values.data_ptr(), values.numel(), values.dtype)

    def bagua_ensure_grad(self: Any) -> torch.Tensor:
        """Gives a parameter a gradient of zeros if it has none, and returns the parameter."""
        if self.grad is None:
            if not isinstance(self, torch.nn.Parameter):
                raise NotImplementedError(f"bagua_ensure_grad() needs a Parameter, not a {type(self).__name__}")
            # Same strides as the parameter, for accumulation in place and for optimizers, which iterate over both.
            self.grad = torch.zeros_like(self, requires_grad=False)
        return _as_tensor(self)

    def bagua_mark_communication_ready(self: Any) -> None:
        """Reports that the values are final for this step. The bucket is communicated when all its tensors are ready.

        Raises ValueError for a lazy negation or conjugate (``is_neg()``, ``is_conj()``), or a tensor without a model.
        """
        known = registration(self)
        if known.module_name is None:
            raise ValueError(f"Bagua tensor {known.name!r} belongs to no model: register it with a module_name")
        backend = model_state.backends.get(known.module_name)
        if backend is None:
            raise ValueError(
                f"Bagua tensor {known.name!r} belongs to model {known.module_name!r}, which has no backend yet: "
                "register its bucket with get_backend(name).register_ordered_buckets"
            )
        backend.mark_communication_ready(self)

    def bagua_mark_communication_ready_without_synchronization(self: Any) -> None:
        """Like :meth:`bagua_mark_communication_ready`. Exists for compatibility with the original Bagua."""
        self.bagua_mark_communication_ready()

    def bagua_set_storage(self: Any, storage: torch.UntypedStorage, storage_offset: int = 0) -> None:
        """Makes the effective tensor a view of ``storage``, from element ``storage_offset`` on."""
        tensor = effective(self)
        with torch.no_grad():
            strides = layout_of(tensor)
            tensor.data = tensor.new_empty(0).set_(storage, storage_offset, tensor.shape, strides)


def _as_tensor(tensor: Any) -> torch.Tensor:
    assert isinstance(tensor, torch.Tensor)
    return tensor
