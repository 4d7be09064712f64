"""The stores of this process, and its membership in an elastic job."""

from __future__ import annotations

from typing import Any

from torch._C._distributed_c10d import Store

from bagua.lifecycle import Record, record

from .store_client import StoreClient

__all__ = ["MembershipState", "membership_state"]


class MembershipState(Record):
    """The stores by which ranks meet, and what a membership that changes leaves to be done."""

    def __init__(self) -> None:
        #: (host, port) of the master -> the store served there. Kept after the group ends: a second group must not wait
        #: for a port that the first one's store still holds, nor reach the store of a peer that is slower to end.
        self.stores: dict[tuple[str, int], StoreClient] = {}
        #: The store by which torch.distributed's own group began, which its C++ half may still ask.
        self.gloo_store: Store | None = None
        #: The Job of an elastic job, and the _Plan of a call of rebuild() that raised.
        self.elastic: Any = None
        self.rebuilding: Any = None

    def forget_groups(self) -> None:
        """No process asks the store of gloo, and there is no elastic job."""
        self.elastic = self.gloo_store = None


membership_state = record(MembershipState)
