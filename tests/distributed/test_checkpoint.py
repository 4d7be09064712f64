"""Checkpoints: what a save leaves behind when it is killed at any moment, and what a load refuses."""

from __future__ import annotations

import io
import os
import pickle
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bagua.torch_api as bagua
from bagua.errors import BaguaError, PeerLostError
from bagua.torch_api.algorithms import AsyncModelAverageAlgorithm
from bagua.torch_api.checkpoint import load_checkpoint, save_checkpoint, saving
from tests.distributed.async_ranks import rounds_pass
from tests.waits import meet
from tests.world import World

# Calls by which a save touches the disk; it is killed before each one of them, and after.
STEPS = ("mkdir", "open", "fsync", "rename", "replace", "rmdir", "unlink")


def model_of(value: int) -> nn.Module:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(value)
    return model


def value_of(path: Path) -> tuple[int, int]:
    """Iteration and value of what is loaded."""
    model = model_of(-1)
    iteration = load_checkpoint(path, model)
    values = {int(value) for param in model.parameters() for value in param.flatten()}
    assert len(values) == 1, f"parameters of different checkpoints: {values}"
    return iteration, values.pop()


def dies_at(call: int) -> None:
    """Kills this process before its `call`-th touch of the disk."""
    count = 0

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def touch(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            if count == call:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1
            return original(*args, **kwargs)

        return touch

    for name in STEPS:
        setattr(os, name, counted(getattr(os, name)))
    real_save = torch.save

    def save(content: Any, file: Any) -> None:
        # Half of a file is what a kill in the middle of writing leaves.
        room = io.BytesIO()
        real_save(content, room)
        data = room.getvalue()
        file.write(data[: len(data) // 2])
        file.flush()
        counted(file.write)(data[len(data) // 2 :])

    saving.torch.save = save


def outcomes_of_kills(rank: int, iteration: int) -> list[tuple[int, int]]:
    """Saves 1 as iteration 5, then 2 as `iteration` in a child that is killed at every step; what is loaded then.

    And afterwards 3 is saved and loaded, so the files of the dead ranks do not prevent it.
    """
    torch.set_num_threads(1)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        while True:
            path = Path(folder, str(len(found)))
            save_checkpoint(5, path, model_of(1))
            child = os.fork()
            if child == 0:
                try:
                    dies_at(len(found))
                    save_checkpoint(iteration, path, model_of(2))
                finally:
                    os._exit(0)
            _, status = os.waitpid(child, 0)
            found.append(value_of(path))
            save_checkpoint(iteration, path, model_of(3))
            assert value_of(path) == (iteration, 3)
            left = sorted(file.name for file in path.iterdir())
            assert not [name for name in left if name.endswith((".saving", ".replaced"))], left
            if not os.WIFSIGNALED(status):
                return found


@pytest.mark.slow
@pytest.mark.parametrize("iteration", [5, 6])
def test_a_save_killed_at_any_step_leaves_a_complete_checkpoint(iteration: int, world: Callable[..., World]) -> None:
    found = world(1).run(outcomes_of_kills, iteration)[0]
    old, new = (5, 1), (iteration, 2)
    assert len(found) > 10
    assert set(found) == {old, new}
    # Once the new one is there it stays there.
    assert found == sorted(found, key=[old, new].index)
    assert found[-1] == new


def peer_is_killed(rank: int, folder: str) -> tuple[int, int]:
    bagua.init_process_group()
    torch.manual_seed(0)
    model = bagua.moe.MoE(4, nn.Linear(4, 4))
    save_checkpoint(1, folder, model)
    meet("after the first checkpoint", rank, range(2))
    if rank == 1:
        real_save = torch.save

        def save(content: Any, file: Any) -> None:
            real_save(content, file)
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)

        saving.torch.save = save
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    with pytest.raises(PeerLostError):
        save_checkpoint(2, folder, model)
    whole = torch.load(Path(folder, "iter_0000001", "mp_rank_00_model_states.pt"), weights_only=True)
    with open(Path(folder, "latest_checkpointed_iteration.txt")) as tracker:
        return int(tracker.read()), int(whole["iteration"])


def test_a_rank_that_dies_while_it_saves_its_experts_leaves_the_former_checkpoint(
    world: Callable[..., World], tmp_path: Path
) -> None:
    killed = world(2, expect_exit={1: -signal.SIGKILL})
    assert killed.run(peer_is_killed, str(tmp_path))[0] == (1, 1)
    assert not (tmp_path / "iter_0000002").exists()


def training() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])


def step(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    scheduler.step()


def test_training_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    first = training()
    for _ in range(3):
        step(*first)
    save_checkpoint(3, tmp_path, *first)
    second = training()
    assert load_checkpoint(tmp_path, *second) == 3
    for _ in range(3):
        step(*first)
        step(*second)
    for one, other in zip(first[0].parameters(), second[0].parameters(), strict=True):
        assert torch.equal(one, other)
    assert second[2].get_last_lr() == first[2].get_last_lr()


class Averaged(nn.Linear):
    """A layer whose weights are averaged beside the training. Rank 1 loads after rank 0, and after rounds if it is in
    any.
    """

    #: Whether the weights were locked in each `state_dict()`.
    locked: list[bool]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self.locked.append(self.bagua_algorithm._lock.is_used_here())
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        if bagua.get_rank() == 0:
            found = super().load_state_dict(*args, **kwargs)
            meet("rank 0 has loaded", 0, range(2))
            return found
        meet("rank 0 has loaded", 1, range(2))
        if self.bagua_algorithm.stats()["state"] == "running":
            rounds_pass(self)
        return super().load_state_dict(*args, **kwargs)


def a_checkpoint_of_averaged_weights(rank: int, path: str) -> list[float]:
    bagua.init_process_group()
    save_checkpoint(1, path, model_of(5))
    model = Averaged(2, 2)
    model.locked = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model.with_bagua([optimizer], AsyncModelAverageAlgorithm(sync_interval_ms=1))
    assert load_checkpoint(path, model) == 1
    assert model.bagua_algorithm.stats()["state"] == "running"
    bagua.barrier()
    rounds_pass(model)
    save_checkpoint(2, path, model)
    assert model.locked == ([True] if rank == 0 else [])
    model.bagua_algorithm.abort(model)
    assert load_checkpoint(path, model_of(0)) == 2
    found = model.weight.flatten().tolist() + model.bias.tolist()
    bagua.destroy_process_group()
    return found


@pytest.mark.slow
def test_weights_that_are_loaded_are_not_averaged_with_those_before(
    world: Callable[..., World], tmp_path: Path
) -> None:
    assert world(2).run(a_checkpoint_of_averaged_weights, str(tmp_path)) == [[5.0] * 6] * 2
    assert value_of(tmp_path) == (2, 5)


def test_files_lie_where_the_original_put_them(tmp_path: Path) -> None:
    save_checkpoint(12, tmp_path, *training())
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "12"
    whole = torch.load(tmp_path / "iter_0000012" / "mp_rank_00_model_states.pt", weights_only=True)
    assert sorted(whole) == ["iteration", "lr_scheduler", "model", "optimizer"]


def test_no_tracker_is_iteration_0(tmp_path: Path) -> None:
    assert load_checkpoint(tmp_path, nn.Linear(1, 1)) == 0


def test_strict_reaches_the_model(tmp_path: Path) -> None:
    save_checkpoint(1, tmp_path, nn.Linear(2, 2, bias=False))
    with pytest.raises(RuntimeError, match="Missing key"):
        load_checkpoint(tmp_path, nn.Linear(2, 2))
    assert load_checkpoint(tmp_path, nn.Linear(2, 2), strict=False) == 1


def test_a_released_model_has_no_iteration(tmp_path: Path) -> None:
    save_checkpoint(1, tmp_path, model_of(4))
    (tmp_path / "iter_0000001").rename(tmp_path / "release")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release\n")
    assert value_of(tmp_path) == (0, 4)


def test_what_a_safe_load_would_refuse_is_refused_before_saving(tmp_path: Path) -> None:
    model, optimizer, _ = training()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)
    save_checkpoint(1, tmp_path, model, optimizer, scheduler)
    optimizer.param_groups[0]["note"] = object()
    with pytest.raises(TypeError, match=r"\['optimizer'\]\['param_groups'\]\[0\]\['note'\] is a builtins.object"):
        save_checkpoint(2, tmp_path, model, optimizer)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["iter_0000001", "latest_checkpointed_iteration.txt"]


class Attack:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("ran",)


def test_a_file_with_code_in_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_checkpoint(1, tmp_path, model_of(1))
    torch.save({"iteration": 1, "model": Attack()}, tmp_path / "iter_0000001" / "mp_rank_00_model_states.pt")
    with pytest.raises(pickle.UnpicklingError):
        load_checkpoint(tmp_path, model_of(0))
    assert not (tmp_path / "ran").exists()


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    model, optimizer, _ = training()
    save_checkpoint(1, tmp_path, model)
    before = [param.clone() for param in model.parameters()]
    with pytest.raises(BaguaError, match="no state for the optimizer"):
        load_checkpoint(tmp_path, model, optimizer)
    assert all(map(torch.equal, before, model.parameters()))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("9")
    with pytest.raises(FileNotFoundError, match="names iteration 9"):
        load_checkpoint(tmp_path, model)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("../../etc")
    with pytest.raises(BaguaError, match="neither an iteration nor 'release'"):
        load_checkpoint(tmp_path, model)


@pytest.mark.parametrize("iteration", [-1, 1.0, True, "1"])
def test_an_iteration_is_a_number_from_0_on(iteration: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="iteration must be an integer"):
        save_checkpoint(iteration, tmp_path, nn.Linear(1, 1))
