"""`rebuild`: a training goes on without the ranks that it lost, as if it had begun its next step with the others."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

import bagua.torch_api as bagua
from bagua import BaguaError, PeerLostError, PeerRaisedError, process_state
from bagua import group as neutral
from bagua.torch_api.algorithms.decentralized import DecentralizedAlgorithm
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm
from bagua.torch_api.membership import torch_init_process_group
from tests.waits import for_ever, meet

World = Callable[..., Any]

HEARTBEAT = {"BAGUA_HEARTBEAT_TIMEOUT": "1"}

OPTIMIZERS = {
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.05),
}


class Model(torch.nn.Module):
    """Two layers, and a buffer that counts the training forwards."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
        result: torch.Tensor = self.layers(x)
        return result


def loss_of(model: torch.nn.Module, step: int, rank: int, size: int) -> torch.Tensor:
    """Loss of one rank's share of a step's batch."""
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(24, 5, generator=generator), torch.randn(24, 3, generator=generator)
    result: torch.Tensor = (model(x[rank::size]) - y[rank::size]).square().mean()
    return result


def plain(optimizer: str, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Parameters after steps on so many ranks each, by plain torch in one process."""
    model = Model()
    steps = OPTIMIZERS[optimizer](model.parameters())
    for step, size in enumerate(sizes):
        steps.zero_grad()
        for rank in range(size):
            (loss_of(model, step, rank, size) / size).backward()
        steps.step()
    return [param.detach() for param in model.parameters()]


def digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of all bits of a training's state."""
    found = hashlib.sha256()
    for tensor in model.state_dict().values():
        found.update(tensor.numpy().tobytes())
    for _, entry in sorted(optimizer.state_dict()["state"].items()):
        for name, value in sorted(entry.items()):
            found.update(name.encode())
            found.update(value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode())
    return found.hexdigest()


def begin(optimizer: str = "momentum") -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    bagua.init_process_group()
    model = Model()
    steps = OPTIMIZERS[optimizer](model.parameters())
    model.with_bagua([steps], GradientAllReduceAlgorithm())  # type: ignore[operator]
    return model, steps


def make_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    loss_of(model, step, bagua.get_rank(), bagua.get_world_size()).backward()
    optimizer.step()


def finish(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[list[torch.Tensor], str]:
    result = [param.detach().clone() for param in model.parameters()], digest(model, optimizer)
    bagua.destroy_process_group()
    return result


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def pids() -> list[int]:
    own = torch.tensor([os.getpid()])
    everybody = torch.zeros(bagua.get_world_size(), dtype=torch.int64)
    bagua.allgather(own, everybody)
    return everybody.tolist()


def check_against_plain(results: Sequence[Any], survivors: Sequence[int], optimizer: str, sizes: Sequence[int]) -> None:
    """The survivors are equal to each other bitwise, and to plain torch within rounding."""
    expected = plain(optimizer, sizes)
    assert len({results[rank][1] for rank in survivors}) == 1
    for ours, theirs in zip(results[survivors[0]][0], expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


# --- one after the other ----------------------------------------------------------------------------------------------


def lose_one_by_one(rank: int, optimizer: str, ends: dict[int, int], how: int) -> Any:
    """Trains eight steps; `ends` says before which step's backward which rank ends."""
    model, steps = begin(optimizer)
    processes, names, seen = pids(), list(range(bagua.get_world_size())), []
    step = 0
    while step < 8:
        if step in ends:
            meet(f"before step {step}", rank, names)
        if ends.get(step) == rank:
            os.kill(os.getpid(), how)
        try:
            make_step(model, steps, step)
        except PeerLostError:
            rebuilt = bagua.rebuild()
            names = [names[former] for former in rebuilt.ranks]
            assert (rebuilt.rank, rebuilt.world_size) == (bagua.get_rank(), bagua.get_world_size())
            assert names[rebuilt.rank] == rank
            assert (bagua.get_local_rank(), bagua.get_local_size()) == (rebuilt.rank, rebuilt.world_size)
            assert all(param.grad is None for param in model.parameters())
            assert dist.get_world_size() == rebuilt.world_size
            ones = torch.ones(1)
            dist.all_reduce(ones)
            assert ones.item() == rebuilt.world_size
            seen.append((names, rebuilt.lost, rebuilt.steps))
            step = rebuilt.steps["Model_0"]
        else:
            step += 1
    result = finish(model, steps)
    if rank == names[0]:
        for frozen in set(ends.values()) if how == signal.SIGSTOP else ():
            os.kill(processes[frozen], signal.SIGKILL)
    return *result, seen


@pytest.mark.parametrize("optimizer", ["adam", pytest.param("momentum", marks=pytest.mark.slow)])
def test_four_ranks_become_three_two_and_one_by_kills(world: World, optimizer: str) -> None:
    ends = {2: 1, 4: 0, 6: 3}
    run = world(4, expect_exit=dict.fromkeys(ends.values(), -signal.SIGKILL))
    results = run.run(lose_one_by_one, optimizer, ends, signal.SIGKILL)
    check_against_plain(results, [2], optimizer, [4, 4, 3, 3, 2, 2, 1, 1])
    # Ranks of `lost` are those of the group before.
    expected = [([0, 2, 3], (1,), {"Model_0": 2}), ([2, 3], (0,), {"Model_0": 4}), ([2], (1,), {"Model_0": 6})]
    assert results[2][2] == expected


@pytest.mark.slow
def test_four_ranks_become_three_and_two_by_freezing(world: World) -> None:
    ends = {2: 3, 4: 2}
    run = world(4, env=HEARTBEAT, expect_exit=dict.fromkeys(ends.values(), -signal.SIGKILL))
    results = run.run(lose_one_by_one, "momentum", ends, signal.SIGSTOP)
    check_against_plain(results, [0, 1], "momentum", [4, 4, 3, 3, 2, 2, 2, 2])


def test_of_two_ranks_rank_0_dies(world: World) -> None:
    results = world(2, expect_exit={0: -signal.SIGKILL}).run(lose_one_by_one, "adam", {3: 0}, signal.SIGKILL)
    check_against_plain(results, [1], "adam", [2] * 3 + [1] * 5)


# --- one step apart ---------------------------------------------------------------------------------------------------


def one_step_apart(rank: int, ahead: int) -> Any:
    model, steps = begin("adam")
    for step in range(3):
        make_step(model, steps, step)
    steps.zero_grad()
    loss_of(model, 3, rank, 3).backward()
    meet("after the backward", rank, range(3))
    if rank == 0:
        die()
    communicator = neutral.default(required=True).communicator
    if rank != ahead:
        # It waits for the others between backward and step, as to log a loss, and so does not make the step.
        with pytest.raises(PeerLostError):
            for_ever(lambda: bagua.broadcast(torch.zeros(1), 0))
    else:
        steps.step()
        for_ever_until(lambda: communicator.cause())
    own_seen = float(model.seen)
    model.seen.fill_(own_seen + 10 * rank)
    rebuilt = bagua.rebuild()
    after = digest(model, steps), float(model.seen), model.bagua_ddp.bagua_train_step_counter  # type: ignore[union-attr]
    for step in range(rebuilt.steps["Model_0"], 6):
        make_step(model, steps, step)
    return *finish(model, steps), rebuilt, after


def for_ever_until(check: Callable[[], None]) -> None:
    with pytest.raises(PeerLostError):
        for_ever(check)


@pytest.mark.parametrize("ahead", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_rank_that_is_one_step_ahead_gives_its_state_to_the_others(world: World, ahead: int) -> None:
    results = world(3, expect_exit={0: -signal.SIGKILL}).run(one_step_apart, ahead)
    check_against_plain(results, [1, 2], "adam", [3] * 4 + [2] * 2)
    for _, _, rebuilt, after in results[1:]:
        assert rebuilt.steps == {"Model_0": 4}
        assert rebuilt.ranks == (1, 2)
        # Its buffers, too.
        assert after == (results[1][3][0], 4.0 + 10 * ahead, 4)


# --- a loss during rebuild --------------------------------------------------------------------------------------------

PLACES = ["_source", "_take_state", "in_state", "after_state", "in_torch", "wrap", "after_wrap"]


def lost_during_rebuild(rank: int, place: str, victim: int) -> Any:
    module: Any = sys.modules["bagua.torch_api.membership.rebuild"]
    model, steps = begin("adam")
    for step in range(2):
        make_step(model, steps, step)
    meet("after two steps", rank, range(4))
    if rank == 3:
        die()
    with pytest.raises(PeerLostError):
        make_step(model, steps, 2)
    if rank == victim:
        plan, wrapping = module._Plan, module._Model
        if place in ("_source", "_take_state"):
            setattr(plan, place, lambda *args: die())
        elif place == "in_state":
            whole = module.broadcast_tensors

            def then_die(*args: Any) -> None:
                whole(*args)
                die()

            module.broadcast_tensors = then_die
        elif place == "after_state":
            module.torch_init_process_group.begin_again = lambda *args: die()
        elif place == "in_torch":
            torch_init_process_group.begin_gloo = lambda *args: die()
        elif place == "wrap":
            wrapping.wrap = lambda *args: die()
        else:
            wrap = wrapping.wrap

            def wrap_and_die(*args: Any) -> None:
                wrap(*args)
                die()

            wrapping.wrap = wrap_and_die
    rebuilt = bagua.rebuild()
    for step in range(rebuilt.steps["Model_0"], 5):
        make_step(model, steps, step)
    return *finish(model, steps), rebuilt


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("place", PLACES)
def test_a_rank_that_is_lost_during_rebuild_is_left_behind_too(world: World, place: str, victim: int) -> None:
    ends = {3: -signal.SIGKILL, victim: -signal.SIGKILL}
    # gloo may wait for a rank that has given up, for 24 s each time.
    results = world(4, expect_exit=ends, timeout=150).run(lost_during_rebuild, place, victim)
    survivors = [rank for rank in (0, 1, 2) if rank != victim]
    check_against_plain(results, survivors, "adam", [4, 4, 2, 2, 2])
    for rank in survivors:
        assert results[rank][2].ranks == tuple(survivors)
        assert results[rank][2].lost == (victim, 3)


def votes_survive(rank: int) -> None:
    model = Model()
    steps = torch.optim.SGD(model.parameters(), lr=0.1)
    bagua.init_process_group()
    bagua.with_bagua(model, [steps], GradientAllReduceAlgorithm(), flags=["stop"])
    bagua.set_weight(model, [1.0, 3.0, 1.0][rank])
    meet("before it dies", rank, range(3))
    if rank == 2:
        die()
    if rank == 1:
        bagua.raise_flag(model, "stop")
    with pytest.raises(PeerLostError):
        make_step(model, steps, 0)
    bagua.rebuild()
    alone = Model()
    for step in range(2):
        model.zero_grad()
        loss_of(model, step, rank, 2).backward()
        assert bagua.flags(model) == ({"stop"} if step == 0 else set())
    losses = [loss_of(alone, 1, other, 2) for other in range(2)]
    ((losses[0] + 3 * losses[1]) / 4).backward()
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    bagua.destroy_process_group()


def test_weights_and_flags_of_the_survivors_stay(world: World) -> None:
    world(3, expect_exit={2: -signal.SIGKILL}).run(votes_survive)


# --- refused ----------------------------------------------------------------------------------------------------------


def refused_arguments(rank: int) -> None:
    with pytest.raises(BaguaError, match="init_process_group"):
        bagua.rebuild()
    model, steps = begin()
    with pytest.raises(ValueError, match="positive"):
        bagua.rebuild(timeout=-1)
    with pytest.raises(ValueError, match="'most'"):
        bagua.rebuild(quorum="most")  # type: ignore[arg-type]
    with pytest.raises(BaguaError, match="rebuild"):
        neutral.default(required=True).shrink()
    sharded: Any = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1)
    bagua.with_bagua(model, [sharded], GradientAllReduceAlgorithm())
    with pytest.raises(NotImplementedError, match="last checkpoint"):
        bagua.rebuild()
    bagua.with_bagua(model, [steps], GradientAllReduceAlgorithm())
    make_step(model, steps, 0)
    bagua.destroy_process_group()


def test_arguments_that_cannot_be_used_are_refused_and_the_training_goes_on(world: World) -> None:
    world(2).run(refused_arguments)


# --- what becomes of groups and models --------------------------------------------------------------------------------


def after_an_exception(rank: int) -> Any:
    model, steps = begin()
    make_step(model, steps, 0)
    error: type[BaguaError] = PeerRaisedError
    meet("before the exception", rank, range(3))
    if rank == 1:
        process_state.report(ValueError, ValueError("bad number"))
    with pytest.raises(error):
        make_step(model, steps, 1)
    rebuilt = bagua.rebuild()
    make_step(model, steps, 1)
    return *finish(model, steps), rebuilt.ranks


def test_after_an_exception_all_ranks_go_on(world: World) -> None:
    results = world(3).run(after_an_exception)
    check_against_plain(results, [0, 1, 2], "momentum", [3, 3])
    assert all(result[2] == (0, 1, 2) for result in results)


def groups_and_models(rank: int) -> Any:
    model, steps = begin()
    pair = bagua.new_group([0, 1])
    other = torch.nn.Linear(2, 2)
    if rank < 2:
        other.with_bagua([], GradientAllReduceAlgorithm(), process_group=pair)  # type: ignore[operator]
    meet("before it dies", rank, range(3))
    if rank == 2:
        die()
    with pytest.raises(PeerLostError):
        make_step(model, steps, 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        bagua.rebuild()
    texts = [str(each.message) for each in caught if each.category is RuntimeWarning]
    with pytest.raises(AttributeError):
        other.bagua_ddp  # noqa: B018
    with pytest.raises(BaguaError):
        bagua.barrier(pair)
    again = bagua.new_group([0, 1])
    bagua.barrier(again)
    make_step(model, steps, 0)
    assert model.bagua_ddp.process_group is bagua.communication._get_default_group()  # type: ignore[union-attr]
    return *finish(model, steps), texts


def test_models_on_other_groups_are_unwrapped_with_a_warning_and_new_groups_can_be_made(world: World) -> None:
    results = world(3, expect_exit={2: -signal.SIGKILL}).run(groups_and_models)
    check_against_plain(results, [0, 1], "momentum", [2])
    for result in results[:2]:
        assert len(result[2]) == 1
        assert "'Linear_1' is unwrapped" in result[2][0]


def refusing_algorithm(rank: int) -> Any:
    bagua.init_process_group()
    models = [Model(), Model()]
    optimizers = [OPTIMIZERS["momentum"](model.parameters()) for model in models]
    algorithms = [
        DecentralizedAlgorithm(hierarchical=False, peer_selection_mode="shift_one"),
        GradientAllReduceAlgorithm(),
    ]
    for model, optimizer, algorithm in zip(models, optimizers, algorithms, strict=True):
        model.with_bagua([optimizer], algorithm)  # type: ignore[operator]
    meet("before it dies", rank, range(4))
    if rank == 0:
        die()
    with pytest.raises(PeerLostError):
        make_step(models[1], optimizers[1], 0)
    with pytest.raises(ValueError, match="shift_one") as refused:
        bagua.rebuild()
    with pytest.raises(AttributeError):
        models[0].bagua_ddp  # noqa: B018
    # The group works, and so does the other model.
    bagua.barrier()
    make_step(models[1], optimizers[1], 0)
    return *finish(models[1], optimizers[1]), str(refused.value)


@pytest.mark.slow
def test_an_algorithm_that_refuses_the_number_of_ranks_raises_on_all_and_the_group_works(world: World) -> None:
    results = world(4, expect_exit={0: -signal.SIGKILL}).run(refusing_algorithm)
    check_against_plain(results, [1, 2, 3], "momentum", [3])
