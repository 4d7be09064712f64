"""The stores of this process, and its membership in an elastic job."""

from __future__ import annotations

from typing import Any

from torch._C._distributed_c10d import Store

from bagua.process_state import Record, record

from .torch_store_connection import StoreClient

__all__ = ["MembershipState", "membership_state"]


class MembershipState(Record):
    """The stores through which ranks meet, and the state of elastic jobs and of ``rebuild``."""

    def __init__(self) -> None:
        #: (host, port) of the master -> the store served there. Kept after the group ends. Otherwise a second group
        #: would wait for the port of the first group's store, or reach the store of a peer that ends later.
        self.stores: dict[tuple[str, int], StoreClient] = {}
        #: The store with which torch.distributed's group began. Its C++ half may still use the store.
        self.gloo_store: Store | None = None
        #: The elastic job's Job, and the _Plan of a call of rebuild() that raised.
        self.elastic: Any = None
        self.rebuilding: Any = None

    def forget_groups(self) -> None:
        """Forgets the elastic job and gloo's store, which no process uses any more."""
        self.elastic = self.gloo_store = None


membership_state = record(MembershipState)
