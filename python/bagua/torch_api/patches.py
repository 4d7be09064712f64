"""All changes that ``import bagua.torch_api`` makes to torch.

It adds members to tensors, modules and process groups, and hooks to the steps of optimizers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .communication import bagua_patch, to_bagua_process_group
from .distributed import BaguaModule
from .model_engine.optimizer_steps import follow_others
from .process_group import AnyCommunicator, ProcessGroup
from .tensor import BaguaTensor

__all__ = ["apply"]


def apply() -> None:
    """Makes the changes. Called once, when the package is imported."""
    _patch_tensor()
    _patch_module()
    _patch_process_group()
    follow_others()


def _patch_tensor() -> None:
    for name, member in vars(BaguaTensor).items():
        if "bagua" in name:
            setattr(torch.Tensor, name, member)


class _Attribute:
    """A property that is not a ``property``, because TorchScript compiles every ``property`` of a module's class."""

    def __init__(self, wrapped: property) -> None:
        self._property = wrapped
        self.__doc__ = wrapped.__doc__

    def __get__(self, instance: torch.nn.Module | None, owner: type | None = None) -> Any:
        return self if instance is None else self._property.__get__(instance, owner)

    def __set__(self, instance: torch.nn.Module, value: Any) -> None:
        self._property.__set__(instance, value)


def _patch_module() -> None:
    attributes = set()
    for name, member in vars(BaguaModule).items():
        if isinstance(member, property):
            attributes.add(name)
            setattr(torch.nn.Module, name, _Attribute(member))
        elif "bagua" in name:
            setattr(torch.nn.Module, name, member)
    list_members = torch.nn.Module.__dir__

    def list_present(self: torch.nn.Module) -> list[str]:
        """Lists only members that can be read. torch.compile reads every listed member, and fails if one raises."""
        names = list_members(self)  # type: ignore[no-untyped-call]
        return [name for name in names if name not in attributes or hasattr(self, name)]

    torch.nn.Module.__dir__ = list_present  # type: ignore[method-assign]


def _bagua_pg(self: dist.ProcessGroup) -> ProcessGroup:
    return to_bagua_process_group(self)


def _patch_process_group() -> None:
    group = dist.ProcessGroup
    group.bagua_patch = bagua_patch  # type: ignore[attr-defined]
    group.bagua_pg = property(_bagua_pg)  # type: ignore[attr-defined]
    for scope in ("global", "inter_node", "intra_node"):
        name = f"get_{scope}_communicator"
        setattr(group, f"bagua_{name}", _forward(name))


def _forward(name: str) -> Any:
    def forward(self: dist.ProcessGroup) -> AnyCommunicator:
        found: AnyCommunicator = getattr(to_bagua_process_group(self), name)()
        return found

    return forward
