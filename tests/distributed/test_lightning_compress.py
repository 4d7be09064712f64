"""`bagua.lightning.CompressGradients` in Lightning's own DDP strategy."""

from __future__ import annotations

from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from bagua.hooks import CompressedState, compressed_hook
from tests.distributed.lightning_kit import Kit
from tests.world import World

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not find_spec("lightning"), reason="Lightning is not installed: make setup"),
]

STEPS = 4


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(96, 8, generator=generator), torch.randn(96, 1, generator=generator))


def fit(kit: Kit, folder: str, callback: Any, strategy: str = "ddp", **options: Any) -> tuple[nn.Module, Any]:
    """Trains with Lightning."""

    class Module(kit.pl.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            x, y = batch
            return nn.functional.mse_loss(self.net(x), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    checkpoint = options.pop("ckpt_path", None)
    sampler: Any = DistributedSampler(data(), dist.get_world_size(), dist.get_rank(), shuffle=False)
    trainer = kit.trainer(strategy, Path(folder), callbacks=[callback], use_distributed_sampler=False, **options)
    module = Module()
    trainer.fit(module, DataLoader(data(), 4, sampler=sampler), ckpt_path=checkpoint)
    return module.net, trainer


def by_hand(rank: int, state: CompressedState) -> nn.Module:
    """Trains with torch's DDP and the hook."""
    model = DistributedDataParallel(net())
    model.register_comm_hook(state, compressed_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler: Any = DistributedSampler(data(), dist.get_world_size(), rank, shuffle=False)
    for x, y in list(DataLoader(data(), 4, sampler=sampler))[:STEPS]:
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    module: nn.Module = model.module
    return module


def errors(state: CompressedState) -> torch.Tensor:
    return torch.cat(state.state_dict()["errors"])


def saves(rank: int, folder: str) -> torch.Tensor:
    import bagua.lightning

    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    kit, callback = Kit("lightning"), bagua.lightning.CompressGradients("onebit", error_feedback=True)
    trained, trainer = fit(kit, folder, callback, max_steps=STEPS)
    state = CompressedState("onebit", error_feedback=True)
    expected = by_hand(rank, state)
    assert all(map(torch.equal, trained.parameters(), expected.parameters()))
    owed = errors(state)
    assert torch.equal(errors(callback.compressed), owed)
    dist.all_reduce(owed)
    trainer.save_checkpoint(f"{folder}/saved.ckpt")
    torch.testing.assert_close(errors(callback.compressed), owed / dist.get_world_size())
    if rank == 0:
        with pytest.raises(kit.misconfigured, match=r"SingleDeviceStrategy has none\. BaguaStrategy"):
            fit(kit, folder, bagua.lightning.CompressGradients(), strategy="auto", devices=1, max_steps=1)
    dist.barrier()
    dist.destroy_process_group()
    return errors(callback.compressed)


def resumes(rank: int, folder: str) -> torch.Tensor:
    import bagua.lightning

    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    found: list[torch.Tensor] = []

    class Recorded(bagua.lightning.CompressGradients):  # type: ignore[misc]
        @property
        def state_key(self) -> str:
            return "CompressGradients"

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            super().on_train_start(trainer, pl_module)
            found.append(errors(self.compressed))

    callback = Recorded("onebit", error_feedback=True)
    options = {
        "devices": dist.get_world_size(),
        "max_epochs": 2,
        "max_steps": STEPS + 2,
        "ckpt_path": f"{folder}/saved.ckpt",
    }
    trained, _ = fit(Kit("lightning"), folder, callback, **options)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [parameter.detach() for parameter in trained.parameters()])
    assert all(all(map(torch.equal, each, everyone[0])) for each in everyone)
    dist.destroy_process_group()
    return found[0]


def test_a_fit_trains_as_ddp_with_the_hook_and_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    saved = World(2, timeout=240.0).run(saves, str(tmp_path))[0]
    assert saved.count_nonzero() > 0
    for size in (2, 3):
        for loaded in World(size, timeout=240.0).run(resumes, str(tmp_path)):
            assert torch.equal(loaded, saved)
