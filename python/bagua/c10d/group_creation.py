"""Makes Bagua groups of the ranks of torch process groups.

The first group joins through its store. A later group whose members all belong to the first one becomes a sub-group,
without a rendezvous. If the first group has failed, its survivors meet in the store again.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from bagua import config, launcher, metrics, store_rendezvous
from bagua.errors import BaguaError
from bagua.group import Group
from bagua.process_state import process

from .process_group import BaguaProcessGroup
from .state import c10d_state as _state
from .torch_bindings import device_types

__all__ = ["create", "open_group", "register"]


class _Tree:
    """The first group and its sub-groups."""

    def __init__(self, root: Group, ranks: Sequence[int]) -> None:
        self.root = root
        #: World rank of each rank of the first group.
        self.ranks = list(ranks)
        #: Groups that torch uses. Leaving the first group would end the others.
        self.used: list[Group] = []

    def group(self, ranks: Sequence[int]) -> Group | None:
        """Returns the sub-group of these world ranks; None if the first group has failed or lacks some of them."""
        if not set(ranks) <= set(self.ranks):
            return None
        try:
            self.root.communicator.cause()
        except BaguaError:
            return None
        return self.root.new_group([self.ranks.index(rank) for rank in ranks], ordered=True)

    def open_group(self, store: Any, ranks: list[int], rank: int, timeout: timedelta) -> BaguaProcessGroup:
        return open_group(store, ranks, rank, timeout)

    def ended(self, group: BaguaProcessGroup) -> None:
        """Leaves a group. The first group is left after all others."""
        if group in _state.groups:
            _state.groups.remove(group)
        if _state.world is group:
            _state.world = process.torchs_world = None
        if group.bagua_group in self.used:
            self.used.remove(group.bagua_group)
        if group.bagua_group is not self.root:
            group.bagua_group.leave()
        if not self.used:
            self.root.leave()
            if _state.tree is self:
                _state.tree = None


def register() -> None:
    """Makes "bagua" a backend of torch.distributed. May be called again. Importing ``bagua.c10d`` calls it."""
    if "BAGUA" not in dist.Backend._plugins:
        dist.Backend.register_backend("bagua", create, extended_api=True, devices=device_types())


def create(options: Any, _: Any = None) -> BaguaProcessGroup:
    """Makes a process group. torch.distributed calls this function on the members of a new group."""
    ranks = list(options.global_ranks_in_group)
    world = not ranks
    opened = open_group(
        options.store,
        ranks or list(range(options.group_size)),
        options.group_rank,
        options.timeout,
    )
    if world:
        _state.world, process.torchs_world = opened, opened.bagua_group
    return opened


def open_group(store: Any, ranks: list[int], rank: int, timeout: timedelta) -> BaguaProcessGroup:
    """Returns the group of these world ranks. This process is number ``rank`` among them."""
    tree: _Tree | None = _state.tree
    group = None if tree is None else tree.group(ranks)
    if group is None:
        group = _join(store, rank, len(ranks), timeout)
        own = _Tree(group, ranks)
        if tree is None or not tree.used or _has_failed(tree.root):
            _state.tree = own
        tree = own
    assert tree is not None, "a sub-group has a tree"
    tree.used.append(group)
    group.used_by_torch = True
    opened = BaguaProcessGroup(group, ranks, store, timeout, tree)
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL, torch may keep only the C++ half.
    _state.groups.append(opened)
    return opened


def _has_failed(group: Group) -> bool:
    try:
        group.communicator.cause()
    except BaguaError:
        return True
    return False


def _join(store: Any, rank: int, size: int, timeout: timedelta) -> Group:
    chosen = config.settings(timeout=timeout.total_seconds())
    metrics.begin(launcher.local_rank_of(rank, size))
    group, _ = store_rendezvous.join(
        store,
        rank,
        size,
        what="init_process_group",
        towards=_host(store),
        local_rank=None,
        local_world_size=None,
        secret=chosen.secret,
        timeout=chosen.timeout,
    )
    metrics.begin(group.local_rank)
    return group


def _host(store: Any) -> tuple[str, int] | None:
    """Returns (host, port) of the underlying TCPStore; None for a store without an address."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    return None if not host or not port else (str(host), int(port))
