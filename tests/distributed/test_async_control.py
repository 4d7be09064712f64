"""Asynchronous averaging over a whole job: aborts and resumes, states, copies, buckets, scaled gradients, its end."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import bagua.torch_api as bagua
from bagua.errors import BaguaError
from bagua.torch_api.algorithms import GradientAllReduceAlgorithm
from bagua.torch_api.algorithms.async_model_average import AsyncModelAverageAlgorithm
from bagua.torch_api.bucket import BaguaBucket
from bagua.torch_api.communication import get_backend
from tests.distributed.async_ranks import (
    LAYOUTS,
    NEVER,
    Slopes,
    all_are,
    fill,
    gathered,
    rest,
    rounds,
    rounds_pass,
    same_bits,
    step,
    until,
    values,
    wrapped,
)
from tests.distributed.torch_ranks import cases_in, each_case
from tests.world import make_world


def in_use() -> tuple[int, int, int]:
    """Threads, file descriptors and memory maps of this process."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    shared = sum("memfd" in line or "/dev/shm" in line for line in maps)
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), shared


def aborts_and_resumes_in_unrelated_orders_lose_nothing(rank: int) -> None:
    size = bagua.get_world_size()
    # Each rank in 1,000 changes in all, in an order of its own; four ranks are in other sets than are kept.
    models = [wrapped(interval=1.0), wrapped(torch.float64, interval=1.5)]
    mine = random.Random(rank)
    counts = [0, 0]
    middle = None
    for change in range(1000):
        which = mine.randrange(2)
        model, optimizer, impl = models[which]
        if impl.stats()["state"] == "running":
            impl.abort(model)
            before = values(model)
            done = rounds(model)
            if mine.random() < 0.02:
                time.sleep(0.003)
                assert all(torch.equal(a, b) for a, b in zip(before, values(model), strict=True))
                assert rounds(model) == done
        else:
            impl.resume(model)
        if mine.random() < 0.1:
            step(model, optimizer, float(rank + 1))
            counts[which] += 1
        if change == 500:
            middle = in_use()
    for model, _, impl in models:
        impl.resume(model)
    everyone = gathered(*counts)
    for number, (model, _, impl) in enumerate(models):
        until("a round of all", lambda impl=impl: impl.stats()["ranks"] == list(range(size)))
        found = rest(model)
        assert same_bits(*found)
        progress = sum(2**-6 * (other + 1) * everyone[other][number] for other in range(size)) / size
        begin = next(Slopes(found[0].dtype).parameters()).detach()
        torch.testing.assert_close(found[0], begin - progress, rtol=1e-3, atol=1e-3)
        assert impl.stats()["view"] > 1
    assert middle is not None
    threads, descriptors, maps = in_use()
    # What the lanes of the sets that are kept at that moment use differs; nothing grows with the number of changes.
    assert threads <= middle[0] + 2
    assert descriptors <= middle[1] + 60
    assert maps <= middle[2] + 60


def a_model_that_is_gone_leaves_nothing(rank: int) -> None:
    def use() -> None:
        model, optimizer, _impl = wrapped()
        step(model, optimizer, 1.0)
        rounds_pass(model)
        bagua.barrier()

    # Collecting what is in cycles is slow beside torch.
    use()
    before = in_use()
    for _ in range(3):
        use()

    def all_is_back() -> bool:
        # The connections of a group that others have left end a moment later.
        gc.collect()
        return all(now <= then + more for now, then, more in zip(in_use(), before, (0, 2, 2), strict=True))

    until("what the models used is given back", all_is_back)


def a_state_contains_whether_the_warm_up_is_over(rank: int) -> None:
    states = []
    for warmup, steps in ((3, 2), (3, 5)):
        model, optimizer, impl = wrapped(warmup_steps=warmup)
        for _ in range(steps):
            step(model, optimizer, 1.0)
        rest_of = rest(model) if steps > warmup else values(model)
        assert same_bits(*rest_of)
        state = copy.deepcopy((model.state_dict(), optimizer.state_dict(), impl.state_dict()))
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        states.append(torch.load(file, weights_only=True))
        assert states[-1][2]["optimizer_steps"] == steps
        assert states[-1][2]["algorithm"] == "async"
        bagua.barrier()
    for state, steps_left in zip(states, (1, 0), strict=True):
        model, optimizer, impl = wrapped(warmup_steps=3)
        model.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
        impl.load_state_dict(state[2])
        for _ in range(steps_left):
            step(model, optimizer, 1.0)
        assert impl.stats()["state"] == "warmup"
        step(model, optimizer, 1.0)
        assert impl.stats()["state"] == "running"
        # No rank's round is running: one with snapshots from before and after would leave what it rounded.
        impl.abort(model)
        bagua.barrier()
        fill(model, 2.0)
        bagua.barrier()
        impl.resume(model)
        rest(model)
        # In the averaging, a state is taken over without a loss of weights to a round.
        impl.load_state_dict(state[2])
        assert same_bits(*rest(model))
        assert all_are(model, 2.0)
        bagua.barrier()
    other = torch.nn.Linear(2, 2).with_bagua([], GradientAllReduceAlgorithm())
    with pytest.raises(ValueError, match="'async', not of 'gradient_allreduce'"):
        other.bagua_algorithm.load_state_dict(states[0][2])


def copies_of_the_model_are_plain_and_train_alone(rank: int) -> None:
    model, optimizer, impl = wrapped()
    rounds_pass(model)
    file = io.BytesIO()
    with impl.lock(model):
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        torch.save(model, file)
    file.seek(0)
    copies.append(torch.load(file, weights_only=False))
    for each in copies:
        assert torch.equal(each.weight0, Slopes().weight0)
        assert not hasattr(each, "bagua_ddp")
        alone = torch.optim.SGD(each.parameters(), lr=2**-6)
        step(each, alone, float(rank))
        assert torch.equal(each.weight0, Slopes().weight0 - 2**-6 * rank)
    # A step of one rank would come into the copies of another by a round.
    bagua.barrier()
    step(model, optimizer, 1.0)
    assert same_bits(*rest(model))
    assert all(torch.equal(each.weight0, Slopes().weight0 - 2**-6 * rank) for each in copies)


def evaluation_between_training_does_no_harm(rank: int) -> None:
    model, optimizer, _impl = wrapped()
    for _ in range(10):
        model.train()
        step(model, optimizer, float(rank))
        model.eval()
        with torch.no_grad():
            model(1.0)
        model(1.0)
    rounds_pass(model)
    assert same_bits(*rest(model))
    assert model.bagua_ddp.bagua_train_step_counter == 10
    bagua.barrier()


def an_overflow_on_one_rank_skips_its_step_alone(rank: int) -> None:
    model, optimizer, impl = wrapped(interval=NEVER)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for number in range(4):
        optimizer.zero_grad()
        overflow = number == 1 and rank == 0
        scaler.scale(model(float("inf") if overflow else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert all(torch.isfinite(part).all() for part in values(model))
    assert torch.equal(values(model)[0], Slopes().weight0 - 2**-6 * (3 if rank == 0 else 4))
    impl.synchronize(model)
    assert same_bits(*values(model))


def an_execution_of_the_operation_alone_is_one_round(rank: int) -> None:
    size = bagua.get_world_size()
    for flatten in (True, False):
        name = f"alone {flatten}"
        tensors = [torch.full((count,), float(rank + 1)).ensure_bagua_tensor(f"part {count}", name) for count in (3, 5)]
        bucket = BaguaBucket(tensors, name, flatten)
        operation = bucket.append_asynchronous_model_average_op()
        assert operation is bucket._async_op
        backend = get_backend(name)
        backend.register_ordered_buckets([bucket])

        def execute(backend: Any = backend, tensors: Any = tensors) -> None:
            for tensor in tensors:
                backend.mark_communication_ready(tensor)
            backend.wait_pending_comm_ops()

        execute()
        mean = sum(range(1, size + 1)) / size
        assert all(bool((tensor == mean).all()) for tensor in tensors)
        assert operation.get_status() == "running"
        if rank == 0:
            operation.abort()
            assert operation.get_status() == "stopped"
        for tensor in tensors:
            tensor.fill_(6.0 * rank)
        execute()
        left = 6.0 * sum(range(1, size)) / (size - 1)
        assert all(bool((tensor == (left if rank else 0.0)).all()) for tensor in tensors)
        if rank == 0:
            operation.reset()
        operation.lock_weight()
        operation.unlock_weight()
        with pytest.raises(RuntimeError):
            operation.unlock_weight()
        execute()
        expected = torch.tensor(left * (size - 1) / size)
        assert all(torch.allclose(tensor, expected) for tensor in tensors)
        with pytest.raises(ValueError, match="must be 'all', not 'ring'"):
            bucket.append_asynchronous_model_average_op("ring")
        bucket.clear_ops()
        assert bucket._async_op is None


class Net(torch.nn.Module):
    """The network of the original's test."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = torch.nn.Linear(2, 10, bias=False)
        self.fc2 = torch.nn.Linear(10, 50, bias=True)
        self.fc3 = torch.nn.Linear(50, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.softmax(self.fc3(torch.relu(self.fc2(torch.relu(self.fc1(x))))), dim=1)


@pytest.mark.slow
def the_originals_training_ends_with_equal_weights_that_learned(rank: int) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model.with_bagua([optimizer], AsyncModelAverageAlgorithm(sync_interval_ms=20, warmup_steps=0))
    target = torch.nn.functional.one_hot(torch.arange(4) % 4, 4).float()
    samples = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    losses = []
    for _ in range(100):
        for _ in range(10):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(samples), target)
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    model.bagua_algorithm.abort(model)
    bagua.barrier()
    model.bagua_algorithm.resume(model)
    assert same_bits(*rest(model))
    assert losses[-1] < losses[0] / 2
    model.bagua_algorithm.abort(model)


def the_originals_aborts_and_resumes_end(rank: int) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model.with_bagua([optimizer], AsyncModelAverageAlgorithm(sync_interval_ms=20, warmup_steps=10))
    impl = model.bagua_algorithm
    for _ in range(5):
        impl.resume(model)
        for _ in range(10):
            optimizer.zero_grad()
            model(torch.randn(4, 2)).square().sum().backward()
            optimizer.step()
        impl.abort(model)
    impl.resume(model)
    impl.abort(model)
    impl.abort(model)
    impl.resume(model)
    impl.resume(model)
    bagua.barrier()
    assert same_bits(*rest(model))


def weights_are_loaded_while_this_rank_is_out_of_the_rounds(rank: int) -> None:
    model, _, impl = wrapped(interval=NEVER)
    loaded = {name: torch.full_like(value, 7.0) for name, value in model.state_dict().items()}
    before = values(model)
    outer = torch.nn.Sequential(model)
    of_outer = {f"0.{name}": value for name, value in loaded.items()}
    for load, state in ((model.load_state_dict, loaded), (outer.load_state_dict, of_outer)):
        with pytest.raises(BaguaError, match=r"while async averages its weights .*abort"):
            load(state)
        with impl.lock(model), pytest.raises(BaguaError, match="while async averages its weights"):
            load(state)
    assert all(torch.equal(a, b) for a, b in zip(before, values(model), strict=True))
    impl.abort(model)
    bagua.barrier()
    model.load_state_dict(loaded)
    copy.deepcopy(model).load_state_dict(loaded)
    pickle.loads(pickle.dumps(model)).load_state_dict(loaded)
    bagua.barrier()
    impl.resume(model)
    impl.synchronize(model)
    assert all_are(model, 7.0)
    impl.abort(model)
    # Gradients travel in the warm-up.
    model, _, _ = wrapped(warmup_steps=1)
    model.load_state_dict(loaded)
    bagua.unwrap(model).load_state_dict(loaded)


CASES = cases_in(globals())

test = each_case(CASES, *LAYOUTS)


def ends_while_it_is_averaged(rank: int, destroys: bool) -> int:
    torch.set_num_threads(1)
    bagua.init_process_group()
    model, optimizer, _ = wrapped()
    step(model, optimizer, 1.0)
    rounds_pass(model)
    bagua.barrier()
    if destroys:
        bagua.destroy_process_group()
        # It trains alone.
        step(model, optimizer, 1.0)
    return rank


@pytest.mark.parametrize("destroys", [False, True])
def test_a_process_ends_while_its_weights_are_averaged(destroys: bool) -> None:
    assert make_world(3).run(ends_while_it_is_averaged, destroys) == [0, 1, 2]
