"""Averages with neighbours: each rank gets the mean of its own tensor and its neighbours' tensors.

This is the uniform gossip step of decentralised SGD: Lian et al., "Can Decentralized Algorithms Outperform Centralized
Algorithms?", NeurIPS 2017. The weights are 1 / (number of neighbours + 1). The mean over all ranks is therefore
preserved on regular graphs only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .aggregation import Aggregation, Denominator
from .backends import HALVES, Group, Peers, find

_OPS = ("avg_world", "avg")


class DecentralizedAggregation(Aggregation):
    """Averages gradients or weights over this rank and its ``neighbors``.

    Neighbours must be mutual. The first call checks this: every rank of the group must make it, and all raise
    ValueError if a pair is not mutual. Later calls communicate between neighbours only. ``rank`` is this rank in the
    group. A rank without neighbours keeps its tensors. ``op`` of the closures is ``"avg_world"`` or ``"avg"``.
    """

    def __init__(self, rank: int, neighbors: Sequence[int], use_cuda: bool = False, *, group: Group = None) -> None:
        super().__init__(use_cuda)
        self.rank = rank
        self.neighbors = sorted(neighbors)
        if rank in self.neighbors:
            raise ValueError(f"rank {rank} is among its own neighbours {self.neighbors}")
        if len(set(self.neighbors)) != len(self.neighbors):
            raise ValueError(f"a neighbour appears twice in {self.neighbors}")
        self.group = group
        self._mutual = False

    def _peers(self) -> Peers:
        return find(self.group)

    def _place(self, device: torch.device) -> torch.device:
        return self._peers().place(device, self.use_cuda)

    def _check(self, op: str, denom: Denominator) -> None:
        if op not in _OPS:
            raise NotImplementedError(f"op must be one of {', '.join(_OPS)}; got {op!r}")
        if not self._mutual:
            _check_mutual(self._peers(), self.rank, self.neighbors)
            self._mutual = True

    def _agg(self, data: Any, op: str, denom: Denominator = None) -> Any:
        """Returns a new tensor. Adds in rank order, so that ranks with the same neighbourhood get the same bits."""
        self._check(op, denom)
        peers = self._peers()
        theirs = peers.exchange(data, self.neighbors)
        if not theirs:
            return data
        members = sorted([(self.rank, data), *zip(self.neighbors, theirs, strict=True)], key=lambda member: member[0])
        total = members[0][1].to(torch.float32) if data.dtype in HALVES else members[0][1].clone()
        for _, tensor in members[1:]:
            total += tensor
        return (total / len(members)).to(data.dtype)


def _check_mutual(peers: Peers, rank: int, neighbors: Sequence[int]) -> None:
    """Gathers all ranks' neighbours on every rank. Raises ValueError on all ranks if they are not mutual."""
    row = torch.zeros(peers.size + 2, dtype=torch.int64)
    row[0] = rank
    # A neighbour outside the group has no column.
    outside = [other for other in neighbors if not 0 <= other < peers.size]
    row[1] = outside[0] if outside else -1
    row[2:][[other for other in neighbors if other not in outside]] = 1
    table = peers.all_gather(row.to(peers.place(row.device, False))).cpu()
    wrong = []
    for member, (claimed, beyond, *_) in enumerate(table.tolist()):
        if claimed != member:
            wrong.append(f"rank {member} was given rank={claimed}")
        if beyond != -1:
            wrong.append(f"rank {member} has a neighbour {beyond} in a group of {peers.size}")
    mutual = table[:, 2:]
    wrong += [
        f"rank {one} has rank {other} as a neighbour, but not vice versa"
        for one, other in ((mutual == 1) & (mutual.T == 0)).nonzero().tolist()
    ]
    if wrong:
        raise ValueError("neighbours are not mutual: " + "; ".join(wrong))
