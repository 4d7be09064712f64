"""Tools of torch work on plain and on wrapped models as without bagua, and TorchScript on plain ones."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import bagua.torch_api as bagua
from tests.distributed.left_out import needs_torch
from tests.distributed.torch_ranks import cases_in, each_case, same_everywhere

pytestmark = pytest.mark.slow

Model = Callable[[torch.Tensor], torch.Tensor]


def saved_and_loaded(model: torch.nn.Module, x: torch.Tensor) -> Model:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: Model = torch.load(file, weights_only=False)
    return loaded


#: From a model and an example input to something that computes the same.
TOOLS: dict[str, Callable[[torch.nn.Module, torch.Tensor], Any]] = {
    "trace": lambda model, x: torch.jit.trace(model, x, check_trace=False),
    "export": lambda model, x: torch.export.export(model, (x,)).module(),
    "compile": lambda model, x: torch.compile(model, backend="eager"),
    "compile with autograd": lambda model, x: torch.compile(model, backend="aot_eager"),
    "fx": lambda model, x: torch.fx.symbolic_trace(model),
    "pickle": lambda model, x: pickle.loads(pickle.dumps(model)),
    "save": saved_and_loaded,
    "deepcopy": lambda model, x: copy.deepcopy(model),
}


def network() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU(), torch.nn.Sequential(torch.nn.Linear(4, 2))
    )


def allreduce() -> bagua.algorithms.GradientAllReduceAlgorithm:
    return bagua.algorithms.GradientAllReduceAlgorithm()


def every_tool_works_on_a_plain_model(rank: int) -> None:
    x = torch.randn(5, 3)
    for name, tool in {**TOOLS, "script": lambda model, x: torch.jit.script(model)}.items():
        for training in (True, False):
            model = network().train(training)
            expected = copy.deepcopy(model)(x)
            assert torch.equal(tool(model, x)(x), expected), (name, training)


@needs_torch((2, 11), "its torch.export takes no hook that it cannot trace")
def every_tool_works_on_a_wrapped_model_which_trains_on(rank: int) -> None:
    for name, tool in TOOLS.items():
        for training in (True, False):
            model = network()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            bagua.with_bagua(model, [optimizer], allreduce())
            hooks = list(model._forward_pre_hooks.values())
            for _ in range(2):
                model.train(training)
                x = torch.randn(5, 3)
                # Buffers are rank 0's after a training forward, also after that of a tool which runs the model itself.
                plain = bagua.unwrap(copy.deepcopy(model))
                if training:
                    bagua.broadcast_coalesced([buffer for buffer in plain.buffers() if buffer.is_floating_point()])
                made = tool(model, x)
                assert list(model._forward_pre_hooks.values()) == hooks, name
                with torch.no_grad():
                    assert torch.equal(made(x), plain(x)), (name, training)
                model.train()
                optimizer.zero_grad()
                model(torch.randn(5, 3)).pow(2).sum().backward()
                optimizer.step()
                assert same_everywhere(*model.parameters()), (name, training)
            bagua.unwrap(model)


CASES = cases_in(globals())


def begin(rank: int) -> None:
    # TorchScript says at each call that it is deprecated.
    warnings.simplefilter("ignore")


test_torchs_tools_after_the_import_of_bagua = each_case(CASES, 2)
