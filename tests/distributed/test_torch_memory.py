"""Changes that torch or a user may make to the memory of gradients and weights, with every algorithm. The training must
continue as if nothing had changed, or an error must name the parameter.

A cell of the table is an algorithm and something that is done after the backward, twice: before a step that gets its
gradients accumulated into the old ones, and before one that gets new ones. With gradient_allreduce the outcome is
compared with that of torch's DistributedDataParallel to which the same is done, with the others with the same training
without it. Weights are bitwise equal on all ranks where the algorithm has them so, and within rounding those of the
other training: the sums in torch's own operations depend on strides and alignment, and a lossy codec makes more of it.

What cannot be followed is done between two steps.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Torchs

import bagua.torch_api as bagua
from bagua.errors import BaguaError
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.algorithms.q_adam import QAdamAlgorithm, QAdamOptimizer
from bagua.torch_api.data_parallel import DistributedDataParallel
from tests.distributed.torch_ranks import Case, each_case, same_everywhere

pytestmark = pytest.mark.slow

RANKS = 2
STEPS = 5
#: See `Setup.tolerance`: with a codec.
LOSSY = 1e-3
#: Steps after whose backward something is done.
TIMES = (1, 3)
#: Steps whose gradients are accumulated into those of the last one, which are zero then.
IN_PLACE = (2,)

Weights = list[torch.Tensor]


class Net(nn.Module):
    """Parameters of one to four dimensions, a square matrix among them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 2)
        self.square = nn.Linear(16, 16)
        self.out = nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.square(self.conv(x).flatten(1)).tanh())


# --- algorithms -------------------------------------------------------------------------------------------------------


@dataclass
class Setup:
    """How a model is wrapped."""

    name: str
    wrap: Callable[[Any, torch.optim.Optimizer], Any]
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda params: torch.optim.SGD(params, lr=0.1)
    #: Its ranks have equal weights after each step.
    is_equal: bool = True
    #: It computes what torch's DistributedDataParallel does.
    is_as_torch: bool = False
    #: By how much weights may differ from those of another training: far less than a step without communication does.
    tolerance: float = 1e-5


def with_algorithm(name: str, flatten: bool, **options: Any) -> Callable[[Any, torch.optim.Optimizer], Any]:
    def wrap(model: Any, optimizer: torch.optim.Optimizer) -> Any:
        return model.with_bagua([optimizer], Algorithm.init(name, **options), do_flatten=flatten)

    return wrap


def with_qadam(flatten: bool) -> Callable[[Any, torch.optim.Optimizer], Any]:
    def wrap(model: Any, optimizer: Any) -> Any:
        return model.with_bagua([optimizer], QAdamAlgorithm(optimizer, hierarchical=False), do_flatten=flatten)

    return wrap


def qadam(warmup_steps: int) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda params: QAdamOptimizer(params, lr=0.01, warmup_steps=warmup_steps)


def setups() -> list[Setup]:
    found = []
    for flatten in (True, False):
        end = "" if flatten else "_not_flattened"
        peers = {"hierarchical": False}
        found += [
            Setup(f"gradient_allreduce{end}", with_algorithm("gradient_allreduce", flatten), is_as_torch=True),
            Setup(
                f"wrapper{end}",
                lambda model, _, flatten=flatten: DistributedDataParallel(model, gradient_as_bucket_view=flatten),
                is_as_torch=True,
            ),
            Setup(f"bytegrad{end}", with_algorithm("bytegrad", flatten, **peers), tolerance=LOSSY),
            Setup(f"powersgd{end}", with_algorithm("powersgd", flatten, rank=2)),
            Setup(f"qadam_warming{end}", with_qadam(flatten), qadam(100)),
            Setup(f"qadam{end}", with_qadam(flatten), qadam(1), tolerance=LOSSY),
            Setup(
                f"decentralized{end}",
                with_algorithm("decentralized", flatten, **peers),
                is_equal=False,
            ),
            Setup(
                f"low_precision_decentralized{end}",
                with_algorithm("low_precision_decentralized", flatten, **peers),
                is_equal=False,
                tolerance=LOSSY,
            ),
            Setup(
                f"local_sgd{end}",
                with_algorithm("local_sgd", flatten, communication_interval=1),
            ),
        ]
    # No rounds but the last one, which is this test's: what others find is a matter of time.
    found.append(Setup("async", with_algorithm("async", True, sync_interval_ms=1e9)))
    return found


# --- what is done -----------------------------------------------------------------------------------------------------


@dataclass
class Change:
    """A change of a model's memory, and its expected effect."""

    name: str
    act: Callable[[Any], None]
    #: What does the same without a change of memory.
    instead: Callable[[Any], None] = lambda model: None
    #: Of the error of the next training forward.
    error: str | None = None
    #: torch's DistributedDataParallel refuses it, or its ranks have other weights afterwards (torch 2.15: they differ).
    not_in_torch: bool = False
    #: Done after the optimizer's step instead of before.
    between_steps: bool = False


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [param.grad for param in model.parameters() if param.grad is not None]


def each_gradient(change: Callable[[torch.Tensor], object]) -> Callable[[Any], None]:
    def act(model: nn.Module) -> None:
        for param in model.parameters():
            if param.grad is not None:
                change(param.grad)

    return act


def each_parameter(change: Callable[[nn.Parameter], object]) -> Callable[[Any], None]:
    def act(model: nn.Module) -> None:
        with torch.no_grad():
            for param in model.parameters():
                change(param)

    return act


def on_rank_0(act: Callable[[Any], None]) -> Callable[[Any], None]:
    def act_there(model: nn.Module) -> None:
        if bagua.get_rank() == 0:
            act(model)

    return act_there


def data_of_gradients(model: nn.Module) -> None:
    for grad in gradients(model):
        grad.data = grad.data.clamp(-0.01, 0.01)


def clamped_gradients(model: nn.Module) -> None:
    for grad in gradients(model):
        grad.clamp_(-0.01, 0.01)


def other_gradients(model: nn.Module) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad = param.grad.clone()


def transposed(grad: torch.Tensor) -> torch.Tensor:
    """The same values with other strides."""
    return grad.transpose(0, -1).contiguous().transpose(0, -1)


def transposed_gradients(model: nn.Module) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad = transposed(param.grad)


def with_a_gap(grad: torch.Tensor) -> None:
    room = torch.zeros(*grad.shape, 2)
    room[..., 0] = grad
    grad.data = room[..., 0]


def negated_twice(grad: torch.Tensor) -> None:
    grad.data = torch._neg_view(-grad.data)


def views_of_one_flat_tensor(model: nn.Module) -> None:
    """Makes all parameters views of one flat tensor, as FSDP and fused optimizers do."""
    flat = torch.cat([param.detach().flatten() for param in model.parameters()])
    offset = 0
    for param in model.parameters():
        param.data = flat[offset : offset + param.numel()].view(param.shape)
        offset += param.numel()


def channels_last(model: nn.Module) -> None:
    model.to(memory_format=torch.channels_last)


def at_rest(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Inside, the weights are not averaged beside the training, as a load demands."""
    engine = getattr(model, "bagua_ddp", None)
    return contextlib.nullcontext() if engine is None else engine.policy.pause()


def reload(model: nn.Module) -> None:
    with at_rest(model):
        model.load_state_dict(copy.deepcopy(model.state_dict()))


def reload_with_assign(model: nn.Module) -> None:
    with at_rest(model):
        model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)


def copy_the_model(model: nn.Module) -> None:
    twin = copy.deepcopy(model)
    twin.share_memory()
    for param in twin.parameters():
        param.data.zero_()


def replace_a_parameter(model: Any) -> None:
    inner = getattr(model, "module", model)
    inner.out.weight = nn.Parameter(inner.out.weight.detach().clone())


def reshape_a_parameter(model: Any) -> None:
    inner = getattr(model, "module", model)
    inner.out.bias.grad = None
    inner.out.bias.data = torch.zeros(1)


CONVERTED = r"parameter '[a-z.]+' of model '.*' is torch\.\w+\[.*\] and was torch\.float32"

CHANGES = [
    Change("nothing", lambda model: None),
    # Gradients.
    Change("data_of_gradients", data_of_gradients, clamped_gradients),
    Change("other_gradients", other_gradients),
    Change("transposed_gradients", transposed_gradients),
    Change("gradients_with_gaps", each_gradient(with_a_gap)),
    Change("gradients_of_lazy_negations", each_gradient(negated_twice)),
    Change("shared_gradients_of_one_rank", on_rank_0(each_gradient(torch.Tensor.share_memory_))),
    # Weights, and both.
    Change("data_of_parameters", each_parameter(lambda p: setattr(p, "data", p.data.clone()))),
    Change("shared_model_of_one_rank", on_rank_0(lambda model: model.share_memory())),
    Change("views_of_one_flat_tensor", views_of_one_flat_tensor),
    Change("channels_last", channels_last, not_in_torch=True),
    Change("load_state_dict", reload),
    Change("copied_model", copy_the_model),
    # Errors of the next training forward.
    Change("load_state_dict_with_assign", reload_with_assign, error=r"'conv.weight'.* other Parameter objects"),
    Change("another_parameter", replace_a_parameter, error=r"\['out.weight'\] is another Parameter object"),
    Change("a_parameter_of_another_shape", reshape_a_parameter, error=r"'out.bias' of model .* is torch.float32\[1\]"),
    Change("double", lambda model: model.double(), error=CONVERTED),
]


# --- cells ------------------------------------------------------------------------------------------------------------


def train(setup: Setup, act: Callable[[Any], None], wrap: Callable[..., Any], between_steps: bool = False) -> Weights:
    """This rank's weights after some steps, in between which ``act`` is called with the model."""
    torch.manual_seed(0)
    model = Net()
    optimizer = setup.optimizer(model.parameters())
    wrapped = wrap(model, optimizer)
    for step in range(STEPS):
        torch.manual_seed(100 * step + bagua.get_rank())
        optimizer.zero_grad(set_to_none=step not in IN_PLACE)
        wrapped(torch.randn(3, 4, 3, 3)).square().mean().backward()
        if step in TIMES and not between_steps:
            act(model)
        optimizer.step()
        if step in TIMES and between_steps:
            act(model)
    if setup.name == "async":
        model.bagua_algorithm.synchronize(model)
    found = [param.detach().clone() for param in model.parameters()]
    bagua.unwrap(wrapped)
    return found


class Cell:
    """One algorithm and one change."""

    def __init__(self, setup: Setup, change: Change) -> None:
        self.__name__ = f"{setup.name}-{change.name}"
        self._setup, self._change = setup, change

    def __call__(self, rank: int) -> None:
        setup, change = self._setup, self._change
        with warnings.catch_warnings():
            # Of memory that async takes back from other processes: a test of its own.
            warnings.filterwarnings(
                "ignore", message=".*moved to memory that other processes share", category=RuntimeWarning
            )
            if change.error is not None:
                with pytest.raises(BaguaError, match=change.error):
                    train(setup, change.act, setup.wrap, between_steps=True)
                return
            found = train(setup, change.act, setup.wrap, change.between_steps)
            if setup.is_as_torch and not change.not_in_torch:
                expected = train(setup, change.act, lambda model, _: Torchs(model), change.between_steps)
            else:
                expected = train(setup, change.instead, setup.wrap, change.between_steps)
        off = max(float((one - other).abs().max()) for one, other in zip(found, expected, strict=True))
        agree = off <= setup.tolerance
        equal = same_everywhere(*found)
        assert equal or not setup.is_equal, "the ranks differ"
        # All ranks fail together: one that waited for the next case would time out.
        assert same_everywhere(torch.tensor(agree)), f"one rank's weights are others than they would be, by {off}"
        assert agree, f"the weights are others than they would be, by {off}"


CASES: list[Case] = [Cell(setup, change) for setup in setups() for change in CHANGES]


test = each_case(CASES, RANKS)
