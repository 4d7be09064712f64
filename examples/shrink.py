"""Training that continues after losing a rank: the last rank kills itself after a third of the steps.

OMP_NUM_THREADS=1 python examples/shrink.py

torchrun would end all ranks when one ends, so this program starts them itself. If RANK is set, it runs one rank.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import torch

import bagua.torch_api as bagua
from bagua import PeerLostError

RANKS, STEPS = 3, 30


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns this rank's part of the samples of a step. All ranks draw the same samples."""
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(48, 10, generator=generator)
    mine = slice(bagua.get_rank(), None, bagua.get_world_size())
    return images[mine], images.sum(1, keepdim=True)[mine]


def train() -> int:
    """Trains, and prints whether the remaining ranks have the same weights."""
    bagua.init_process_group()
    ends = bagua.get_rank() == bagua.get_world_size() - 1 > 0
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(10, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    bagua.with_bagua(model, [optimizer], "gradient_allreduce")
    loss, step = torch.zeros(()), 0
    while step < STEPS:
        if ends and step == STEPS // 3:
            os.kill(os.getpid(), signal.SIGKILL)
        images, values = batch(step)
        try:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(images), values)
            loss.backward()
            optimizer.step()
        except PeerLostError as error:
            rebuilt = bagua.rebuild()
            step = rebuilt.steps[model.bagua_module_name]
            place = f"rank {rebuilt.rank} of {rebuilt.world_size} from step {step}"
            print(f"rank {rebuilt.ranks[rebuilt.rank]} is {place}: {error}")
        else:
            step += 1
    weights = torch.cat([param.detach().flatten() for param in model.parameters()])
    everybody = torch.empty(bagua.get_world_size() * len(weights))
    bagua.allgather(weights, everybody)
    equal = bool((everybody.view(-1, len(weights)) == weights).all())
    if bagua.get_rank() == 0:
        print(f"loss {loss.item():.4f}, weights {'equal on all ranks' if equal else 'DIFFER BETWEEN RANKS'}")
    bagua.destroy_process_group()
    return 0 if equal else 1


def launch() -> int:
    """Starts the ranks, and expects that the last one is killed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {"WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__],
            env=os.environ | {name: str(value) for name, value in {**job, "RANK": rank, "LOCAL_RANK": rank}.items()},
        )
        for rank in range(RANKS)
    ]
    codes = [rank.wait() for rank in ranks]
    return 0 if codes == [0] * (RANKS - 1) + [-signal.SIGKILL] else 1


if __name__ == "__main__":
    sys.exit(train() if "RANK" in os.environ else launch())
