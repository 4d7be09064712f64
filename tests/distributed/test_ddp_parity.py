"""The wrapper trains bit for bit as torch's DistributedDataParallel on gloo, with two ranks.

The points are those of docs/ddp_parity.md.
"""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as Torchs
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from bagua.torch_api.data_parallel import DistributedDataParallel
from tests.distributed.left_out import needs_torch
from tests.distributed.parity_ranks import Found, Net, agree, as_torch, trained
from tests.distributed.torch_ranks import Case, cases_in, check

pytestmark = pytest.mark.slow

SGD = torch.optim.SGD


def branching() -> nn.Module:
    return Net(branches=True)


# --- 1, 2, 8: the beginning, averages, buffers ------------------------------------------------------------------------


class Buffered(nn.Module):
    """Its buffers differ between ranks at first, and one is a new tensor in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.randn(8))
        self.register_buffer("seen", torch.randint(0, 100, (3,)))
        self.register_buffer("flag", torch.rand(2) > 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.layer(x))
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.seen += len(x)
        found: torch.Tensor = x + self.mean
        return found


def all_ranks_begin_as_rank_0(rank: int) -> None:
    as_torch(rank)
    as_torch(rank, make=Buffered)
    if "forward_sync_buffers" in inspect.signature(Torchs.__init__).parameters:
        as_torch(rank, make=Buffered, forward_sync_buffers=False)


@needs_torch((2, 7), "its wrapper has no init_sync")
def init_sync_false_keeps_what_each_rank_has(rank: int) -> None:
    as_torch(rank, make=Buffered, init_sync=False)


def no_broadcast_of_buffers(rank: int) -> None:
    as_torch(rank, broadcast_buffers=False)


def the_mean_of_the_means_of_uneven_batches(rank: int) -> None:
    as_torch(rank, samples=lambda: torch.randn(4 + 3 * rank, 8))


@needs_torch((2, 15), "its wrapper refuses that")
def two_forwards_before_one_backward(rank: int) -> None:
    def step(model: Any, optimizer: Any, loss: Any, number: int) -> None:
        optimizer.zero_grad()
        (loss() + loss()).backward()
        optimizer.step()

    as_torch(rank, step=step)


def evaluation_between_steps(rank: int) -> None:
    def step(model: Any, optimizer: Any, loss: Any, number: int) -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
        if number < 3:
            model.eval()
            with torch.no_grad():
                loss()
            model.train()

    as_torch(rank, step=step)


def training_in_evaluation_mode(rank: int) -> None:
    as_torch(rank, prepare=lambda model: model.eval())


# --- 3: no_sync -------------------------------------------------------------------------------------------------------


def accumulated(model: Any, optimizer: Any, loss: Any, number: int) -> None:
    if number % 2 == 0:
        with model.no_sync():
            loss().backward()
        return
    loss().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()


def no_sync_with_clipping(rank: int) -> None:
    for views in (True, False):
        as_torch(rank, step=accumulated, gradient_as_bucket_view=views)


def what_was_used_under_no_sync_counts(rank: int) -> None:
    as_torch(rank, step=accumulated, make=branching, find_unused_parameters=True)


def no_sync_around_the_forward_decides(rank: int) -> None:
    def step(model: Any, optimizer: Any, loss: Any, number: int) -> None:
        made = loss()
        with model.no_sync():
            made.backward()
            made = loss()
        made.backward()
        optimizer.step()
        optimizer.zero_grad()

    as_torch(rank, step=step, optimizer=SGD)


# --- 4, 5: unused parameters, static graphs ---------------------------------------------------------------------------


def unused_parameters(rank: int) -> None:
    for views in (True, False):
        as_torch(rank, make=branching, find_unused_parameters=True, gradient_as_bucket_view=views)
    as_torch(rank, make=branching, find_unused_parameters=True, optimizer=SGD, bucket_cap_mb=0.0001)


class Structured(nn.Module):
    """Returns tensors of which the loss takes some."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.third = nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"used": self.one(x), "rest": (self.other(x), self.third(x))}


def outputs_of_which_the_loss_takes_some(rank: int) -> None:
    def both(wrapper: Any) -> Found:
        torch.manual_seed(rank)
        model = wrapper(Structured(), find_unused_parameters=True)
        optimizer = SGD(model.parameters(), lr=0.1)
        for number in range(3):
            optimizer.zero_grad()
            out = model(torch.randn(3, 8))
            (out["used"] if number % 2 else out["rest"][0]).sum().backward()
            optimizer.step()
        return {name: param.grad for name, param in model.named_parameters()} | dict(model.state_dict())

    agree(both(DistributedDataParallel), both(Torchs))


class Checkpointed(nn.Module):
    """One layer in two re-entrant checkpoints, and one that is used elsewhere."""

    def __init__(self, reentrant: bool, twice: bool) -> None:
        super().__init__()
        self.first, self.layer, self.unused = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(3, 3)
        self.reentrant, self.twice = reentrant, twice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.layer, self.first(x), use_reentrant=self.reentrant)
        if self.twice:
            x = checkpoint(self.layer, x, use_reentrant=self.reentrant)
        return x


def static_graphs(rank: int) -> None:
    as_torch(rank, static_graph=True, bucket_cap_mb=0.001)
    for reentrant in (True, False):
        as_torch(rank, make=lambda reentrant=reentrant: Checkpointed(reentrant, True), static_graph=True, optimizer=SGD)
    as_torch(rank, make=lambda: Checkpointed(False, False), find_unused_parameters=True)


# --- 6, 7, 11, 12: buckets, views, ignored and tied parameters --------------------------------------------------------


def sgd_and_adam_with_any_buckets(rank: int) -> None:
    as_torch(rank, optimizer=SGD, bucket_cap_mb=0.001)
    as_torch(rank, bucket_cap_mb=0.00001, gradient_as_bucket_view=False)


class Mixed(nn.Module):
    """Parameters of several dtypes, of no dimension and of no element."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(8, 8).double()
        self.narrow = nn.Linear(8, 8).bfloat16()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.none = nn.Parameter(torch.ones(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        narrow = self.narrow(x.bfloat16()).float()
        return self.scale * (self.wide(x.double()).float() + narrow) + self.none.sum()


def mixed_dtypes_and_sizes(rank: int) -> None:
    as_torch(rank, make=Mixed)
    as_torch(rank, make=lambda: Net().double(), samples=lambda: torch.randn(6, 8, dtype=torch.float64))
    # Without the gradients near zero that a normalisation makes: torch halves them first, and loses subnormal bits.
    as_torch(rank, make=lambda: nn.Linear(8, 8).half(), samples=lambda: torch.randn(6, 8).half(), optimizer=SGD)


class Complex(nn.Module):
    """A complex weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 4, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex64) @ self.weight).abs()


@needs_torch((2, 11), "its gloo adds no complex numbers")
def complex_weights(rank: int) -> None:
    as_torch(rank, make=Complex, optimizer=SGD)


def channels_last(rank: int) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).to(memory_format=torch.channels_last)

    def samples() -> torch.Tensor:
        return torch.randn(2, 2, 8, 8).to(memory_format=torch.channels_last)

    as_torch(rank, make=make, samples=samples)
    as_torch(rank, make=make, samples=samples, gradient_as_bucket_view=False)


def sparse_gradients(rank: int) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Linear(4, 2))

    as_torch(rank, make=make, samples=lambda: torch.randint(0, 20, (5,)), optimizer=SGD, gradient_as_bucket_view=False)


def zero_grad_keeps_the_gradients(rank: int) -> None:
    def step(model: Any, optimizer: Any, loss: Any, number: int) -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    for views in (True, False):
        as_torch(rank, step=step, gradient_as_bucket_view=views)


def a_gradient_that_the_user_sets_counts(rank: int) -> None:
    def step(model: Any, optimizer: Any, loss: Any, number: int) -> None:
        for param in model.parameters():
            param.grad = torch.full_like(param, 0.1 + rank + number)
        loss().backward()
        optimizer.step()

    for views in (True, False):
        as_torch(rank, step=step, optimizer=SGD, gradient_as_bucket_view=views)
        as_torch(rank, step=step, make=branching, find_unused_parameters=True, gradient_as_bucket_view=views)


def ignored_and_frozen_parameters(rank: int) -> None:
    def make() -> nn.Module:
        net = Net()
        net._ddp_params_and_buffers_to_ignore = ["one.weight", "body.1.running_mean"]
        net.other.requires_grad_(False)
        return net

    as_torch(rank, make=make)


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.other.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(torch.relu(self.one(x)))


def tied_weights(rank: int) -> None:
    as_torch(rank, make=Tied)


# --- 9: uneven inputs -------------------------------------------------------------------------------------------------


def join_with_uneven_inputs(rank: int) -> None:
    as_torch(rank, uneven={})
    as_torch(rank, uneven={"divide_by_initial_world_size": False}, gradient_as_bucket_view=False)
    as_torch(rank, uneven={"enable": False}, steps=3 - rank)


def join_with_unused_parameters_and_no_sync(rank: int) -> None:
    # Not the gradients: of what no rank used, torch's are zeros when a rank without inputs had used it last.
    unused = {"make": branching, "find_unused_parameters": True, "optimizer": SGD, "with_grads": False}
    as_torch(rank, uneven={}, **unused, bucket_cap_mb=0.001)
    as_torch(rank, uneven={}, step=accumulated)


def join_without_broadcast_of_buffers(rank: int) -> None:
    as_torch(rank, uneven={}, broadcast_buffers=False)


def join_ends_early(rank: int) -> None:
    for wrapper in (Torchs, DistributedDataParallel):
        with pytest.raises(RuntimeError, match="exhausted"):
            trained(wrapper, rank, uneven={"throw_on_early_termination": True})


def join_with_a_zero_redundancy_optimizer(rank: int) -> None:
    def both(wrapper: Any) -> Found:
        torch.manual_seed(rank)
        model = wrapper(Net())
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
        with Join([model, optimizer]):
            for _ in range(3 + rank):
                optimizer.zero_grad()
                model(torch.randn(6, 8)).square().mean().backward()
                optimizer.step()
        return dict(model.state_dict())

    agree(both(DistributedDataParallel), both(Torchs))


# --- 10: hooks --------------------------------------------------------------------------------------------------------


def registered(state: Callable[[], Any], hook: Any) -> Callable[[Any], None]:
    return lambda model: model.register_comm_hook(state(), hook)


def nothing() -> None:
    return None


def then(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0].mul_(0.25))


def hooks_of_torch(rank: int) -> None:
    for hook in (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook):
        as_torch(rank, prepare=registered(nothing, hook), bucket_cap_mb=0.001)
    as_torch(rank, prepare=registered(nothing, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)))


def bf16_hook(rank: int) -> None:
    # Elsewhere torch refuses it.
    if torch.version.cuda is not None and dist.is_nccl_available():
        as_torch(rank, prepare=registered(nothing, default_hooks.bf16_compress_hook))


def power_sgd_state() -> Any:
    return powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5)


def power_sgd_hook(rank: int) -> None:
    register = registered(power_sgd_state, powerSGD_hook.powerSGD_hook)
    # One bucket: the continuations of several would start operations between those of the backward, in any order.
    as_torch(rank, prepare=register)
    as_torch(rank, prepare=register, gradient_as_bucket_view=False)


def a_hook_with_then(rank: int) -> None:
    as_torch(rank, prepare=registered(nothing, then), bucket_cap_mb=0.001)


def hooks_with_everything_else(rank: int) -> None:
    fp16 = registered(nothing, default_hooks.fp16_compress_hook)
    as_torch(rank, prepare=fp16, step=accumulated)
    as_torch(rank, prepare=fp16, make=branching, find_unused_parameters=True)
    as_torch(rank, prepare=fp16, uneven={}, bucket_cap_mb=0.001)


# --- 14 to 18 ---------------------------------------------------------------------------------------------------------


def mixed_precision_with_an_overflow_on_one_rank(rank: int) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(model: Any, optimizer: Any, loss: Any, number: int) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            made = loss() * (float("inf") if (number, rank) == (1, 1) else 1.0)
        scaler.scale(made).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()

    as_torch(rank, step=step)


def nan_stays_nan(rank: int) -> None:
    def step(model: Any, optimizer: Any, loss: Any, number: int) -> None:
        (loss() * (float("nan") if rank else 1.0)).backward()

    found = trained(DistributedDataParallel, rank, step=step, steps=1)
    assert all(grad.isnan().all() for name, grad in found.items() if name.startswith("grad of module.one"))


def a_gradient_penalty(rank: int) -> None:
    def both(wrapper: Any) -> Found:
        torch.manual_seed(rank)
        model = wrapper(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)))
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            x = torch.randn(4, 8, requires_grad=True)
            out = model(x).sum()
            (slope,) = torch.autograd.grad(out, x, create_graph=True)
            (out + slope.square().sum()).backward()
            optimizer.step()
        return dict(model.state_dict())

    agree(both(DistributedDataParallel), both(Torchs))


def workers_of_a_data_loader(rank: int) -> None:
    def both(wrapper: Any) -> Found:
        torch.manual_seed(3)
        data = TensorDataset(torch.randn(12, 8))
        loader = DataLoader(data, 4, num_workers=1, multiprocessing_context="fork")
        model = wrapper(Net())
        optimizer = SGD(model.parameters(), lr=0.1)
        for (x,) in loader:
            optimizer.zero_grad()
            model(x + rank).square().mean().backward()
            optimizer.step()
        return dict(model.state_dict())

    agree(both(DistributedDataParallel), both(Torchs))


def two_models_in_turn(rank: int) -> None:
    def both(wrapper: Any) -> Found:
        torch.manual_seed(rank)
        maker, judge = wrapper(nn.Linear(4, 8)), wrapper(Net())
        optimizers = [torch.optim.Adam(model.parameters()) for model in (maker, judge)]
        for number in range(4):
            made = maker(torch.randn(5, 4))
            if number % 2:
                judge(made.detach()).mean().backward()
                optimizers[1].step()
            else:
                judge(made).square().mean().backward()
                optimizers[0].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        return {f"maker.{k}": v for k, v in maker.state_dict().items()} | dict(judge.state_dict())

    agree(both(DistributedDataParallel), both(Torchs))


CASES = cases_in(globals())


def test_every_test_in_the_table_of_the_documents_exists() -> None:
    folder = Path(__file__).parent
    rows = [
        line for line in (folder.parents[1] / "docs" / "ddp_parity.md").read_text().splitlines() if line[:3] != "|--"
    ]
    named = {name for row in rows if row.startswith("|") for name in re.findall(r"`(\w+_\w+)`", row.split("|")[-2])}
    sources = [(folder / f"test_ddp_{which}.py").read_text() for which in ("parity", "wrapper", "jobs")]
    defined = {name for source in sources for name in re.findall(r"^def (\w+)", source, re.MULTILINE)}
    assert len(rows) > 22
    assert named - defined == set()
    assert {case.__name__ for case in CASES} - named == set()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_the_wrapper_is_bitwise_torchs_on_gloo(case: Case) -> None:
    check(case, 2)
