"""Asynchronous averaging over a whole job: aborts and resumes, states, copies, buckets, scaled gradients, its end."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch

import bagua.torch_api as bagua
from bagua.errors import BaguaError
from bagua.torch_api.algorithms import GradientAllReduceAlgorithm
from bagua.torch_api.bucket import BaguaBucket
from bagua.torch_api.communication import get_backend
from tests.distributed.async_ranks import (
    LAYOUTS,
    NEVER,
    all_are,
    fill,
    rest,
    rounds_pass,
    same_bits,
    step,
    values,
    wrapped,
)
from tests.distributed.torch_ranks import cases_in, each_case
from tests.world import make_world


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
