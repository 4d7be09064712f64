"""Joining and leaving through torch: which setting wins, what is left alone, what the others raise, and forks."""

from __future__ import annotations

import contextlib
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import bagua as neutral
import bagua.torch_api as bagua
from bagua.errors import BaguaError, PeerRaisedError
from bagua.torch_api import communication
from tests.distributed.torch_ranks import ENVIRONMENT
from tests.waits import meet
from tests.world import World, free_port

Runner = Any


def run(size: int, function: Runner, *args: Any, **options: Any) -> list[Any]:
    options.setdefault("env", ENVIRONMENT)
    return World(size, timeout=90.0, **options).run(function, *args)


def summed(rank: int) -> float:
    tensor = torch.tensor([rank + 1.0])
    bagua.allreduce_inplace(tensor)
    return tensor.item()


def our_threads() -> set[str]:
    """Names of the core's threads."""
    names = set()
    for task in Path("/proc/self/task").iterdir():
        # A thread may end while it is looked at.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            names.add(Path(task, "comm").read_text(encoding="utf-8").strip())
    return {name for name in names if name.startswith("bagua-")}


def our_threads_end() -> bool:
    """True as soon as there are none: the kernel lists a thread for a moment after it was joined."""
    until = time.monotonic() + 10
    while our_threads():
        if time.monotonic() > until:
            return False
        os.sched_yield()
    return True


def joins_again_and_again(rank: int, first: int) -> list[float]:
    assert not bagua.is_initialized()
    sums = []
    for port in range(first, first + 3):
        # Through one store that outlives the groups.
        store = dist.TCPStore("127.0.0.1", port, 3, rank == 0, timedelta(seconds=30), wait_for_workers=False)
        for _ in range(2):
            # The ranks are numbered in the reverse order of their launcher's.
            bagua.init_process_group(store, 2 - rank, 3, 3)
            assert bagua.is_initialized()
            assert (bagua.get_rank(), bagua.get_world_size()) == (2 - rank, 3)
            assert (bagua.get_local_rank(), bagua.get_local_size()) == (2 - rank, 3)
            assert dist.is_initialized()
            with pytest.raises(RuntimeError, match="called twice"):
                bagua.init_process_group()
            sums.append(summed(2 - rank))
            model = torch.nn.Linear(2, 2)
            model.with_bagua([], bagua.algorithms.GradientAllReduceAlgorithm())
            assert model.bagua_module_name == "Linear_0"
            model(torch.ones(1, 2)).sum().backward()
            bagua.barrier()
            assert "bagua-control" in our_threads()
            bagua.destroy_process_group()
            assert not bagua.is_initialized()
            assert not dist.is_initialized()
            assert not hasattr(model, "bagua_ddp")
            # Trains on alone.
            model(torch.ones(1, 2)).sum().backward()
            assert our_threads_end(), our_threads()
        del store
    bagua.destroy_process_group()
    return sums


def test_one_process_joins_group_after_group_and_explicit_ranks_win() -> None:
    with free_port(count=3) as port:
        assert run(3, joins_again_and_again, port) == [[6.0] * 6] * 3


def leaves_torch_alone(rank: int) -> float:
    dist.init_process_group("gloo")
    bagua.init_process_group()
    total = summed(rank)
    with pytest.raises(RuntimeError, match="called twice"):
        bagua.init_process_group()
    neutral.shutdown()
    assert not bagua.is_initialized()
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == 2
    with pytest.raises(ValueError, match=r"rank \d was given, but torch.distributed is initialised with \d"):
        bagua.init_process_group(rank=1 - rank)
    # Ranks and size are those of torch when the environment says nothing.
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    bagua.init_process_group()
    assert (bagua.get_rank(), bagua.get_world_size()) == (dist.get_rank(), 2)
    assert summed(rank) == total
    bagua.destroy_process_group()
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return total


def test_a_torch_distributed_that_the_program_began_is_left_alone() -> None:
    assert run(2, leaves_torch_alone) == [3.0, 3.0]


def works_without_a_launcher(rank: int) -> float:
    with pytest.raises(BaguaError, match=r"call bagua\.torch_api\.init_process_group"):
        bagua.barrier()
    with pytest.raises(BaguaError, match=r"call bagua\.torch_api\.init_process_group"):
        torch.nn.Linear(1, 1).with_bagua([], bagua.algorithms.GradientAllReduceAlgorithm())
    with pytest.raises(ValueError, match="with a store also needs rank, local_world_size"):
        bagua.init_process_group(dist.HashStore(), world_size=1)
    with pytest.raises(ValueError, match="rank 3 is not in a world of 2"):
        bagua.init_process_group(dist.HashStore(), 3, 2, 2)
    with pytest.raises(ValueError, match="local rank"):
        bagua.init_process_group(dist.HashStore(), 0, 1, 0)
    assert not dist.is_initialized()
    bagua.init_process_group()
    return summed(rank)


def test_a_plain_script_is_a_world_of_one() -> None:
    assert run(1, works_without_a_launcher, launcher_env=False) == [1.0]


def skips_a_parameter(rank: int, do_flatten: bool) -> str:
    bagua.init_process_group()
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
    model.forward = lambda x, names: sum(model[name](x) for name in names)
    model.with_bagua([], bagua.algorithms.GradientAllReduceAlgorithm(), do_flatten=do_flatten)
    model(torch.ones(1, 2), "ab").sum().backward()
    meet("after a backward", rank, range(3))

    def train() -> None:
        # A peer may be done with a step before the report of this rank's error reaches it, but not with another one.
        for _ in range(2):
            model(torch.ones(1, 2), "a" if rank == 1 else "ab").sum().backward()

    with pytest.raises(BaguaError) as caught:
        train()
    assert isinstance(caught.value, PeerRaisedError) == (rank != 1)
    return str(caught.value)


@pytest.mark.parametrize("do_flatten", [True, False])
def test_an_unused_parameter_is_named_by_its_rank_and_raised_on_the_others(do_flatten: bool) -> None:
    mine, *_ = texts = run(3, skips_a_parameter, do_flatten)
    for text in texts:
        assert "no gradient for 'b.weight', 'b.bias' of model 'ModuleDict_0'" in text or "'b.bias', 'b.weight'" in text
        assert "on rank 1" in text
        assert "find_unused_parameters=True" in text
    assert mine.startswith("rank 1 on ")


class Squares(torch.utils.data.Dataset[torch.Tensor]):
    """Made in worker processes."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        assert not bagua.is_initialized(), "a forked worker is not a rank"
        return torch.tensor([float(index), float(index**2)])


def trains_with_forked_workers(rank: int, persistent: bool) -> list[float]:
    bagua.init_process_group()
    torch.manual_seed(rank)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    model.with_bagua([optimizer], bagua.algorithms.GradientAllReduceAlgorithm())
    loader = DataLoader(
        Squares(), 8, num_workers=2, multiprocessing_context="fork", persistent_workers=persistent, shuffle=True
    )
    for _ in range(2):
        for batch in loader:
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
    return model.weight.flatten().tolist()


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
def test_data_loader_workers_forked_after_init_neither_hang_nor_disturb(persistent: bool) -> None:
    # Ends without destroy_process_group too: the interpreter's exit leaves the group.
    first, second = run(2, trains_with_forked_workers, persistent)
    assert first == second


def hierarchical(rank: int) -> tuple[Any, ...]:
    bagua.init_process_group()
    torch.manual_seed(rank)
    model = torch.nn.Linear(64, 8)
    model.with_bagua([], bagua.algorithms.GradientAllReduceAlgorithm(hierarchical=True))
    model(torch.randn(4, 64)).square().sum().backward()
    gradient = model.weight.grad
    assert gradient is not None
    group = bagua.new_group()
    intra, inter = group.get_intra_node_communicator(), group.get_inter_node_communicator()
    named = [communication.get_communicator(group.group_name, part) for part in ("global", "inter", "intra")]
    assert all(one is other for one, other in zip(named, (group.get_global_communicator(), inter, intra), strict=True))
    with pytest.raises(ValueError, match=f"no group is called 'else'; known groups: .*{group.group_name}"):
        communication.get_communicator("else", "global")
    with pytest.raises(ValueError, match=r"must be one of .* got 'local'"):
        communication.get_communicator(group.group_name, "local")  # type: ignore[arg-type]
    parts = (intra.rank(), intra.nranks(), inter.rank(), inter.nranks())
    return gradient.numpy().tobytes(), parts, neutral.stats()["groups"]["world"]["collective"]


def test_two_pretended_hosts_agree_and_know_their_leaders() -> None:
    found = run(4, hierarchical, hosts=[[0, 1], [2, 3]])
    assert len({gradient for gradient, _, _ in found}) == 1
    assert [parts for _, parts, _ in found] == [(0, 2, 0, 2), (1, 2, -1, -1), (0, 2, 1, 2), (1, 2, -1, -1)]
    assert {collective for _, _, collective in found} == {"hier"}
