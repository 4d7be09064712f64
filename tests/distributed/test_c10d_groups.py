"""Groups of the backend "bagua": failures, later groups, several jobs in one process, and groups that are adopted."""

from __future__ import annotations

import inspect
import os
import re
import signal
import subprocess
import sys
from datetime import timedelta
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import bagua
import bagua.c10d  # registers the backend
import bagua.torch_api
from bagua.c10d.torch_bindings import BACKEND_HAS_CONSTRUCTOR
from bagua.errors import AbortedError, BaguaError, BaguaTimeoutError, PeerLostError
from tests.groups import arrive_waiting
from tests.waits import NOT_BY_SILENCE, await_arrival, meet
from tests.world import ROOT, World, make_world

LIMIT = timedelta(seconds=30)
#: Elsewhere torch's split_group needs a device.
SPLITS = BACKEND_HAS_CONSTRUCTOR


def begin(**options: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("bagua", timeout=LIMIT, **options)


def total(value: float, group: Any = None) -> float:
    tensor = torch.tensor([value])
    dist.all_reduce(tensor, group=group)
    return float(tensor.item())


def survive(rank: int, folder: str) -> tuple[int, float] | None:
    begin()
    dist.barrier()
    meet("before it dies", rank, range(3))
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    # The one that waits for it.
    with pytest.raises(PeerLostError) as caught:
        dist.all_reduce(torch.ones(1000))
    # What was poisoned says so again.
    with pytest.raises(PeerLostError):
        dist.all_reduce(torch.ones(3))
    # In the world that has failed, and after it.
    pair = dist.new_group([0, 1])
    assert total(rank + 1, pair) == 3.0
    dist.destroy_process_group()
    begin(store=dist.FileStore(str(Path(folder, "store"))), rank=rank, world_size=2)
    found = total(rank + 1)
    dist.destroy_process_group()
    return caught.value.rank, found


def test_a_killed_rank_is_named_and_the_survivors_form_a_new_group(tmp_path: Path) -> None:
    world = World(3, expect_exit={2: -signal.SIGKILL}, env=NOT_BY_SILENCE)
    assert world.run(survive, str(tmp_path))[:2] == [(2, 3.0)] * 2


def split_in_order(rank: int) -> list[int]:
    """Makes groups of [2, 0] and [1] by split_group, and gathers their ranks."""
    split = dist.split_group(split_ranks=[[2, 0], [1]])
    assert dist.get_rank(split) == {2: 0, 0: 1, 1: 0}[rank]
    assert dist.get_process_group_ranks(split) == ([1] if rank == 1 else [2, 0])
    assert split.bagua_group.name == ("world/1" if rank == 1 else "world/2,0")
    # A group that had joined anew would count from 0.
    assert split.bagua_group.ranks == dist.get_process_group_ranks(split)
    tensor = torch.tensor([rank])
    outputs = [torch.zeros(1, dtype=torch.int64) for _ in range(split.size())]
    dist.all_gather(outputs, tensor, group=split)
    return [int(output) for output in outputs]


def join_several_times(rank: int, folder: str) -> list[Any]:
    found: list[Any] = []
    # A store that outlives the groups, as torchrun's.
    store = dist.FileStore(str(Path(folder, "store")))
    for incarnation in range(3):
        begin(store=store, rank=rank, world_size=3)
        found.append(total(incarnation))
        dist.destroy_process_group()
    begin()
    # Sub-groups, of all and of some.
    everybody = dist.new_group()
    found.append(total(1, everybody))
    pair = dist.new_group([0, 2], use_local_synchronization=True) if rank != 1 else None
    if pair is not None:
        assert len(bagua.stats()["groups"]) >= 3
        found.append(total(rank, pair))
        dist.destroy_process_group(pair)
    # In the order that is given.
    found.append(split_in_order(rank) if SPLITS else None)
    # Adopted by both APIs of Bagua.
    group = bagua.init()
    assert group is dist.group.WORLD.bagua_group
    assert (group.rank, group.size) == (rank, 3)
    with pytest.raises(BaguaError, match=r"torch\.distributed"):
        group.shrink()
    bagua.shutdown()
    with pytest.raises(ValueError, match="world_size"):
        bagua.init(world_size=7)
    found.append(total(1))
    bagua.torch_api.init_process_group()
    assert bagua.torch_api.communication._get_default_group().get_global_communicator().group is group
    tensor = torch.ones(2)
    bagua.torch_api.allreduce_inplace(tensor)
    found.append(float(tensor[0]))
    bagua.torch_api.destroy_process_group()
    found.append(total(1))
    dist.destroy_process_group()
    return found


def test_a_process_has_several_groups_one_after_another_and_beside_each_other(tmp_path: Path) -> None:
    found = make_world(3).run(join_several_times, str(tmp_path))
    for rank, values in enumerate(found):
        pair = [] if rank == 1 else [2.0]
        split = ([1] if rank == 1 else [2, 0]) if SPLITS else None
        assert values == [0.0, 3.0, 6.0, 3.0, *pair, split, 3.0, 3.0, 3.0]


def order_groups(rank: int) -> list[Any]:
    begin()
    found: list[Any] = []
    for order in ([2, 0, 1], [1, 0]):
        group = dist.new_group(order, sort_ranks=False)
        if rank not in order:
            continue
        assert dist.get_rank(group) == order.index(rank)
        # A sub-group of the first one's connections.
        assert group.bagua_group.name == f"world/{','.join(map(str, order))}"
        tensor = torch.tensor([rank])
        outputs = [torch.zeros(1, dtype=torch.int64) for _ in order]
        dist.all_gather(outputs, tensor, group=group)
        found.append([int(output) for output in outputs])
        dist.broadcast(tensor, order[1], group=group)
        found.append(int(tensor))
        # Messages and roots are named by ranks of the world.
        if rank == order[0]:
            dist.send(torch.tensor([7]), order[1], group=group)
        elif rank == order[1]:
            received = torch.zeros(1, dtype=torch.int64)
            assert dist.recv(received, None, group=group) == order[0]
            found.append(int(received))
    dist.destroy_process_group()
    return found


@pytest.mark.skipif(
    "sort_ranks" not in inspect.signature(dist.new_group).parameters, reason="this torch sorts the ranks of new_group"
)
def test_a_new_group_keeps_the_order_of_its_ranks() -> None:
    whole, pair = [[2, 0, 1], 0], [[1, 0], 0]
    assert make_world(3).run(order_groups) == [[*whole, 7, *pair, 7], [*whole, *pair], whole]


def groups_of_a_gloo_world(rank: int) -> list[float]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=LIMIT)
    # None of the first one's members is in the second; the third has members of both.
    first = dist.new_group([0, 1], backend="bagua")
    third = dist.new_group([1, 2], backend="bagua")
    found = [total(1, first)] if rank in (0, 1) else []
    found += [total(10, third)] if rank in (1, 2) else []
    if rank in (0, 1):
        dist.destroy_process_group(first)
    found += [total(100, third)] if rank in (1, 2) else []
    dist.destroy_process_group()
    return found


def test_groups_of_bagua_in_a_world_of_gloo() -> None:
    assert make_world(3).run(groups_of_a_gloo_world) == [[2.0], [2.0, 20.0, 200.0], [20.0, 200.0]]


def end_groups(rank: int) -> list[Any]:
    begin()
    found: list[Any] = []
    watched, aborted = dist.new_group(), dist.new_group()
    # Prove that both work.
    found += [total(1, watched), total(1, aborted)]
    if rank == 0:
        # Rank 1 is there, or it would be missing too.
        await_arrival("waits", [1])
    elif rank == 1:
        arrive_waiting("waits", rank)
    if rank != 2:
        with pytest.raises(BaguaTimeoutError) as caught:
            dist.monitored_barrier(watched, timedelta(seconds=0.5) if rank == 0 else LIMIT, wait_all_ranks=True)
        found.append(tuple(caught.value.missing))
    # That group alone has ended.
    found.append(total(1))
    if rank == 0:
        dist.distributed_c10d._abort_process_group(aborted)
    else:
        with pytest.raises(AbortedError):
            dist.all_reduce(torch.ones(2), group=aborted)
    found.append(total(1))
    dist.destroy_process_group()
    return found


@pytest.mark.skipif(not BACKEND_HAS_CONSTRUCTOR, reason="this torch asks only gloo for a monitored barrier")
def test_a_monitored_barrier_and_an_abort_end_one_group_alone() -> None:
    found = make_world(3).run(end_groups)
    assert found[:2] == [[3.0, 3.0, (2,), 3.0, 3.0]] * 2
    assert found[2] == [3.0, 3.0, 3.0, 3.0]


CODE = """
import sys, torch, torch.distributed as dist
import bagua.c10d
dist.init_process_group("bagua", store=dist.HashStore(), rank=0, world_size=1)
x = torch.ones(3)
dist.all_reduce(x)
dist.all_reduce(x, async_op=True).wait()
assert x.tolist() == [1, 1, 1]
dist.barrier()
assert "torch._dynamo" not in sys.modules
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("detail", [False, True])
def test_a_world_of_one_needs_neither_a_launcher_nor_the_compiler(detail: bool) -> None:
    # RANK would mislead a backend that read it.
    changes = {"RANK": "5", "LOCAL_RANK": "5", **({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"} if detail else {})}
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env={**os.environ, **changes},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


UNSUPPORTED = """
import sys, torch, torch.distributed as dist
import bagua.c10d
dist.init_process_group("bagua", store=dist.HashStore(), rank=0, world_size=1)
group = dist.group.WORLD
halves = [group]
if bagua.c10d.torch_bindings.BACKEND_HAS_CONSTRUCTOR:
    halves.append(group._get_backend(torch.device("cpu")))
sys.setrecursionlimit(300)
for half in halves:
    for name in dir(half):
        try:
            getattr(half, name)
        except RecursionError:
            raise AssertionError(f"{type(half).__name__}.{name} has no end") from None
        except (AttributeError, RuntimeError):
            pass
    assert not half.supports_reconfigure and not half.supports_window and not half.supports_shrinking
supports = getattr(dist, "_supports_reconfigure", None)
assert supports is None or supports() is False
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_what_a_newer_torch_asks_a_group_for_has_an_answer() -> None:
    done = subprocess.run([sys.executable, "-c", UNSUPPORTED], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_the_entry_point_leads_to_what_registers_the_backend() -> None:
    lines = Path(ROOT, "pyproject.toml").read_text(encoding="utf-8")
    (value,) = re.findall(r'\[project\.entry-points\."torch\.distributed\.backends"\]\nbagua = "(.*)"', lines)
    register = EntryPoint("bagua", value, "torch.distributed.backends").load()
    register()
    assert "bagua" in dist.Backend.backend_list
    assert dist.Backend.default_device_backend_map["cpu"] == "gloo"
