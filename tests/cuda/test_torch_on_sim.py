"""torch on the simulated driver: what it computes is the CPU's, and what is not ordered is late."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.cases import slow_but
from tests.cuda.ranks import Ranks, on_ranks
from tests.cuda.torch_on_sim import install, installed


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, stride=2)
        )
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean((2, 3)))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        return self.head(self.body(self.embedding(x), mask=mask, is_causal=True)).mean(1)


def mlp() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(
        nn.Linear(12, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 5)
    ), torch.randn(6, 12)


def cnn() -> tuple[nn.Module, torch.Tensor]:
    return Cnn(), torch.randn(6, 3, 9, 9)


def transformer() -> tuple[nn.Module, torch.Tensor]:
    return Transformer(), torch.randint(0, 11, (6, 7))


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {"mlp": mlp, "cnn": cnn, "transformer": transformer}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {"adamw": adamw, "sgd": sgd}


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> list[float]:
    """Five steps with gradients that are clipped."""
    losses = []
    torch.manual_seed(7)
    for _ in range(5):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", slow_but(["cnn"], ["mlp", "cnn", "transformer"]))
@on_ranks(1, installed)
def test_training_on_the_device_ends_with_the_weights_of_the_cpu_bit_for_bit(name: str, optimizer: str) -> None:
    torch.manual_seed(1)
    model, x = MODELS[name]()
    y = torch.randint(0, 5, (6,))
    there = copy.deepcopy(model).cuda()
    parameter = next(there.parameters())
    assert (parameter.device, parameter.is_cuda) == (torch.device("cuda", 0), True)
    assert isinstance(parameter, nn.Parameter)
    here_optimizer, there_optimizer = (OPTIMIZERS[optimizer](each.parameters()) for each in (model, there))
    here = steps(model, here_optimizer, x, y)
    assert steps(there, there_optimizer, x.cuda(), y.to("cuda")) == here
    assert len(set(here)) == 5
    expected = model.state_dict()
    for key, value in there.state_dict().items():
        assert value.is_cuda
        assert torch.equal(value.cpu(), expected[key]), key
    for mine, other in zip(model.parameters(), there.parameters(), strict=True):
        assert torch.equal(other.grad.cpu(), mine.grad)
    for mine, other in zip(here_optimizer.state.values(), there_optimizer.state.values(), strict=True):
        for key, value in mine.items():
            assert torch.equal(other[key].cpu(), value), key


@on_ranks(1, installed)
def test_state_travels_through_files_to_the_cpu_and_back() -> None:
    torch.manual_seed(1)
    model, x = mlp()
    there = copy.deepcopy(model).to("cuda")
    optimizer = adamw(there.parameters())
    steps(there, optimizer, x.cuda(), torch.zeros(6, dtype=torch.long, device="cuda"))
    file = io.BytesIO()
    torch.save({"model": there.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file)
    assert all(value.device.type == "cpu" for value in loaded["model"].values())
    addresses = [each.data_ptr() for each in there.parameters()]
    # Into weights that have changed since, where they are, and into a model on the CPU.
    with torch.no_grad():
        for each in there.parameters():
            each.zero_()
    there.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    model.load_state_dict(there.state_dict())
    assert [each.data_ptr() for each in there.parameters()] == addresses
    assert next(iter(optimizer.state.values()))["exp_avg"].is_cuda
    copied = copy.deepcopy(there)
    before = list(there.parameters())
    there.cpu()
    for old, each, mine, other in zip(before, there.parameters(), model.parameters(), copied.parameters(), strict=True):
        assert old is each
        assert each.device.type == "cpu"
        assert other.is_cuda
        assert torch.equal(each, mine)
        assert torch.equal(other.cpu(), mine)


@on_ranks(1, installed)
def test_views_share_memory_with_their_base() -> None:
    base = torch.zeros(4, 6, device="cuda")
    assert base.data_ptr() != 0
    row, column, flat = base[1], base.narrow(1, 2, 1), base.view(-1)
    assert row.data_ptr() == base.data_ptr() + 24
    row.fill_(2)
    column.add_(1)
    flat[-1] = 9
    assert base.tolist() == [[0, 0, 1, 0, 0, 0], [2, 2, 3, 2, 2, 2], [0, 0, 1, 0, 0, 0], [0, 0, 1, 0, 0, 9]]
    # A gap between the elements of a view is not written.
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    column.mul_(5)
    with torch.cuda.stream(other):
        base[:, 3].fill_(7)
        base[:, 3].sum().item()
    torch.cuda.current_stream().wait_stream(other)
    assert base[:, 2:4].tolist() == [[5, 7], [15, 7], [5, 7], [5, 7]]
    # Memory is moved as torch's own: by .data, and by set_.
    x, y = torch.ones(3, device="cuda", requires_grad=True), torch.zeros(6, device="cuda")
    x.data = y[2:5]
    assert x.data_ptr() == y.data_ptr() + 8
    with torch.no_grad():
        x += 1
    y.set_(base.untyped_storage(), 6, (3,), (1,))
    assert y.tolist() == [2, 2, 15]
    (x * x).sum().backward()
    assert x.grad.tolist() == [2, 2, 2]
    assert x.grad.device == x.device
    # Other sizes and types.
    assert torch.empty(0, 3, device="cuda").device == torch.device("cuda", 0)
    assert torch.arange(5, device="cuda:1").device == torch.device("cuda", 1)
    assert torch.arange(3, device="cuda").to("cuda:1", torch.float16).cpu().tolist() == [0, 1, 2]
    with pytest.raises(RuntimeError, match="cpu and cuda:0"):
        base + torch.ones(4, 6)
    with pytest.raises(RuntimeError, match="cuda:0 and cuda:1"):
        base + torch.ones(4, 6, device="cuda:1")
    with pytest.raises(TypeError, match="numpy"):
        base.numpy()
    for dtype in (torch.bool, torch.int64, torch.bfloat16, torch.complex64):
        assert torch.ones(2, dtype=dtype, device="cuda").cpu().dtype == dtype


@on_ranks(1, installed)
def test_work_of_a_stream_is_late_for_another_one_that_does_not_wait() -> None:
    main, other = torch.cuda.current_stream(), torch.cuda.Stream()
    assert (main.cuda_stream, main) == (0, torch.cuda.default_stream())
    x = torch.zeros(4, device="cuda")
    torch.cuda.synchronize()
    x.add_(1)
    with torch.cuda.stream(other):
        assert torch.cuda.current_stream() == other
        # There was no wait.
        assert x.tolist() == [0] * 4
        other.wait_stream(main)
        assert x.tolist() == [1] * 4
        x.mul_(3)
        event = other.record_event()
    assert torch.cuda.current_stream() == main
    assert x.tolist() == [1] * 4
    assert not event.query()
    event.wait()
    assert x.tolist() == [3] * 4
    assert event.query()
    # A copy inside the device is late as a whole: also the reading.
    y = torch.empty(4, device="cuda")
    torch.cuda.synchronize()
    y.copy_(x)
    other.wait_stream(main)
    x.fill_(8)
    with torch.cuda.stream(other):
        assert y.tolist() == [3] * 4
    assert x.tolist() == [8] * 4


def overtaken(rank: int, waits: bool) -> None:
    install()
    x, other = torch.ones(4, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    y = x + 1
    if waits:
        other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        x.fill_(5)
    other.synchronize()
    assert y.tolist() == [2] * 4


def test_an_operand_that_is_written_before_it_is_read_is_a_fault(ranks: Ranks) -> None:
    for waits in (False, True):
        ranks(1, overtaken, waits, clean=False)
        (report,) = ranks.reports
        assert report["leaked"] == 0
        assert any("written before" in text for text in report["faults"]) != waits


def gone(rank: int, named: bool) -> None:
    install()
    x, other = torch.ones(4, device="cuda"), torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        y = torch.empty(4, device="cuda")
        y.copy_(x)
    if named:
        x.record_stream(other)
    del x
    gc.collect()
    torch.cuda.current_stream().synchronize()
    with torch.cuda.stream(other):
        if named:
            assert y.tolist() == [1] * 4


def test_memory_is_given_back_in_the_order_of_its_streams(ranks: Ranks) -> None:
    ranks(1, gone, True, clean=False)
    (report,) = ranks.reports
    assert (report["faults"], report["leaked"]) == ([], 0)


def test_memory_that_another_stream_still_uses_is_a_fault(ranks: Ranks) -> None:
    ranks(1, gone, False, clean=False)
    (report,) = ranks.reports
    assert "is freed before work that uses it has ended" in report["faults"][0]


@on_ranks(1, installed)
def test_memory_goes_with_the_last_view(runtime: Any) -> None:
    before = len(runtime.allocations)
    x = torch.zeros(1000, device="cuda")
    view = x[5:]
    del x
    gc.collect()
    assert len(runtime.allocations) == before + 1
    del view
    gc.collect()
    assert len(runtime.allocations) == before
    assert runtime.reads_to_the_host == 0


def futures(rank: int) -> None:
    """As the true ones, whose rules torch documents."""
    install()
    devices = ["cuda:0", torch.device("cuda", 1)]
    producer, consumer = torch.cuda.Stream(1), torch.cuda.Stream(1)
    future: torch.futures.Future[Any] = torch.futures.Future(devices=devices)
    child = future.then(lambda done: (torch.cuda.current_device(), done.value()["x"] + 1))
    with torch.cuda.stream(producer):
        x = torch.full((1000,), 3.0, device="cuda:1")
        assert (future.done(), child.done()) == (False, False)
        future.set_result({"x": x, "other": [1, "two"]})
    assert (future.done(), child.done()) == (True, True)
    with torch.cuda.stream(consumer):
        assert future.wait()["x"][0].item() == 3.0
        device, more = child.wait()
        # That of the stream on which the result was set.
        assert (device, more[0].item()) == (1, 4.0)
    # Only a tensor in the value is ordered: this one is not, and has not been written.
    with torch.cuda.stream(producer):
        late, source = torch.zeros(1000, device="cuda:1"), torch.ones(1000, device="cuda:1")
        producer.synchronize()
        late.copy_(source)
        unordered: torch.futures.Future[Any] = torch.futures.Future(devices=devices)
        unordered.set_result(None)
    with torch.cuda.stream(consumer):
        assert unordered.wait() is None
        assert late[0].item() == 0.0
    producer.synchronize()
    assert late[0].item() == 1.0
    elsewhere: torch.futures.Future[Any] = torch.futures.Future(devices=["cuda:0"])
    elsewhere.set_result([x])
    with pytest.raises(ValueError, match=r"devices \[1\]"):
        elsewhere.wait()
    failed: torch.futures.Future[Any] = torch.futures.Future(devices=devices)
    failed.set_exception(KeyError("set"))
    with pytest.raises(KeyError, match="set"):
        failed.wait()
    with pytest.raises(RuntimeError, match="KeyError: 'set'"):
        failed.then(lambda done: done.value()).wait()
    assert isinstance(future, torch._C.Future)


def test_a_future_with_devices_orders_streams_behind_the_tensors_of_its_value(ranks: Ranks) -> None:
    ranks(1, futures, clean=False)
    # This scenario waits for the device, and reads what nothing has ordered.
    (report,) = ranks.reports
    assert report["leaked"] == 0
