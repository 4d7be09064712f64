"""Jobs of two ranks that have nothing but the variables of one launcher."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest

import bagua
from tests.world import World, free_port

pytestmark = pytest.mark.slow

Variables = Callable[[int, int], dict[str, str]]


def pytorchjob(rank: int, port: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def slurm(rank: int, port: int) -> dict[str, str]:
    # 15000 and the last four digits are the port.
    return {
        "SLURM_JOB_ID": f"87{port - 15000:04d}",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_LOCALID": str(rank),
        "SLURM_STEP_NODELIST": "127.0.0.[1-2]",
    }


def openmpi(rank: int, port: int) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "MASTER_PORT": str(port),
    }


def mpich(rank: int, port: int) -> dict[str, str]:
    return {"PMI_RANK": str(rank), "PMI_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def sums_arrays(rank: int) -> list[float]:
    group = bagua.init()
    x = np.full(3, group.rank + 1, dtype=np.float32)
    bagua.all_reduce(x)
    found = [group.rank, group.size, group.local_rank, group.local_world_size, float(x.sum())]
    bagua.shutdown()
    return found


def sums_tensors(rank: int) -> list[float]:
    import torch

    import bagua.torch_api as api

    assert (api.get_rank(), api.get_world_size()) == (rank, 2)
    api.init_process_group()
    tensor = torch.full((3,), api.get_rank() + 1.0)
    api.allreduce_inplace(tensor, op=api.ReduceOp.SUM)
    found = [api.get_rank(), api.get_world_size(), api.get_local_rank(), api.get_local_size(), tensor.sum().item()]
    # Children, and libraries that know RANK alone, find it in the environment.
    assert [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")] == [
        str(number) for number in found[:4]
    ]
    api.destroy_process_group()
    # What was written to the environment does not hide the launcher.
    api.init_process_group()
    api.destroy_process_group()
    return found


@pytest.mark.parametrize("work", [sums_arrays, sums_tensors])
@pytest.mark.parametrize("variables", [pytorchjob, slurm, openmpi, mpich])
def test_a_job_finds_itself_by_its_launchers_variables(variables: Variables, work: Callable[[int], object]) -> None:
    if work is sums_tensors:
        pytest.importorskip("torch", reason="torch is not installed: make setup")
    # Those that a Slurm job can have.
    with free_port(range(20000, 25000)) as port:
        ranks = World(2, env=lambda rank: variables(rank, port), launcher_env=False, torch=work is sums_tensors)
        assert ranks.run(work) == [[rank, 2, rank, 2, 9.0] for rank in range(2)]
