"""The table of trainings: each row is a model, how it is trained, and the options that change how it communicates.

tests/distributed/front_ends.py has the columns.
"""

from __future__ import annotations

import contextlib
import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.data import DataLoader, TensorDataset

from tests.distributed.front_ends import FrontEnd, Optimizers, Training
from tests.distributed.left_out import older
from tests.distributed.training_models import (
    Branches,
    Buffered,
    Checkpointed,
    Complex,
    Mixed,
    Net,
    Odd,
    Structured,
    Tied,
    branching,
    in_channels_last,
    partly_ignored,
    table,
)

#: What a rank has in the end, by name: weights, buffers and gradients.
Found = dict[str, torch.Tensor | None]
Loss = Callable[[], torch.Tensor]
Step = Callable[[Training, Loss, int], None]

ALL_SIZES = (1, 2, 3, 4)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01)


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


def zero_redundancy(params: Any) -> Any:
    return ZeroRedundancyOptimizer(params, optimizer_class=torch.optim.Adam, lr=0.01)


def plain(training: Training, loss: Loss, number: int) -> None:
    training.optimizer.zero_grad()
    training.backward(loss())
    training.optimizer.step()


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[int], Iterator[torch.Tensor]]:
    """Samples without end."""

    def batches(rank: int) -> Iterator[torch.Tensor]:
        while True:
            yield torch.randn(*shape, dtype=dtype)

    return batches


SAMPLES = normal(6, 8)


@dataclass(frozen=True)
class Variant:
    """One training. `needs` are what a front end may lack beside the options."""

    options: Mapping[str, Any] = field(default_factory=dict)
    make: Callable[[], nn.Module] = Net
    step: Step = plain
    prepare: Callable[[Training], None] = lambda training: None
    optimizer: Optimizers = adam
    batches: Callable[[int], Iterator[torch.Tensor]] = SAMPLES
    steps: int = 4
    #: More steps on rank 1, in this context.
    joined: Callable[[Training], Any] | None = None
    with_grads: bool = True
    #: The text of the RuntimeError that is expected.
    raises: str = ""
    needs: frozenset[str] = frozenset()

    def needed(self) -> frozenset[str]:
        return self.needs | frozenset(self.options) | ({"join"} if self.joined is not None else set())

    def train(self, front_end: FrontEnd, rank: int) -> Found:
        """Weights, gradients and the buffers of an evaluation on this rank after all steps."""
        torch.manual_seed(5 + rank)
        module = self.make()
        training = front_end.begin(module, self.optimizer, self.options)
        self.prepare(training)
        takes_step = "branches" in vars(module)
        expected = pytest.raises(RuntimeError, match=self.raises) if self.raises else contextlib.nullcontext()
        with expected, contextlib.nullcontext() if self.joined is None else self.joined(training):
            steps = range(self.steps + (rank if self.joined is not None else 0))
            # A name of its own, because zip would take one batch too many.
            for number, x in zip(steps, self.batches(rank), strict=False):

                def loss(x: torch.Tensor = x, shift: int = number + rank) -> torch.Tensor:
                    made: torch.Tensor = training.model(x, shift) if takes_step else training.model(x)
                    return made.square().mean()

                self.step(training, loss, number)
        if not self.raises and isinstance(training.model, TorchDDP) and training.model.will_sync_module_buffers():
            # As a forward in evaluation, for which Bagua's front ends communicate nothing.
            training.model._sync_buffers()
        found: Found = {
            name: tensor.detach().clone()
            for name, tensor in module.state_dict().items()
            if front_end.has_buffers or name in dict(module.named_parameters())
        }
        if self.with_grads:
            found |= {
                f"grad of {name}": None if param.grad is None else param.grad.detach()
                for name, param in module.named_parameters()
            }
        return found


@dataclass(frozen=True)
class Row:
    """Trainings that show one thing. With another number of ranks than two, gloo adds in another order."""

    variants: tuple[Variant, ...]
    sizes: tuple[int, ...] = (2,)
    slow: bool = False
    left_out: str = ""

    def of(self, front_end: FrontEnd) -> dict[int, Variant]:
        """Returns the variants that the front end offers, by number."""
        return {at: each for at, each in enumerate(self.variants) if not front_end.why_not(each.needed())}


ROWS: dict[str, Row] = {}


def row(name: str, *variants: Variant, sizes: tuple[int, ...] = (2,), slow: bool = False, left_out: str = "") -> None:
    ROWS[name] = Row(variants, sizes, slow, left_out)


def each_view(**options: Any) -> tuple[Variant, ...]:
    """With gradients in the memory of buckets, and beside it."""
    more = options.pop("options", {})
    return tuple(Variant({**more, **view}, **options) for view in ({}, {"gradient_as_bucket_view": False}))


# --- the beginning, averages, buffers ---------------------------------------------------------------------------------


BUFFERS = frozenset({"buffers"})
_HAS_FORWARD_SYNC = "forward_sync_buffers" in inspect.signature(TorchDDP.__init__).parameters

row("all_ranks_begin_as_rank_0", Variant(), Variant(make=Buffered, needs=BUFFERS))
row(
    "no_broadcast_of_buffers_before_a_forward",
    Variant({"forward_sync_buffers": False}, make=Buffered, needs=BUFFERS),
    left_out="" if _HAS_FORWARD_SYNC else f"torch {torch.__version__}: its wrapper has no forward_sync_buffers",
)
row(
    "init_sync_false_keeps_what_each_rank_has",
    Variant({"init_sync": False}, make=Buffered, needs=BUFFERS),
    left_out=older((2, 7), "its wrapper has no init_sync"),
)
row("no_broadcast_of_buffers", Variant({"broadcast_buffers": False}))


def uneven_batches(rank: int) -> Iterator[torch.Tensor]:
    return normal(4 + 3 * rank, 8)(rank)


row(
    "the_mean_of_the_means_of_uneven_batches",
    Variant(batches=uneven_batches),
    Variant(batches=uneven_batches, optimizer=sgd),
)


def forward_twice(training: Training, loss: Loss, number: int) -> None:
    training.optimizer.zero_grad()
    training.backward(loss() + loss())
    training.optimizer.step()


row(
    "two_forwards_before_one_backward", Variant(step=forward_twice), left_out=older((2, 15), "its wrapper refuses that")
)


def evaluating(training: Training, loss: Loss, number: int) -> None:
    plain(training, loss, number)
    if number < 3:
        training.model.eval()
        with torch.no_grad():
            loss()
        training.model.train()


row("evaluation_between_steps", Variant(step=evaluating))
row("training_in_evaluation_mode", Variant(prepare=lambda training: training.model.eval()))

# --- no_sync ----------------------------------------------------------------------------------------------------------

NO_SYNC = frozenset({"no_sync"})


def accumulated(training: Training, loss: Loss, number: int) -> None:
    if number % 2 == 0:
        with training.no_sync():
            training.backward(loss())
        return
    training.backward(loss())
    nn.utils.clip_grad_norm_(training.module.parameters(), 0.1)
    training.optimizer.step()
    training.optimizer.zero_grad(set_to_none=number < 2)


def three_times(training: Training, loss: Loss, number: int) -> None:
    training.optimizer.zero_grad(set_to_none=bool(number % 2))
    for _ in range(2):
        with training.no_sync():
            training.backward(loss())
    training.backward(loss())
    training.optimizer.step()


def around_the_forward(training: Training, loss: Loss, number: int) -> None:
    made = loss()
    with training.no_sync():
        training.backward(made)
        made = loss()
    training.backward(made)
    training.optimizer.step()
    training.optimizer.zero_grad()


row(
    "no_sync_with_clipping",
    *each_view(step=accumulated, make=Tied, needs=NO_SYNC),
    *each_view(step=accumulated, needs=NO_SYNC),
)
row(
    "gradients_accumulate_under_no_sync",
    *each_view(step=three_times, make=Tied, optimizer=sgd, needs=NO_SYNC),
    sizes=ALL_SIZES,
)
row(
    "what_was_used_under_no_sync_counts",
    Variant({"find_unused_parameters": True}, step=accumulated, make=Branches, needs=NO_SYNC),
    Variant({"find_unused_parameters": True}, step=accumulated, make=branching, needs=NO_SYNC),
)
row(
    "no_sync_around_the_forward_decides",
    Variant(step=around_the_forward, make=Tied, optimizer=sgd, needs=NO_SYNC | {"forward decides"}),
    Variant(step=around_the_forward, optimizer=sgd, needs=NO_SYNC | {"forward decides"}),
)

# --- unused parameters, static graphs ---------------------------------------------------------------------------------

UNUSED = {"find_unused_parameters": True}
row(
    "unused_parameters",
    *each_view(options=UNUSED, make=branching),
    Variant({**UNUSED, "bucket_cap_mb": 0.0001}, make=branching, optimizer=sgd),
)


row("ranks_take_different_branches", *each_view(options=UNUSED, make=Branches, optimizer=sgd), sizes=ALL_SIZES)


def take_some(training: Training, loss: Loss, number: int) -> None:
    training.optimizer.zero_grad()
    out = training.model(torch.randn(3, 8))
    training.backward((out["used"] if number % 2 else out["rest"][0]).sum())
    training.optimizer.step()


row("outputs_of_which_the_loss_takes_some", Variant(UNUSED, make=Structured, step=take_some, optimizer=sgd))


row(
    "static_graphs",
    Variant({"static_graph": True, "bucket_cap_mb": 0.001}),
    Variant({"static_graph": True}, make=lambda: Checkpointed(True, True), optimizer=sgd),
    Variant({"static_graph": True}, make=lambda: Checkpointed(False, True), optimizer=sgd),
    Variant(UNUSED, make=lambda: Checkpointed(False, False)),
)

# --- buckets, views, ignored and tied parameters ----------------------------------------------------------------------


row(
    "sgd_and_adam_with_any_buckets",
    Variant({"bucket_cap_mb": 0.001}, optimizer=sgd),
    Variant({"bucket_cap_mb": 0.00001, "gradient_as_bucket_view": False}),
    Variant({"bucket_cap_mb": 0.001}),
)
row("one_parameter_at_the_root", *each_view(make=lambda: nn.Linear(8, 2), optimizer=sgd), sizes=ALL_SIZES)

DTYPES = frozenset({"dtypes"})
row(
    "mixed_dtypes_and_sizes",
    *each_view(make=Mixed),
    Variant(make=lambda: Net().double(), batches=normal(6, 8, dtype=torch.float64), needs=DTYPES),
    # Without the gradients near zero that a normalisation makes: torch halves them first, and loses subnormal bits.
    Variant(
        make=lambda: nn.Linear(8, 8).half(), batches=normal(6, 8, dtype=torch.float16), optimizer=sgd, needs=DTYPES
    ),
)
row("parameters_without_dimensions_or_elements", *each_view(make=Odd, optimizer=sgd), sizes=ALL_SIZES)
row(
    "complex_weights",
    *each_view(make=Complex, optimizer=momentum),
    *each_view(options={"bucket_cap_mb": 1 / 2**20}, make=lambda: Complex(torch.complex128), optimizer=sgd),
    sizes=ALL_SIZES,
    left_out=older((2, 11), "its gloo adds no complex numbers"),
)


def images(rank: int) -> Iterator[torch.Tensor]:
    for x in normal(2, 2, 8, 8)(rank):
        yield x.to(memory_format=torch.channels_last)


def numbers(rank: int) -> Iterator[torch.Tensor]:
    while True:
        yield torch.randint(0, 20, (5,))


def keeping_the_layout(training: Training, loss: Loss, number: int) -> None:
    plain(training, loss, number)
    assert all(param.grad.stride() == param.stride() for param in training.module.parameters())


row(
    "channels_last",
    *each_view(make=in_channels_last, batches=images, optimizer=sgd, step=keeping_the_layout),
    sizes=ALL_SIZES,
)
row("sparse_gradients", Variant({"gradient_as_bucket_view": False}, make=table, batches=numbers, optimizer=sgd))


def zeroing_last(training: Training, loss: Loss, number: int) -> None:
    training.backward(loss())
    training.optimizer.step()
    training.optimizer.zero_grad(set_to_none=False)


def with_gradients_set(training: Training, loss: Loss, number: int) -> None:
    for param in training.module.parameters():
        param.grad = torch.full_like(param, 0.1 + dist.get_rank() + number)
    training.backward(loss())
    training.optimizer.step()


SET = frozenset({"gradients of unused parameters"})

row("zero_grad_keeps_the_gradients", *each_view(step=zeroing_last))
row(
    "a_gradient_that_the_user_sets_counts",
    *each_view(step=with_gradients_set, optimizer=sgd),
    *each_view(options=UNUSED, step=with_gradients_set, optimizer=sgd, make=branching, needs=SET),
)


row("ignored_and_frozen_parameters", Variant(make=partly_ignored, needs=frozenset({"ignored"})))
row("tied_weights", Variant(make=Tied), Variant(make=Tied, optimizer=sgd))

# --- uneven inputs ----------------------------------------------------------------------------------------------------


def join(**options: Any) -> Callable[[Training], Any]:
    return lambda training: training.model.join(**options)


row(
    "join_with_uneven_inputs",
    Variant(joined=join()),
    Variant({"gradient_as_bucket_view": False}, joined=join()),
    Variant(
        {"gradient_as_bucket_view": False},
        joined=join(divide_by_initial_world_size=False),
        needs=frozenset({"changing_divisor"}),
    ),
)
row(
    "join_that_is_not_enabled",
    Variant(joined=join(enable=False), batches=lambda rank: iter([torch.randn(6, 8) for _ in range(3)])),
)
row(
    "join_with_unused_parameters_and_no_sync",
    # Not the gradients: of what no rank used, torch's are zeros when a rank without inputs had used it last.
    Variant({**UNUSED, "bucket_cap_mb": 0.001}, joined=join(), make=branching, optimizer=sgd, with_grads=False),
    Variant(joined=join(), step=accumulated),
)
row("join_without_broadcast_of_buffers", Variant({"broadcast_buffers": False}, joined=join()))
row("join_ends_early", Variant(joined=join(throw_on_early_termination=True), raises="exhausted"))
row(
    "join_with_a_zero_redundancy_optimizer",
    Variant(joined=lambda training: Join([training.model, training.optimizer]), optimizer=zero_redundancy),
    Variant(optimizer=zero_redundancy, needs=frozenset({"sharded optimizers"})),
)

# --- hooks ------------------------------------------------------------------------------------------------------------

HOOKS = frozenset({"hooks"})


def registered(hook: Any) -> Callable[[Training], None]:
    return lambda training: training.model.register_comm_hook(None, hook)


def power_sgd(training: Training) -> None:
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5)
    training.model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


# torch compares annotations with classes, which strings are not: so it has none.
def then(state, bucket):  # type: ignore[no-untyped-def]
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0].mul_(0.25))


FP16 = registered(default_hooks.fp16_compress_hook)
SMALL = {"bucket_cap_mb": 0.001}
row(
    "hooks_of_torch",
    Variant(SMALL, prepare=registered(default_hooks.allreduce_hook), needs=HOOKS),
    Variant(SMALL, prepare=FP16, needs=HOOKS),
    Variant(prepare=registered(default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)), needs=HOOKS),
)
row("bf16_hook", Variant(prepare=registered(default_hooks.bf16_compress_hook), needs=HOOKS))
# One bucket: the continuations of several would start operations between those of the backward, in any order.
row("power_sgd_hook", *each_view(prepare=power_sgd, needs=HOOKS))
row("a_hook_with_then", Variant(SMALL, prepare=registered(then), needs=HOOKS))
row(
    "hooks_with_everything_else",
    Variant(prepare=FP16, step=accumulated, needs=HOOKS),
    Variant(UNUSED, prepare=FP16, make=branching, needs=HOOKS),
    Variant(SMALL, prepare=FP16, joined=join(), needs=HOOKS),
)

# --- losses, gradients of gradients, data, several models -------------------------------------------------------------


def begin_scaling(training: Training) -> None:
    training.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)


def overflowing(training: Training, loss: Loss, number: int) -> None:
    scaler = training.scaler
    training.optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = loss() * (float("inf") if (number, dist.get_rank()) == (1, 1) else 1.0)
    training.backward(scaler.scale(made))
    scaler.unscale_(training.optimizer)
    nn.utils.clip_grad_norm_(training.module.parameters(), 0.5)
    scaler.step(training.optimizer)
    scaler.update()


def losing_a_number(training: Training, loss: Loss, number: int) -> None:
    training.backward(loss() * (float("nan") if dist.get_rank() else 1.0))


def penalised(training: Training, loss: Loss, number: int) -> None:
    training.optimizer.zero_grad()
    x = torch.randn(4, 8, requires_grad=True)
    out = training.model(x).sum()
    (slope,) = torch.autograd.grad(out, x, create_graph=True)
    training.backward(out + slope.square().sum())
    training.optimizer.step()


def loaded(rank: int) -> Iterator[torch.Tensor]:
    data = TensorDataset(torch.randn(12, 8, generator=torch.Generator().manual_seed(3)))
    for (x,) in DataLoader(data, 4, num_workers=1, multiprocessing_context="fork"):
        yield x + rank


row(
    "mixed_precision_with_an_overflow_on_one_rank",
    Variant(prepare=begin_scaling, step=overflowing, needs=frozenset({"scaler", "clipping"})),
)
row("nan_stays_nan", Variant(step=losing_a_number, steps=1, needs=frozenset({"no step"})))
row(
    "a_gradient_penalty",
    Variant(
        make=lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)), step=penalised, optimizer=sgd, steps=3
    ),
)
row("workers_of_a_data_loader", Variant(batches=loaded, optimizer=sgd))


@dataclass(frozen=True)
class InTurn(Variant):
    """A generator and a discriminator."""

    def train(self, front_end: FrontEnd, rank: int) -> Found:
        torch.manual_seed(rank)
        modules = {"maker": nn.Linear(4, 8), "judge": Net()}
        maker, judge = (front_end.begin(module, self.optimizer, {}) for module in modules.values())
        for number in range(self.steps):
            made = maker.model(torch.randn(5, 4))
            if number % 2:
                judge.backward(judge.model(made.detach()).mean())
                judge.optimizer.step()
            else:
                # Reaches the parameters of the judge as well.
                maker.backward(judge.model(made).square().mean())
                maker.optimizer.step()
            for each in (maker, judge):
                each.optimizer.zero_grad()
        return {
            f"{which}.{name}": param.detach().clone()
            for which, module in modules.items()
            for name, param in module.named_parameters()
        }


row("two_models_in_turn", InTurn(needs=frozenset({"several backwards"})))


def train_rows(front_end: FrontEnd, rank: int, names: list[str]) -> dict[str, dict[int, Found] | str]:
    """By row: what each of its variants left, or what was raised."""
    found: dict[str, dict[int, Found] | str] = {}
    for name in names:
        try:
            found[name] = {at: variant.train(front_end, rank) for at, variant in ROWS[name].of(front_end).items()}
        except Exception:
            found[name] = traceback.format_exc()
    return found


def compare(front_end: FrontEnd, name: str, found: Any, expected: Any, exact: bool) -> None:
    """Checks that a rank found the same as with the reference: bit for bit, or nearly."""
    assert isinstance(expected, dict), expected
    assert isinstance(found, dict), found
    assert list(found) == list(ROWS[name].of(front_end))
    for at, tensors in found.items():
        names = [each for each in expected[at] if each in tensors] if not front_end.has_buffers else list(expected[at])
        assert list(tensors) == names
        for each, tensor in tensors.items():
            other = expected[at][each]
            assert (tensor is None) == (other is None), (at, each)
            if tensor is None or other is None:
                continue
            tensor, other = (value.to_dense() if value.is_sparse else value for value in (tensor, other))
            bounds = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-5, "atol": 1e-6}
            torch.testing.assert_close(
                tensor,
                other,
                equal_nan=True,
                msg=lambda text, at=at, each=each: f"variant {at}, {each}: {text}",
                **bounds,
            )
