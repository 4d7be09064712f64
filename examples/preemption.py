"""Training that a SIGTERM to any rank ends: all ranks save and leave after the same step, and the next start continues.

torchrun --nproc-per-node 2 examples/preemption.py --folder /tmp/my-checkpoints

The exit code is 0 if all steps are done, and 75 (EX_TEMPFAIL of sysexits.h) if the job has to be started again.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader, IterableDataset

import bagua.torch_api as bagua
from bagua.torch_api.checkpoint import load_checkpoint, save_checkpoint

#: Exit code after a checkpoint from which another start continues.
AGAIN = 75

FEATURES = 8


class Samples(IterableDataset[torch.Tensor]):
    """The batches of one rank from a step on."""

    def __init__(self, rank: int, step: int, steps: int) -> None:
        self._rank, self._step, self._steps = rank, step, steps

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Yields one batch per step, the same in every start."""
        for step in range(self._step, self._steps):
            yield torch.randn(32, FEATURES, generator=torch.Generator().manual_seed(1000 * step + self._rank))


def ignore_sigterm(worker: int) -> None:
    """Keeps a DataLoader worker alive, which also gets the signal. It ends with its rank."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def main() -> int:
    """Trains until all steps are done or a rank got the signal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="checkpoints", help="on a file system that all ranks share")
    parser.add_argument("--steps", type=int, default=200, help="in all, over all starts")
    parser.add_argument("--workers", type=int, default=1, help="DataLoader workers of each rank")
    arguments = parser.parse_args()

    bagua.init_process_group()
    rank = bagua.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Linear(FEATURES, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    step = load_checkpoint(arguments.folder, model, optimizer)
    bagua.with_bagua(model, [optimizer], "gradient_allreduce", flags=["stop"])
    # A handler runs between two of Python's instructions, so the exchange is not interrupted.
    signal.signal(signal.SIGTERM, lambda *_: bagua.raise_flag(model, "stop"))
    print(f"rank {rank} begins at step {step}", flush=True)
    data = DataLoader(
        Samples(rank, step, arguments.steps),
        batch_size=None,
        num_workers=arguments.workers,
        worker_init_fn=ignore_sigterm,
    )
    for x in data:
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        step += 1
        print(f"rank {rank} has done step {step}", flush=True)
        if "stop" in bagua.flags(model):
            break
    save_checkpoint(step, arguments.folder, model, optimizer)
    print(f"rank {rank} has saved after step {step}", flush=True)
    bagua.destroy_process_group()
    return 0 if step == arguments.steps else AGAIN


if __name__ == "__main__":
    sys.exit(main())
