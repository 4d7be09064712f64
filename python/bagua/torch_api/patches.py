"""Every change that ``import bagua.torch_api`` makes to torch: members added to tensors, modules and process groups."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .communication import bagua_patch, to_bagua_process_group
from .distributed import BaguaModule
from .process_group import AnyCommunicator, ProcessGroup
from .tensor import BaguaTensor

__all__ = ["apply"]


def apply() -> None:
    """Adds the members. A second call replaces them by themselves."""
    _patch_tensor()
    _patch_module()
    _patch_process_group()


def _patch_tensor() -> None:
    for name, member in vars(BaguaTensor).items():
        if "bagua" in name:
            setattr(torch.Tensor, name, member)


def _patch_module() -> None:
    properties = set()
    for name, member in vars(BaguaModule).items():
        if "bagua" in name:
            setattr(torch.nn.Module, name, member)
        if isinstance(member, property):
            properties.add(name)
    everything = torch.nn.Module.__dir__

    def visible(self: torch.nn.Module) -> list[str]:
        """The names of a module's members. torch.compile reads every one, and fails if one raises."""
        names = everything(self)  # type: ignore[no-untyped-call]
        return [name for name in names if name not in properties or hasattr(self, name)]

    torch.nn.Module.__dir__ = visible  # type: ignore[method-assign]


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
