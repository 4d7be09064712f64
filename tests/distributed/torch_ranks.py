"""Many cases in one world of ranks, because every rank that starts imports torch for seconds.

A case is a function of the rank. All ranks run all cases in order; a test for each looks at what became of it.
"""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

import bagua.torch_api as bagua
from tests.distributed.left_out import cases_in, is_left_out, skip_if_left_out
from tests.world import load, make_world

__all__ = [
    "ENVIRONMENT",
    "Case",
    "Hosts",
    "cases_in",
    "check",
    "outcomes",
    "run_cases",
    "same_everywhere",
]

Case = Callable[[int], None]

#: A case that hangs must not cost the whole deadline of the run.
ENVIRONMENT = {"BAGUA_TIMEOUT": "30"}


def run_cases(rank: int, cases: Sequence[Case]) -> dict[str, str]:
    """Runs the cases on this rank; by name, what each raised ("" when nothing)."""
    torch.set_num_threads(1)
    bagua.init_process_group()
    outcome = {}
    for case in cases:
        if is_left_out(case):
            continue
        torch.manual_seed(17 + rank)
        try:
            case(rank)
            bagua.barrier()
            outcome[case.__name__] = ""
        except Exception:
            outcome[case.__name__] = traceback.format_exc()
    bagua.destroy_process_group()
    return outcome


def run_module(rank: int, path: str, module: str) -> dict[str, str]:
    """As :func:`run_cases`, with the cases of a module."""
    return run_cases(rank, load(path, module).CASES)


#: The ranks of each pretended host; None for one host.
Hosts = tuple[tuple[int, ...], ...] | None


@functools.cache
def outcomes(
    run: Callable[..., Any], size: int, hosts: Hosts, timeout: int | None, *arguments: str
) -> list[dict[str, str]]:
    """Every rank's outcomes of ``run``, which calls :func:`run_cases`. Runs once for all tests of a module."""
    env = ENVIRONMENT if timeout is None else {**ENVIRONMENT, "BAGUA_TIMEOUT": str(timeout)}
    found: list[dict[str, str]] = make_world(size, hosts=hosts, env=env, timeout=240.0).run(run, *arguments)
    return found


def check(
    case: Case,
    size: int,
    hosts: Hosts = None,
    *,
    run: Callable[[int], dict[str, str]] | None = None,
    timeout: int | None = None,
) -> None:
    """Fails with every rank's traceback when a case failed. ``run`` if the ranks do more than the module's CASES."""
    skip_if_left_out(case)
    if run is None:
        found = outcomes(run_module, size, hosts, timeout, inspect.getfile(case), case.__module__)
    else:
        found = outcomes(run, size, hosts, timeout)
    failed = [f"--- rank {rank} ---\n{texts[case.__name__]}" for rank, texts in enumerate(found)]
    assert not any(texts[case.__name__] for texts in found), "\n".join(failed)


def same_everywhere(*tensors: torch.Tensor | None) -> bool:
    """True on every rank if the tensors are bitwise equal on all ranks (``None`` equals ``None``)."""
    mine = [None if tensor is None else tensor.detach().contiguous().numpy().tobytes() for tensor in tensors]
    theirs = bagua.broadcast_object(mine)
    differs = torch.tensor([int(mine != theirs)], dtype=torch.int32)
    bagua.allreduce_inplace(differs, bagua.ReduceOp.MAX)
    return differs.item() == 0
