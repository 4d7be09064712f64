"""A program that trains on two processes which Lightning itself starts, and prints what came of it.

usage: python lightning_job.py NAMESPACE fork|spawn FOLDER
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.distributed.lightning_kit import Kit, loader, weights


def main() -> None:
    """One training with strategy="ddp_fork" on gloo, and the same with ours."""
    namespace, start, folder = sys.argv[1:]
    torch.set_num_threads(1)
    kit = Kit(namespace)
    results = []
    for strategy in ("ddp_fork", f"bagua_{start}"):
        trainer = kit.trainer(strategy, Path(folder))
        model = kit.model("adam")
        trainer.fit(model, loader())
        # Of rank 0, brought back by the launcher.
        results.append(weights(model))
    assert type(trainer.strategy) is kit.strategy
    alone, trainer = kit.fit("bagua", Path(folder), devices=1, max_steps=2)
    assert trainer.world_size == 1
    # Or else the next job of this process would take itself for a rank.
    assert not {"RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"} & set(os.environ)
    assert torch.isfinite(weights(alone)).all()
    print("equal" if torch.equal(*results) else "different", float(results[0].norm()))


if __name__ == "__main__":
    main()
