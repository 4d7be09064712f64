"""Many cases in one world of ranks, because every rank that starts imports torch for seconds.

A case is a function of the rank. All ranks run all cases in order; a test for each looks at what became of it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence

import torch

import bagua.torch_api as bagua
from tests import cases as shared
from tests.cases import HOSTED, Layout, attempt, is_run
from tests.distributed.left_out import cases_in, is_left_out
from tests.world import load

__all__ = ["ENVIRONMENT", "HOSTED", "Case", "Layout", "cases_in", "each_case", "hosts", "run_cases", "same_everywhere"]

Case = Callable[[int], None]

#: A case that hangs must not cost the whole deadline of the run.
ENVIRONMENT = {"BAGUA_TIMEOUT": "30"}


def run_cases(rank: int, cases: Sequence[Case], begin: Case | None = None) -> dict[str, str]:
    """Runs the cases on this rank, `begin` before all; by name, what each raised ("" when nothing)."""
    torch.set_num_threads(1)
    bagua.init_process_group()
    if begin is not None:
        begin(rank)

    def seeded(case: Case) -> None:
        torch.manual_seed(17 + rank)
        case(rank)

    run = {case.__name__: functools.partial(seeded, case) for case in cases if is_run(case) and not is_left_out(case)}
    outcome = attempt(run, bagua.barrier)
    bagua.destroy_process_group()
    return outcome


def run_module(rank: int, path: str, module: str) -> dict[str, str]:
    """Like :func:`run_cases`, for the cases of a module. Calls the module's `begin` first if it has one."""
    found = load(path, module)
    return run_cases(rank, found.CASES, getattr(found, "begin", None))


def each_case(
    cases: Sequence[Case], *layouts: Layout, run: Callable[[int], dict[str, str]] | None = None, timeout: int = 30
) -> Callable[..., None]:
    """The test of a module for each of its CASES on each layout; ``run`` if the ranks do more than these."""
    if run is not None:
        return shared.each_case(cases, *layouts, run=run, timeout=timeout)
    module = sys.modules[cases[0].__module__]
    arguments = (str(module.__file__), module.__name__)
    return shared.each_case(cases, *layouts, run=run_module, arguments=arguments, timeout=timeout)


def hosts() -> list[list[int]]:
    """The world's ranks by host."""
    world = bagua.communication._get_default_group().get_global_communicator()
    return [list(ranks) for ranks in world.raw.hosts]


def same_everywhere(*tensors: torch.Tensor | None) -> bool:
    """True on every rank if the tensors are bitwise equal on all ranks (``None`` equals ``None``)."""
    mine = [None if tensor is None else tensor.detach().contiguous().numpy().tobytes() for tensor in tensors]
    theirs = bagua.broadcast_object(mine)
    differs = torch.tensor([int(mine != theirs)], dtype=torch.int32)
    bagua.allreduce_inplace(differs, bagua.ReduceOp.MAX)
    return differs.item() == 0
