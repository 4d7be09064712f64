"""State of all communicating models of this process. Engines and backends are typed where they are used."""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from bagua.process_state import Record, record

__all__ = ["ModelState", "model_state", "name_of"]


class _Engines(WeakIdKeyDictionary):
    """Module -> its ModelEngine.

    The engine ends at once with the last reference to the module, even if a hook of its algorithm holds it in a cycle
    that only the garbage collector finds.
    """

    def __setitem__(self, module: torch.nn.Module, engine: Any) -> None:
        super().__setitem__(module, engine)
        engine.end_with(module)


class _Registered(weakref.ref[torch.Tensor]):
    """A tensor with its Registration. One object, because the collector counts each."""

    __slots__ = ("key", "registration")

    key: int
    registration: Any


class Registrations:
    """Tensor -> its Registration.

    A lookup takes a tenth of the time of ``WeakTensorKeyDictionary``, which makes a weak reference for it.
    """

    def __init__(self) -> None:
        self._by_id: dict[int, _Registered] = {}

    def get(self, tensor: torch.Tensor) -> Any | None:
        """Returns the registration, or None."""
        found = self._by_id.get(id(tensor))
        return None if found is None else found.registration

    def setdefault(self, tensor: torch.Tensor, new: Any) -> Any:
        """Returns the registration, which is ``new`` if there was none."""
        key = id(tensor)
        found = self._by_id.get(key)
        if found is None:
            found = self._by_id[key] = _Registered(tensor, self._freed)
            found.key, found.registration = key, new
        return found.registration

    def forget(self, tensor: torch.Tensor) -> None:
        """Removes the registration, if there is one."""
        self._by_id.pop(id(tensor), None)

    def _freed(self, registered: Any) -> None:
        """Called while a tensor is freed, before another object can get its id."""
        self._by_id.pop(registered.key, None)


class ModelState(Record):
    """State that is stored outside modules and tensors, so that copies and pickles of them are plain."""

    def __init__(self) -> None:
        self.registrations = Registrations()
        #: Model name -> its BucketEngine; and every BucketEngine that still exists.
        self.backends: dict[str, Any] = {}
        self.all_backends: weakref.WeakSet[Any] = weakref.WeakSet()
        #: Parameter -> the object that reduces its gradient for an ``hvd.DistributedOptimizer``.
        self.optimizer_reducers: MutableMapping[torch.Tensor, weakref.ref[Any]] = WeakTensorKeyDictionary()
        #: Module -> its ModelEngine; and module -> its name.
        self.wrapped: MutableMapping[torch.nn.Module, Any] = _Engines()
        self.module_names: MutableMapping[torch.nn.Module, str] = WeakIdKeyDictionary()
        #: Module or wrapper of a group that has ended -> the model's name, and the hook that refuses training, if any.
        self.ended: MutableMapping[torch.nn.Module, tuple[str, RemovableHandle | None]] = WeakIdKeyDictionary()
        #: Number of models wrapped so far. Models are wrapped in the same order on all ranks.
        self.wrapped_count = 0


model_state = record(ModelState)


def name_of(module: torch.nn.Module) -> str:
    """Returns the model's name for communication: the user's, else its class and a number."""
    if module not in (names := model_state.module_names):
        names[module] = f"{type(module).__name__}_{model_state.wrapped_count}"
        model_state.wrapped_count += 1
    return names[module]
