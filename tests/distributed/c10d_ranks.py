"""Many cases in one world of the backend "bagua", because every rank that starts imports torch for seconds.

A case is a function of a `Pair`: two groups of the same ranks, of "bagua" and of gloo, which is the oracle.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tests.cases import attempt, each_case, is_run
from tests.distributed.left_out import cases_in, is_left_out

__all__ = ["LIMIT", "Case", "Pair", "cases_in", "each_case", "run_cases", "same"]

#: A case that hangs must not cost the whole deadline of the run.
LIMIT = timedelta(seconds=30)


class Pair(NamedTuple):
    """Two groups of the same ranks."""

    ours: dist.ProcessGroup
    gloo: dist.ProcessGroup

    @property
    def rank(self) -> int:
        return self.ours.rank()

    @property
    def size(self) -> int:
        return self.ours.size()

    def world_rank(self, rank: int) -> int:
        return dist.get_global_rank(self.ours, rank)

    def both(self, verb: Callable[[dist.ProcessGroup], Any]) -> None:
        """Runs a verb on both groups; what it returns must be equal, bit for bit."""
        found, expected = verb(self.ours), verb(self.gloo)
        assert same(found, expected), f"{found}\nis not gloo's\n{expected}"


Case = Callable[[Pair], None]


def same(one: Any, other: Any) -> bool:
    """True for equal tensors, and lists and dicts of them."""
    if isinstance(one, torch.Tensor):
        if one.is_sparse:
            one, other = one.to_dense(), other.to_dense()
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def run_cases(rank: int, cases: Sequence[Case], members: Sequence[int] | None = None) -> dict[str, str]:
    """Runs the cases on the world, or on a sub-group; by name, what each raised ("" when nothing)."""
    torch.set_num_threads(1)
    dist.init_process_group("bagua", timeout=LIMIT)
    ranks = list(range(dist.get_world_size())) if members is None else list(members)
    gloo = dist.new_group(ranks, backend="gloo", timeout=LIMIT)
    ours = dist.group.WORLD if members is None else dist.new_group(ranks)
    outcome = {}
    if rank in ranks:
        pair = Pair(ours, gloo)

        def seeded(case: Case) -> None:
            torch.manual_seed(17 + rank)
            case(pair)

        run = {
            case.__name__: functools.partial(seeded, case) for case in cases if is_run(case) and not is_left_out(case)
        }
        outcome = attempt(run, lambda: dist.barrier(ours))
    dist.destroy_process_group()
    return outcome
