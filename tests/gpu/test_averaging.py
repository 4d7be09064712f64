"""Asynchronous averaging of weights on a GPU: no progress of the training is lost, and buckets become the average."""

from __future__ import annotations

import torch
from torch import nn

import bagua.torch_api as api
from bagua.torch_api import algorithms
from bagua.torch_api.bucket import BaguaBucket
from bagua.torch_api.communication import get_backend
from tests.cuda.driver import until
from tests.cuda.ranks import on_ranks
from tests.gpu.torch_ranks import in_torch


class Slopes(nn.Module):
    """A model that is linear in its weights, so that every step has the same direction for any weights."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.arange(4099, dtype=torch.float32))
        self.two = nn.Parameter(torch.arange(5, dtype=torch.float64))
        self.three = nn.Parameter(torch.arange(5, dtype=torch.bfloat16))

    def forward(self, slope: float) -> torch.Tensor:
        return (self.one * slope).sum() + (self.two * slope).sum() + (self.three * slope).sum()


@on_ranks(2, in_torch)
def test_steps_beside_rounds_of_averaging_lose_no_progress(rank: int) -> None:
    """Halves and whole numbers are exact (in bfloat16 below 128), so the weights show every step."""
    size, steps = api.get_world_size(), 40
    model = Slopes().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.with_bagua([optimizer], algorithms.AsyncModelAverageAlgorithm(sync_interval_ms=2))
    impl, other = model.bagua_algorithm, torch.cuda.Stream()
    for number in range(steps):
        # Only the lock orders the stream of every fourth step with the stream of the others.
        with torch.cuda.stream(other if number % 4 == 3 else torch.cuda.current_stream()):
            optimizer.zero_grad()
            model(float(rank + 1)).backward()
            optimizer.step()
    until(lambda: impl.stats()["rounds"] > 2, "rounds")
    impl.synchronize(model)
    progress = steps * sum(range(1, size + 1)) / size
    with impl.lock(model):
        for mine, first in zip(model.parameters(), Slopes().parameters(), strict=True):
            assert (mine.detach().cpu() == first.detach() - progress).all()
    impl.abort(model)
    # Nothing else writes now, so no lock is needed.
    model.one.data.fill_(rank + 7.0)
    api.barrier()
    impl.resume(model)
    # A status from before the call of `resume` may be in flight.
    rounds = impl.stats()["rounds"]
    until(lambda: impl.stats()["rounds"] > rounds + 1, "rounds of all")
    api.barrier()
    impl.synchronize(model)
    assert model.one.unique().tolist() == [(2 * 7.0 + size - 1) / 2]
    model.bagua_ddp.close()


@on_ranks(2, in_torch)
def test_a_bucket_of_torch_becomes_the_average(rank: int) -> None:
    tensor = torch.full((9,), float(rank + 1), device="cuda").ensure_bagua_tensor("x", "alone")
    bucket = BaguaBucket([tensor], "alone", True)
    operation = bucket.append_asynchronous_model_average_op()
    backend = get_backend("alone")
    backend.register_ordered_buckets([bucket])
    for step in range(2):
        operation.lock_weight()
        tensor.fill_(float(rank + step))
        operation.unlock_weight()
        backend.mark_communication_ready(tensor)
        backend.wait_pending_comm_ops()
        assert tensor.unique().tolist() == [sum(range(api.get_world_size())) / api.get_world_size() + step]
