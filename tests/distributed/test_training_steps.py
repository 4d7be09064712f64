"""Tests of what counts as a training step: backwards that are left out, frozen models, algorithms of users."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import bagua.torch_api as bagua
from bagua.errors import BaguaError, MismatchError
from bagua.torch_api.algorithms import Algorithm, AlgorithmImpl
from bagua.torch_api.data_parallel import DistributedDataParallel
from tests.distributed.torch_ranks import ENVIRONMENT, cases_in, each_case, same_everywhere
from tests.waits import meet
from tests.world import make_world

RANKS = 2

Wrap = Callable[[nn.Module, torch.optim.Optimizer], Any]
#: Trains, and returns the models.
Program = Callable[[Wrap], list[nn.Module]]

#: Algorithms that compute what DistributedDataParallel does: each step communicates, and no codec changes anything.
AS_DDP: dict[str, dict[str, Any]] = {
    "gradient_allreduce": {},
    "bytegrad": {"compression": None},
    "powersgd": {"rank": 1, "min_compression": 1e9},
    "local_sgd": {"communication_interval": 1},
    "diloco": {"communication_interval": 1, "outer_lr": 1.0, "outer_momentum": 0.0, "nesterov": False},
    "async": {"warmup_steps": 10**6},
}


def doors(algorithm: Callable[[], Algorithm]) -> list[Wrap]:
    """Both ways to wrap a model."""
    return [
        lambda model, optimizer: model.with_bagua([optimizer], algorithm()),
        lambda model, optimizer: DistributedDataParallel(model, optimizers=[optimizer], algorithm=algorithm()),
    ]


def net(*sizes: int, normalizes: bool = False) -> nn.Sequential:
    torch.manual_seed(3)
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(nn.BatchNorm1d(sizes[0]), *layers) if normalizes else nn.Sequential(*layers)


def inputs(step: int, size: int = 4) -> torch.Tensor:
    return torch.randn(5, size, generator=torch.Generator().manual_seed(10 * step + bagua.get_rank()))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


# --- a backward that is left out --------------------------------------------------------------------------------------


def leaves_out(instead: Callable[[torch.optim.Optimizer, torch.Tensor], object], zeroes: bool | None = True) -> Program:
    """A program whose third and fourth step is something else than backward and step. ``zeroes``: gradients become None
    before each forward, else zeros; None: they stay as they are there.
    """

    def train(wrap: Wrap) -> list[nn.Module]:
        model = net(4, 3, 2, normalizes=True)
        optimizer = sgd(model)
        wrapped = wrap(model, optimizer)
        for step in range(6):
            left_out = step in (2, 3)
            if zeroes is not None or not left_out:
                optimizer.zero_grad(set_to_none=zeroes is not False)
            loss = wrapped(inputs(step)).square().mean()
            if left_out:
                instead(optimizer, loss)
            else:
                loss.backward()
                optimizer.step()
        return [model]

    return train


def only_step(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.step()


def step_twice(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.step()
    optimizer.step()


def step_with_a_closure(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.step(lambda: loss.item())


def step_after_another_backward(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    torch.zeros(1, requires_grad=True).sum().backward()
    optimizer.step()


def nothing(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    pass


# --- a frozen model ---------------------------------------------------------------------------------------------------


def in_turn(through: Callable[[nn.Module], object], back: Callable[[nn.Module], object], steps: int = 4) -> Program:
    """A generator and a discriminator, which is frozen while the generator is trained through it."""

    def train(wrap: Wrap) -> list[nn.Module]:
        maker, judge = net(3, 4), net(4, 3, 1, normalizes=True)
        optimizers = sgd(maker), sgd(judge)
        make, judges = wrap(maker, optimizers[0]), wrap(judge, optimizers[1])
        for step in range(steps):
            optimizers[1].zero_grad()
            (judges(make(inputs(step, 3)).detach()).mean() - judges(inputs(step)).mean()).backward()
            optimizers[1].step()
            through(judges)
            optimizers[0].zero_grad()
            judges(make(inputs(step, 3))).mean().backward()
            optimizers[0].step()
            back(judges)
        return [maker, judge]

    return train


def freeze_each(model: nn.Module) -> None:
    for param in model.parameters():
        param.requires_grad = False


def unfreeze_each(model: nn.Module) -> None:
    for param in model.parameters():
        param.requires_grad = True


def attacks(wrap: Wrap) -> list[nn.Module]:
    """Adversarial inputs, for which the model is frozen; another number of them on each rank."""
    model = net(4, 3, 2)
    optimizer = sgd(model)
    wrapped = wrap(model, optimizer)
    for step in range(4):
        x = inputs(step)
        wrapped.requires_grad_(False)
        for _ in range(1 + bagua.get_rank()):
            x = x.detach().requires_grad_()
            wrapped(x).square().mean().backward()
            assert x.grad is not None
            x = x + 0.1 * x.grad.sign()
        wrapped.requires_grad_(True)
        optimizer.zero_grad()
        wrapped(x.detach()).square().mean().backward()
        optimizer.step()
    return [model]


PROGRAMS: dict[str, Program] = {
    "step": leaves_out(only_step),
    "step with zeros": leaves_out(only_step, zeroes=False),
    "step with the last gradients": leaves_out(only_step, zeroes=None),
    "two steps": leaves_out(step_twice),
    "a closure": leaves_out(step_with_a_closure),
    "a backward without the model": leaves_out(step_after_another_backward),
    "no step": leaves_out(nothing),
    "frozen at once": in_turn(lambda m: m.requires_grad_(False), lambda m: m.requires_grad_(True)),
    "frozen one by one": in_turn(freeze_each, unfreeze_each),
    "attacks": attacks,
}


def end(wrapped: Any) -> None:
    """Communicates what the last step left, so that the weights can be compared."""
    if hasattr(wrapped, "bagua_algorithm"):
        wrapped.bagua_algorithm.state_dict()
        bagua.unwrap(wrapped)


def weights(program: Program, wrap: Wrap) -> list[torch.Tensor]:
    """Weights and buffers at the end of a training."""
    wrapped: list[Any] = []

    def keeps(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        wrapped.append(wrap(model, optimizer))
        return wrapped[-1]

    models = program(keeps)
    for each in wrapped:
        end(each)
    return [param.detach().clone() for model in models for param in model.parameters()]


def compare_with_ddp(name: str) -> None:
    program = PROGRAMS[name]
    expected = weights(program, lambda model, optimizer: TorchDDP(model))
    for algorithm, options in AS_DDP.items():
        for wrap in doors(lambda: Algorithm.init(algorithm, **options)):  # noqa: B023
            found = weights(program, wrap)
            if algorithm == "gradient_allreduce":
                assert all(map(torch.equal, found, expected)), name
            torch.testing.assert_close(found, expected, msg=lambda text: f"{algorithm}, {name}: {text}")  # noqa: B023


def a_step_without_a_backward_is_as_with_torch(rank: int) -> None:
    for name in list(PROGRAMS)[:7]:
        compare_with_ddp(name)


def a_forward_of_a_frozen_model_is_as_with_torch(rank: int) -> None:
    for name in list(PROGRAMS)[7:]:
        compare_with_ddp(name)


def a_wrapper_without_optimizers_steps_as_with_torch(rank: int) -> None:
    for program in PROGRAMS.values():
        found = weights(program, lambda model, optimizer: DistributedDataParallel(model))
        assert all(map(torch.equal, found, weights(program, lambda model, optimizer: TorchDDP(model))))


# --- a model that another one is trained through ----------------------------------------------------------------------


def a_discriminator_is_counted_once_per_iteration(rank: int) -> None:
    for algorithm, rounds in (("local_sgd", 4), ("decentralized", 5)):
        for wrap in doors(lambda: Algorithm.init(algorithm, communication_interval=2)):  # noqa: B023
            wrapped: list[Any] = []

            def keep(model: nn.Module, optimizer: torch.optim.Optimizer, wrap: Wrap = wrap) -> Any:
                wrapped.append(wrap(model, optimizer))  # noqa: B023
                return wrapped[-1]  # noqa: B023

            in_turn(lambda model: None, lambda model: None, steps=8)(keep)
            maker, judge = (each.bagua_ddp for each in wrapped)
            # The first backward for the other model counts: what follows it shows that it is not a step.
            assert (maker.step, judge.step) == (7, 8)
            assert judge.bagua_buckets[0].backend_bucket.step == rounds
            for each in wrapped:
                bagua.unwrap(each)


def the_second_of_two_models_in_a_chain_is_counted_in_each_step(rank: int) -> None:
    for wrap in doors(lambda: Algorithm.init("local_sgd", communication_interval=1)):
        models = net(4, 3), net(3, 2)
        optimizers = [sgd(model) for model in models]
        first, second = map(wrap, models, optimizers)
        for step in range(4):
            second(first(inputs(step))).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
            assert second.bagua_ddp.step == step
            assert same_everywhere(*models[1].parameters())
        for each in (first, second):
            bagua.unwrap(each)


# --- algorithms of users ----------------------------------------------------------------------------------------------


class OfGradients(AlgorithmImpl):
    """The original's base class, whose tensors are the gradients."""

    prefix = ""

    def init_tensors(self, bagua_ddp: Any) -> list[torch.Tensor]:
        return [
            param.bagua_ensure_grad().ensure_bagua_tensor(
                self.prefix + name,
                bagua_ddp.bagua_module_name,
                getter_closure=lambda param: param.grad,
                setter_closure=lambda param, t: setattr(param, "grad", t),
            )
            for name, param in reversed(bagua_ddp.bagua_build_params())
        ]

    def init_operations(self, bagua_ddp: Any, bucket: Any) -> None:
        bucket.clear_ops()
        bucket.append_centralized_synchronous_op(average=True, group=self.process_group)


class OtherNames(OfGradients):
    """Tensors whose names are not those of the parameters."""

    prefix = "grad."


class GradientsThemselves(OfGradients):
    """Gradients that are registered without their parameters."""

    def init_tensors(self, bagua_ddp: Any) -> list[torch.Tensor]:
        return [
            param.bagua_ensure_grad().grad.ensure_bagua_tensor(name, bagua_ddp.bagua_module_name)
            for name, param in reversed(bagua_ddp.bagua_build_params())
        ]


class MarksByItself(OfGradients):
    """The original's base class with its hook of the backward."""

    def init_backward_hook(self, bagua_ddp: Any) -> Callable[[str, nn.Parameter], None]:
        return lambda name, param: param.bagua_mark_communication_ready()


class LooksOn(OfGradients):
    """An algorithm whose hook of the backward marks nothing."""

    def init_backward_hook(self, bagua_ddp: Any) -> Callable[[str, nn.Parameter], None]:
        return lambda name, param: None


class WaitsByItself(MarksByItself):
    """The original's base class with all of its hooks."""

    def init_post_backward_hook(self, bagua_ddp: Any) -> Callable[[], None]:
        return lambda: bagua_ddp._bagua_backend.wait_pending_comm_ops()


class OfWeights(OfGradients):
    """The original's decentralized algorithm, with the mean of all ranks in place of a peer's."""

    def init_tensors(self, bagua_ddp: Any) -> list[torch.Tensor]:
        self.tensors = [
            param.ensure_bagua_tensor(name, bagua_ddp.bagua_module_name)
            for name, param in reversed(bagua_ddp.bagua_build_params())
        ]
        return self.tensors

    def init_forward_pre_hook(self, bagua_ddp: Any) -> Callable[[Any], None]:
        def hook(inputs: Any) -> None:
            for tensor in self.tensors:
                tensor.bagua_mark_communication_ready()

        return hook

    def init_backward_hook(self, bagua_ddp: Any) -> Callable[[str, nn.Parameter], None]:
        return lambda name, param: None

    def init_post_backward_hook(self, bagua_ddp: Any) -> Callable[[], None]:
        return lambda: bagua_ddp._bagua_backend.wait_pending_comm_ops()


class MarksNothing(WaitsByItself):
    """An algorithm that forgets to communicate."""

    def init_backward_hook(self, bagua_ddp: Any) -> Callable[[str, nn.Parameter], None]:
        return lambda name, param: None


class OneMoreTensor(OfGradients):
    """An algorithm with a tensor of its own that it forgets to mark ready."""

    def init_tensors(self, bagua_ddp: Any) -> list[torch.Tensor]:
        self.extra = torch.zeros(3, dtype=torch.float64)
        return [*super().init_tensors(bagua_ddp), self.extra.ensure_bagua_tensor("extra", bagua_ddp.bagua_module_name)]


class LeavesOneOut(OfGradients):
    """An algorithm that does not return the last gradient."""

    def init_tensors(self, bagua_ddp: Any) -> list[torch.Tensor]:
        return super().init_tensors(bagua_ddp)[:-1]


class OrderOfEachRank(OfGradients):
    """An algorithm whose order of tensors differs between the ranks."""

    def init_tensors(self, bagua_ddp: Any) -> list[torch.Tensor]:
        return super().init_tensors(bagua_ddp)[:: 1 if bagua.get_rank() == 0 else -1]


class WeightsWithoutHooks(OfWeights):
    """An algorithm of weights that relies on hooks for gradients."""

    def init_forward_pre_hook(self, bagua_ddp: Any) -> Callable[[Any], None]:
        return lambda inputs: None

    def init_backward_hook(self, bagua_ddp: Any) -> Callable[[str, nn.Parameter], None]:
        return AlgorithmImpl.init_backward_hook(self, bagua_ddp)

    def init_post_backward_hook(self, bagua_ddp: Any) -> Callable[[], None]:
        return AlgorithmImpl.init_post_backward_hook(self, bagua_ddp)


class Own(Algorithm):
    """Makes one of the above."""

    def __init__(self, kind: type[AlgorithmImpl]) -> None:
        self._kind = kind

    def reify(self, process_group: Any) -> AlgorithmImpl:
        return self._kind(process_group)


class Branches(nn.Module):
    """Each rank uses another layer in every other step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(RANKS)])
        self.head = nn.Linear(4, 2)
        self.used = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.layers[self.used % RANKS](x))
        return out


def ways_to_wrap(algorithm: Callable[[], Algorithm], unused: bool) -> Iterator[Wrap]:
    for flat in (True, False):
        yield lambda model, optimizer, flat=flat: model.with_bagua(
            [optimizer], algorithm(), do_flatten=flat, find_unused_parameters=unused
        )
        yield lambda model, optimizer, flat=flat: DistributedDataParallel(
            model,
            optimizers=[optimizer],
            algorithm=algorithm(),
            gradient_as_bucket_view=flat,
            find_unused_parameters=unused,
        )


def accumulated(make: Callable[[], Any], wrap: Wrap) -> list[torch.Tensor]:
    """Weights and gradients after steps of two micro-batches, and of one after which gradients are kept."""
    model = make()
    optimizer = sgd(model)
    wrapped = wrap(model, optimizer)
    for step in range(4):
        model.used = step + bagua.get_rank()
        if step != 2:
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        if step % 2:
            with wrapped.no_sync() if hasattr(wrapped, "no_sync") else bagua.no_sync(wrapped):
                wrapped(inputs(step + 10)).square().mean().backward()
        wrapped(inputs(step)).square().mean().backward()
        optimizer.step()
    found = [param.detach().clone() for param in model.parameters()]
    found += [param.grad.clone() for param in model.parameters() if param.grad is not None]
    bagua.unwrap(wrapped)
    return found


def gradients_that_an_algorithm_registers_itself_are_communicated(rank: int) -> None:
    makes: list[tuple[Callable[[], Any], bool]] = [(lambda: net(4, 3, 2), False), (Branches, True)]
    for kind in (OfGradients, OtherNames, GradientsThemselves, MarksByItself, LooksOn, WaitsByItself):
        for make, unused in makes:
            if unused and kind is WaitsByItself:
                # Its bucket would never be complete, as in the original.
                continue
            ours = ways_to_wrap(lambda: Algorithm.init("gradient_allreduce"), unused)
            for wrap, reference in zip(ways_to_wrap(lambda: Own(kind), unused), ours, strict=True):  # noqa: B023
                found, expected = accumulated(make, wrap), accumulated(make, reference)
                assert len(found) == len(expected), kind
                assert all(map(torch.equal, found, expected)), (kind, unused)
                assert same_everywhere(*found)


def weights_that_an_algorithm_registers_itself_are_communicated(rank: int) -> None:
    for wrap in doors(lambda: Own(OfWeights)):
        model = net(4, 3, 2)
        optimizer = sgd(model)
        wrapped = wrap(model, optimizer)
        for step in range(3):
            optimizer.zero_grad()
            wrapped(inputs(step)).square().mean().backward()
            # The mean of the ranks, before the gradients of this rank are applied to it.
            assert same_everywhere(*model.parameters())
            optimizer.step()
            assert not same_everywhere(*model.parameters())
        bagua.unwrap(wrapped)


def an_algorithm_that_leaves_a_gradient_out_is_named(rank: int) -> None:
    for kind, name in ((LeavesOneOut, "0.weight"), (WeightsWithoutHooks, "0.bias|2.weight|2.bias")):
        for wrap in doors(lambda: Own(kind)):  # noqa: B023
            model = net(4, 3, 2)
            wrapped = wrap(model, sgd(model))
            with pytest.raises(BaguaError, match=rf"no bucket has the gradient of '({name})' of model"):
                wrapped(inputs(0)).square().mean().backward()
            bagua.unwrap(wrapped)


def an_algorithm_that_orders_tensors_by_rank_is_refused(rank: int) -> None:
    for wrap in doors(lambda: Own(OrderOfEachRank)):
        model = net(4, 3, 2)
        said = r"rank 0 has bucket '0' of 2\.bias, .*, rank 1 has bucket '0' of 0\.weight, 0\.bias"
        with pytest.raises(MismatchError, match=said):
            wrap(model, sgd(model))
        # Both ranks can go on.
        bagua.unwrap(DistributedDataParallel(model))


CASES = cases_in(globals())

test = each_case(CASES, RANKS)


def forgets_a_bucket(rank: int, kind: type[AlgorithmImpl], door: int, steps: int) -> str:
    bagua.init_process_group()
    model = net(4, 3, 2)
    wrapped = doors(lambda: Own(kind))[door](model, sgd(model))
    for step in range(steps):
        wrapped(inputs(step)).square().mean().backward()
    # What a rank raises may reach another one that is still inside the steps before.
    meet("stepped", rank, range(RANKS))
    with pytest.raises(BaguaError) as caught:
        wrapped(inputs(steps)).square().mean().backward()
    return str(caught.value)


@pytest.mark.parametrize("door", [pytest.param(0, marks=pytest.mark.slow), 1])
@pytest.mark.parametrize(
    ("kind", "steps", "said"),
    [
        # Its own hooks may communicate until the next step.
        (MarksNothing, 1, "bucket '0' was not communicated in step 0 of model"),
        (OneMoreTensor, 0, "bucket '1' was not communicated in step 0 of model"),
    ],
)
def test_a_step_in_which_a_bucket_is_not_communicated_is_an_error(
    kind: type[AlgorithmImpl], steps: int, said: str, door: int
) -> None:
    for text in make_world(RANKS, env=ENVIRONMENT).run(forgets_a_bucket, kind, door, steps):
        assert said in text
