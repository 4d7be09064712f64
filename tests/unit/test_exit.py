"""A process ends in order also where its threads run much later than its main thread."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import scripts

#: What each rank does first. `late()` lets the threads that there are by then run only when the main thread sleeps: on
#: its own processor, in the class of the kernel that any other thread interrupts.
LATE = """
import contextlib, os

def late():
    processor = {(sorted(os.sched_getaffinity(0)) * 2)[int(os.environ["RANK"])]}
    for thread in map(int, os.listdir("/proc/self/task")):
        if thread != os.getpid():
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
                os.sched_setaffinity(thread, processor)
    os.sched_setaffinity(0, processor)
"""

NEUTRAL = """
import numpy as np
import bagua

group = bagua.init()
array = np.ones(1 << 14, np.float32)
group.all_reduce(array.copy(), async_op=True).wait()
late()
handles = [group.all_reduce(array.copy(), async_op=True) for _ in range(20)]
for handle in handles:
    handle.then(lambda error: sum(range(1000)))
handles[-1].wait()
"""

TORCH = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

{imports}
dist.init_process_group("{backend}")
model = DistributedDataParallel(torch.nn.Linear(8, 1))
for step in range(4):
    if step == 3:
        late()
    work = dist.all_reduce(torch.ones(1 << 14), async_op=True)
    ended = work.get_future().then(lambda future: sum(range(1000)))
    work.wait()
    model(torch.ones(2, 8)).sum().backward()
dist.destroy_process_group()
"""

WITH_BAGUA = """
import torch
import bagua.torch_api as bagua
from bagua.torch_api.algorithms import Algorithm

bagua.init_process_group()
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model = model.with_bagua([optimizer], Algorithm.init("{algorithm}"))
for step in range(4):
    optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    if step == 2:
        late()
"""


def ends(script: str, folder: Path, *runner: str) -> None:
    """Runs it on two ranks, each of which must end with exit code 0."""
    scripts.run_ranks(LATE + script, 2, folder, scripts.processes(*runner))


def test_callbacks_that_are_late(tmp_path: Path) -> None:
    ends(NEUTRAL, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "bytegrad", "async"])
def test_training_whose_threads_are_late(algorithm: str, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed: make setup")
    ends(WITH_BAGUA.format(algorithm=algorithm), tmp_path)


@pytest.mark.slow
def test_ddp_on_the_backend_bagua_whose_threads_are_late(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed: make setup")
    ends(
        TORCH.format(imports="import bagua.c10d  # torch 2.15 finds the backend without it", backend="bagua"), tmp_path
    )
