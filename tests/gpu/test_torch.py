"""torch on a GPU: verbs behind work that comes late, captures, and the lifetimes of tensors."""

from __future__ import annotations

import pytest
import torch

from bagua import torch_api as api
from tests.cuda.ranks import Ranks, on_ranks
from tests.gpu.torch_ranks import in_torch, joined


def sleep(seconds: float) -> None:
    """The current stream is busy for about so long."""
    begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begun.record()
    torch.cuda._sleep(20_000_000)
    ended.record()
    ended.synchronize()
    torch.cuda._sleep(int(20_000_000 * seconds * 1000 / begun.elapsed_time(ended)))


def late_producers(rank: int) -> None:
    with joined():
        side = torch.cuda.Stream()
        x = torch.zeros(100_000, device="cuda")
        api.allreduce_inplace(x)
        for stream in (torch.cuda.current_stream(), side):
            with torch.cuda.stream(stream):
                sleep(0.1)
                x.fill_(rank + 1.0)
                api.allreduce_inplace(x)
                x.mul_(2)
            # Seen by another stream after the handle's wait.
            with torch.cuda.stream(stream):
                sleep(0.1)
                y = x / 6
                handle = api.allreduce_inplace(y, async_op=True)
            handle.wait()
            assert y.tolist() == [2.0] * 100_000
            torch.cuda.synchronize()
            assert x.tolist() == [6.0] * 100_000


def test_operations_follow_work_that_comes_late(ranks: Ranks) -> None:
    ranks(2, late_producers)


@on_ranks(2, in_torch)
def test_torchs_capture_is_refused_and_stays_valid() -> None:
    x, y = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")
    api.allreduce_inplace(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y.add_(1)
        with pytest.raises(NotImplementedError, match="captured"):
            api.allreduce_inplace(x)
        y.add_(1)
    graph.replay()
    assert y.tolist() == [2.0] * 4
    api.allreduce_inplace(x)
    assert x.tolist() == [4.0] * 4


def dropped(rank: int) -> None:
    with joined():
        total = torch.zeros((), device="cuda", dtype=torch.float64)
        api.allreduce_inplace(total)
        handles = []
        for k in range(20):
            # The tensor is dropped while its operation is running; its memory would be the next one's.
            x = torch.full((1 << 20,), float(k), device="cuda")
            out = torch.empty_like(x)
            handles.append((api.allreduce(x, out, async_op=True), out, k))
            del x
            torch.full((1 << 20,), -1.0, device="cuda")
        for handle, out, k in handles:
            handle.wait()
            assert out.eq(2.0 * k).all().item()


def test_tensors_that_are_dropped_during_an_operation_keep_their_values(ranks: Ranks) -> None:
    ranks(2, dropped)


def returns_at_once(rank: int, async_op: bool) -> None:
    with joined():
        x = torch.ones(1 << 20, device="cuda")
        for _ in range(2):
            api.allreduce_inplace(x.clone())
        x.fill_(1)
        torch.cuda.synchronize()
        api.barrier()
        sleep(0.5)
        busy = torch.cuda.Event()
        busy.record()
        handle = api.allreduce_inplace(x, async_op=async_op)
        # The call returned before the work that it waits for on the device.
        assert not busy.query()
        if handle is not None:
            handle.wait()
        assert x.sum().item() == api.get_world_size() * (1 << 20)


def test_a_verb_behind_half_a_second_of_work_returns_before_it_by_nccl(ranks: Ranks) -> None:
    ranks(1, returns_at_once, False, BAGUA_CUDA_COLLECTIVE="nccl")


def test_an_asynchronous_verb_behind_half_a_second_of_work_returns_before_it(ranks: Ranks) -> None:
    ranks(2, returns_at_once, True)
