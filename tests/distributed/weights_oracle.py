"""Training of all ranks in one process whose weights travel: what each rank's weights must equal bit for bit.

The models are plain torch modules that step on their own; the exchange is NumPy, with ``bagua.Codec`` where it encodes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import bagua
import bagua.torch_api as bagua_torch
from tests.distributed.torch_ranks import hosts

Values = npt.NDArray[Any]
Hosts = Sequence[Sequence[int]]


class Net(torch.nn.Module):
    """Element by element, so that no memory layout or vectorization changes the order of additions."""

    def __init__(self, *, other: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.randn(6))
        self.shift = torch.nn.Parameter(torch.randn(6))
        self.deep = torch.nn.Parameter(torch.randn(2, 3))
        self.other = torch.nn.Parameter(torch.randn(5).to(other))
        self.unused = torch.nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x * self.scale + self.shift).view(-1, 2, 3) * self.deep
        return y.flatten(1)[:, :5] * self.other.to(y.dtype)


def batch(rank: int, step: int) -> torch.Tensor:
    """Returns the batch of a rank in a step, the same on every rank that computes it."""
    return torch.from_numpy(np.random.default_rng([rank, step]).standard_normal((1, 6)).astype(np.float32))


def loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = model(x)
    return (y * y).sum()


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)


def wrapped(
    rank: int, algorithm: Any, make: Callable[[], Net] = Net, **options: Any
) -> tuple[Net, torch.optim.Optimizer]:
    """A model that begins elsewhere on each rank, and becomes that of rank 0."""
    model = made_on_rank_0(make)
    if rank:
        with torch.no_grad():
            for param in model.parameters():
                param.add_(rank)
    optimizer = sgd(model)
    model.with_bagua([optimizer], algorithm, **options)
    return model, optimizer


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    loss(model, batch(rank, step)).backward()
    optimizer.step()
    optimizer.zero_grad()


def is_mode_of(mode: str, hierarchical: bool) -> bool:
    """Returns True if a mode of peer selection works with this number of ranks, or of hosts."""
    members = len(hosts()) if hierarchical else bagua_torch.get_world_size()
    return mode != "shift_one" or members == 1 or members % 2 == 0


def mean(parts: Sequence[Values]) -> Values:
    """In order, one rounding per addition, divided once; float16 as float32, rounded at the end."""
    wide = _wide(parts[0])
    total = parts[0].astype(wide)
    for part in parts[1:]:
        total = total + part.astype(wide)
    result: Values = (total / wide(len(parts))).astype(parts[0].dtype)
    return result


def _wide(x: Values) -> Any:
    return np.float32 if x.dtype == np.float16 else x.dtype.type


def peers(mode: str, i: int, n: int, r: int) -> set[int]:
    """Whose weights member i of n takes in round r, its own included."""
    if mode == "ring":
        return {i, (i - 1) % n, (i + 1) % n}
    if mode == "exponential":
        return {i} | {(i + 2**j) % n for j in range(n) if 2**j < n}
    if mode == "one_peer_exponential":
        rounds = int(np.ceil(np.log2(n))) if n > 1 else 1
        return {i, (i + 2 ** (r % rounds)) % n}
    assert mode == "shift_one"
    half = n // 2
    if n == 1:
        return {i}
    return {i, (r + i) % ((n + 1) // 2) + half if i < half else (i - half - r) % half}


def averaged(xs: Sequence[Values], mode: str, r: int, hosts: Hosts | None) -> list[Values]:
    """Every rank's weights after round r. ``hosts``: the members are hosts, with "all" only the order of additions."""
    if mode == "all":
        if hosts is None:
            return [mean(xs)] * len(xs)
        wide = _wide(xs[0])
        sums = [sum((xs[rank].astype(wide) for rank in host[1:]), xs[host[0]].astype(wide)) for host in hosts]
        return [(sum(sums[1:], sums[0]) / wide(len(xs))).astype(xs[0].dtype)] * len(xs)
    members = hosts or [[rank] for rank in range(len(xs))]
    of = {rank: i for i, member in enumerate(members) for rank in member}
    own = [mean([xs[rank] for rank in member]) for member in members]
    n = len(members)
    after = [mean([own[j] for j in sorted(peers(mode, i, n, r))]) for i in range(n)]
    return [after[of[rank]] for rank in range(len(xs))]


class Ring:
    """The members' replicas of one bucket, whose elements are ``initial``."""

    def __init__(self, codec: bagua.Codec, initial: Values, ranks: int, hosts: Hosts | None) -> None:
        self.members = [list(host) for host in hosts] if hosts else [[rank] for rank in range(ranks)]
        n = len(self.members)
        # A codec that draws counts its calls, as each member's bucket counts its communications.
        self._codecs = [bagua.Codec(codec.name, **codec.options) for _ in range(n)]
        self.weight = [initial.copy() for _ in range(n)]
        self.left = [initial.copy() for _ in range(n)]
        self.right = [initial.copy() for _ in range(n)]

    def member_of(self, rank: int) -> int:
        return next(i for i, member in enumerate(self.members) if rank in member)

    def step(self, xs: Sequence[Values]) -> list[Values]:
        """Every rank's weights after a round."""
        n, f = len(self.members), np.float32
        own = [mean([xs[rank] for rank in member]) for member in self.members]
        if n == 1:
            self.weight = own
        else:
            third, five_thirds = f(1) / f(3), f(5) / f(3)
            sent = []
            for codec, x, w, left, right in zip(self._codecs, own, self.weight, self.left, self.right, strict=True):
                d = x.astype(f) + left.astype(f) * third + right.astype(f) * third - w.astype(f) * five_thirds
                d = np.ascontiguousarray(d.astype(x.dtype))
                sent.append(codec.decode(codec.encode(d), np.empty_like(d)))
            for i in range(n):
                self.weight[i] = _plus(self.weight[i], sent[i])
                self.left[i] = _plus(self.left[i], sent[(i - 1) % n])
                self.right[i] = _plus(self.right[i], sent[(i + 1) % n])
        return [self.weight[self.member_of(rank)] for rank in range(len(xs))]


def _plus(x: Values, d: Values) -> Values:
    result: Values = (x.astype(np.float32) + d.astype(np.float32)).astype(x.dtype)
    return result


class Ranks:
    """A copy of a model, and its optimizer, for each rank."""

    def __init__(self, model: torch.nn.Module, ranks: int) -> None:
        self.models = [copy.deepcopy(model) for _ in range(ranks)]
        self.optimizers = [sgd(replica) for replica in self.models]

    def values(self, name: str) -> list[Values]:
        return [dict(replica.named_parameters())[name].detach().numpy().copy() for replica in self.models]

    def put(self, name: str, values: Sequence[Values]) -> None:
        for replica, value in zip(self.models, values, strict=True):
            with torch.no_grad():
                dict(replica.named_parameters())[name].copy_(torch.from_numpy(np.ascontiguousarray(value)))

    def train(
        self,
        step: int,
        stepping: Sequence[int] | None = None,
        passes: Sequence[int] | None = None,
        without: Sequence[int] = (),
    ) -> None:
        """One step; ``stepping`` are the ranks whose optimizer is not skipped, ``passes`` the batches."""
        raise NotImplementedError

    def backward(self, step: int, without: Sequence[int] = ()) -> None:
        """``without`` are the ranks whose loss depends on no parameter."""
        for rank, replica in enumerate(self.models):
            if rank not in without:
                loss(replica, batch(rank, step)).backward()

    def step(self, ranks: Sequence[int] | None = None) -> None:
        for rank, optimizer in enumerate(self.optimizers):
            if ranks is None or rank in ranks:
                optimizer.step()
            optimizer.zero_grad()


class Decentralized(Ranks):
    """Gradients at the weights before the average, applied to the average."""

    def __init__(
        self, model: torch.nn.Module, ranks: int, mode: str, hosts: Hosts | None = None, interval: int = 1
    ) -> None:
        super().__init__(model, ranks)
        self.mode, self.hosts, self.interval, self.round = mode, hosts, interval, 0

    def train(
        self,
        step: int,
        stepping: Sequence[int] | None = None,
        passes: Sequence[int] | None = None,
        without: Sequence[int] = (),
    ) -> None:
        names = [name for name, param in self.models[0].named_parameters() if param.requires_grad]
        after: dict[str, list[Values]] = {}
        if step % self.interval == 0:
            after = {name: averaged(self.values(name), self.mode, self.round, self.hosts) for name in names}
            self.round += 1
        for data in passes or [step]:
            self.backward(data, without)
        for name, values in after.items():
            self.put(name, values)
        self.step(stepping)


class LowPrecision(Ranks):
    """A round of the compressed ring after the optimizers. ``buckets`` are the names of parameters, in order."""

    def __init__(
        self,
        model: torch.nn.Module,
        ranks: int,
        codec: bagua.Codec,
        buckets: Sequence[Sequence[str]],
        hosts: Hosts | None = None,
        interval: int = 1,
    ) -> None:
        super().__init__(model, ranks)
        self.buckets, self.interval = buckets, interval
        self.rings = [Ring(codec, self.flat(names)[0], ranks, hosts) for names in buckets]

    def flat(self, names: Sequence[str]) -> list[Values]:
        """Every rank's parameters of these names, one after the other."""
        by_name = [self.values(name) for name in names]
        return [np.concatenate([v.ravel() for v in values]) for values in zip(*by_name, strict=True)]

    def train(
        self,
        step: int,
        stepping: Sequence[int] | None = None,
        passes: Sequence[int] | None = None,
        without: Sequence[int] = (),
    ) -> None:
        for data in passes or [step]:
            self.backward(data, without)
        self.step(stepping)
        if step % self.interval == 0:
            for names, ring in zip(self.buckets, self.rings, strict=True):
                after = ring.step(self.flat(names))
                for name, values in self.parts(names, after).items():
                    self.put(name, values)

    def parts(self, names: Sequence[str], flats: Sequence[Values]) -> dict[str, list[Values]]:
        """Pieces of flat arrays, by parameter name."""
        found, offset = {}, 0
        for name in names:
            like = self.values(name)[0]
            found[name] = [flat[offset : offset + like.size].reshape(like.shape) for flat in flats]
            offset += like.size
        return found


def assert_equals(model: torch.nn.Module, ranks: Ranks, rank: int, what: str) -> None:
    """The weights of ``model``, of rank ``rank``, are to the bit those of the simulation."""
    theirs = dict(ranks.models[rank].named_parameters())
    for name, param in model.named_parameters():
        np.testing.assert_array_equal(param.detach().numpy(), theirs[name].detach().numpy(), f"{what}: {name}")


def made_on_rank_0(make: Callable[[], Net]) -> Net:
    """The model with which every rank's training begins, on every rank."""
    torch.manual_seed(5)
    return make()
