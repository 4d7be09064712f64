"""Compressed gradients in accelerate and in transformers' Trainer.

`make test-hugging-face` installs both packages and runs this. `make test` does not.
"""

from __future__ import annotations

import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bagua.accelerate
from bagua.hooks import CompressedState, compressed_hook
from tests.world import World

LIMIT = timedelta(seconds=30)
STEPS = 4


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def equal(one: nn.Module, other: nn.Module) -> bool:
    return all(map(torch.equal, one.parameters(), other.parameters()))


def owed(state: CompressedState) -> torch.Tensor:
    """Returns the mean of the error memory over the ranks."""
    errors = torch.cat(state.state_dict()["errors"])
    dist.all_reduce(errors)
    return errors / dist.get_world_size()


def train(model: nn.Module, rank: int, backward: Any = torch.Tensor.backward) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * rank + step))
        backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def with_accelerate(rank: int, folder: str, resumes: bool) -> torch.Tensor:
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    dist.init_process_group("gloo", timeout=LIMIT)
    options = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[options])
    state = bagua.accelerate.compress(accelerator, "onebit", error_feedback=True)
    model = accelerator.prepare(net())
    assert type(model) is DistributedDataParallel
    assert model.gradient_as_bucket_view
    with pytest.raises(RuntimeError, match=r"before accelerator\.prepare"):
        bagua.accelerate.compress(accelerator)
    if resumes:
        accelerator.load_state(folder)
        found = torch.cat(state.state_dict()["errors"])
    else:
        plain = DistributedDataParallel(net(), gradient_as_bucket_view=True)
        plain.register_comm_hook(CompressedState("onebit", error_feedback=True), compressed_hook)
        train(model, rank, accelerator.backward)
        train(plain, rank)
        assert equal(model, plain)
        found = owed(state)
        assert found.count_nonzero() > 0
        accelerator.save_state(folder)
    dist.destroy_process_group()
    return found


def test_accelerate_trains_as_ddp_with_the_hook_and_saves_what_is_owed(tmp_path: Path) -> None:
    saved = World(2, torch=True, timeout=240.0).run(with_accelerate, str(tmp_path), False)[0]
    for size in (2, 3):
        for loaded in World(size, torch=True, timeout=240.0).run(with_accelerate, str(tmp_path), True):
            torch.testing.assert_close(loaded, saved)


def another_hook(rank: int) -> None:
    from accelerate import Accelerator
    from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

    options = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[options])
    with pytest.raises(ValueError, match="communication hook 'fp16' already"):
        bagua.accelerate.compress(accelerator)


def test_an_accelerator_with_another_hook_is_refused() -> None:
    World(1, torch=True, timeout=240.0).run(another_hook)


class Regression(nn.Module):
    """A model as the Trainer calls it: its loss comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.net(x)
        return nn.functional.mse_loss(y, labels), y


def with_trainer(rank: int, folder: str, checkpoint: str | None) -> torch.Tensor:
    from transformers import Trainer, TrainingArguments

    dist.init_process_group("gloo", timeout=LIMIT)
    generator = torch.Generator().manual_seed(5)
    data = [
        {"x": torch.randn(8, generator=generator), "labels": torch.randn(1, generator=generator)} for _ in range(96)
    ]
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        max_steps=STEPS if checkpoint is None else 2 * STEPS,
        per_device_train_batch_size=4,
        save_steps=STEPS,
        optim="sgd",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(Regression(), arguments, train_dataset=data)
    state = bagua.accelerate.compress(trainer.accelerator, "onebit", error_feedback=True)
    trainer.add_callback(bagua.accelerate.trainer_callback(state))
    if checkpoint is not None:
        file = Path(checkpoint, bagua.accelerate.TRAINER_FILE)
        state.load_state_dict(torch.load(file, weights_only=True))
        found = torch.cat(state.state_dict()["errors"])
    trainer.train(resume_from_checkpoint=checkpoint)
    if checkpoint is None:
        # The last step's memory was consolidated: every rank has the mean.
        found = torch.cat(state.state_dict()["errors"])
        torch.testing.assert_close(found, owed(state))
        assert found.count_nonzero() > 0
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [parameter.detach() for parameter in trainer.model.parameters()])
    assert all(all(map(torch.equal, each, everyone[0])) for each in everyone)
    dist.destroy_process_group()
    return found


def test_a_trainer_saves_what_is_owed_and_resumes_on_another_number_of_ranks() -> None:
    with tempfile.TemporaryDirectory() as folder:
        saved = World(2, torch=True, timeout=240.0).run(with_trainer, folder, None)[0]
        checkpoint = str(Path(folder, f"checkpoint-{STEPS}"))
        for size in (2, 3):
            for loaded in World(size, torch=True, timeout=240.0).run(with_trainer, f"{folder}/{size}", checkpoint):
                assert torch.equal(loaded, saved)
