"""Trains one small model by five methods of aggregation, and shows how much each sends.

    torchrun --nproc-per-node 2 examples/aggregation.py

Every rank has its own data. The last line says that the replicas of the centralised methods are bitwise equal.
"""

import sys

import torch

import bagua
import bagua.torch_api
from bagua.aggregation import AllReduceAggregation, PowerAggregation, SparsifiedAggregation
from bagua.aggregation.optim import CentralizedSGD, DecentralizedSGD

STEPS = 60


def make_model() -> torch.nn.Module:
    """Returns a model with the same weights on every rank."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 20))


def sent() -> int:
    """Returns the number of bytes of tensors that this rank has passed to collectives so far."""
    groups = bagua.stats()["groups"].values()
    return sum(counts["payload_bytes"] for group in groups for counts in group["ops"].values())


def loss_of(model: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
    """Returns the distance of the model from a fixed linear map, on this rank's data of this step."""
    target = torch.randn(20, 20, generator=torch.Generator().manual_seed(7)) / 5
    x = torch.randn(32, 20, generator=torch.Generator().manual_seed(1000 * rank + step))
    return torch.nn.functional.mse_loss(model(x), x @ target)


def main() -> None:
    """Runs one rank."""
    bagua.torch_api.init_process_group()
    rank, size = bagua.torch_api.get_rank(), bagua.torch_api.get_world_size()
    neighbors = sorted({(rank - 1) % size, (rank + 1) % size} - {rank})
    equal = True
    for method in ("all-reduce", "low rank", "sparsified", "CentralizedSGD", "DecentralizedSGD"):
        model = make_model()
        optimizer: torch.optim.Optimizer | CentralizedSGD = torch.optim.SGD(model.parameters(), lr=0.5)
        aggregate = None
        if method == "all-reduce":
            aggregate = AllReduceAggregation(size).agg_grad()
        elif method == "low rank":
            aggregate = PowerAggregation(model, reuse_query=True, rank=2).agg_grad()
        elif method == "sparsified":
            aggregate = SparsifiedAggregation(model, k=0.05).agg_grad()
        elif method == "CentralizedSGD":
            optimizer = CentralizedSGD(size, model, lr=0.5)
        else:
            optimizer = DecentralizedSGD(rank, neighbors, model, lr=0.5)
        before = sent()
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, step, rank).backward()
            if aggregate is not None:
                aggregate(model, "avg_world")
            optimizer.step()
        cost = (sent() - before) / STEPS
        with torch.no_grad():
            loss = float(loss_of(model, STEPS, 0))
        if method != "DecentralizedSGD":
            mine = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
            first = mine.clone()
            bagua.torch_api.broadcast(first, 0)
            equal = equal and torch.equal(mine, first)
        if rank == 0:
            print(f"{method:17} {cost:8.0f} bytes a step, loss {loss:.4f}")
    if not equal:
        sys.exit(f"rank {rank}: replicas differ")
    if rank == 0:
        print("replicas are equal")
    bagua.torch_api.destroy_process_group()


if __name__ == "__main__":
    main()
