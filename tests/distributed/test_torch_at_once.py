"""Blocking verbs on plain tensors go to the core in one call; nothing but the time differs from the general path."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import bagua.torch_api as bagua
from bagua.torch_api import ReduceOp
from tests.distributed.torch_ranks import cases_in, each_case

Make = Callable[[int], torch.Tensor]


class Marked(torch.Tensor):
    """A subclass, which the bindings do not read."""


#: Functions that make a tensor of ones; the second one's is not plain.
MAKERS: list[Make] = [torch.ones, lambda count: torch.ones(count).as_subclass(Marked)]


def verbs(make: Make, rank: int, size: int) -> list[tuple[Callable[[], Any], torch.Tensor, bool]]:
    """A call, the tensor that it writes, and whether this rank's is written."""
    part, whole, same, other = make(4), make(4 * size), make(4), make(4)
    return [
        (lambda: bagua.allreduce_inplace(part), part, True),
        (lambda: bagua.allreduce(same, other), other, True),
        (lambda: bagua.reduce_inplace(same, 0), same, True),
        (lambda: bagua.reduce(part, other, 0), other, True),
        (lambda: bagua.broadcast(part, 0), part, rank != 0),
        (lambda: bagua.allgather(part, whole), whole, True),
        (lambda: bagua.allgather_inplace(whole), whole, True),
        (lambda: bagua.reduce_scatter(whole, part), part, True),
        (lambda: bagua.reduce_scatter_inplace(whole), whole, True),
        (lambda: bagua.alltoall(whole, torch.empty_like(whole)), whole, False),
        (lambda: bagua.alltoall_inplace(whole), whole, True),
    ]


def autograd_sees_what_is_written_and_only_that(rank: int) -> None:
    for make in MAKERS:
        for number, (call, tensor, written) in enumerate(verbs(make, rank, bagua.get_world_size())):
            before = tensor._version
            assert call() is None
            assert (tensor._version > before) == written, f"verb {number}"


def plain_tensors_and_others_get_the_same(rank: int) -> None:
    size = bagua.get_world_size()
    expected = [float(sum(range(1, size + 1)))] * 6
    base = torch.full((6, 2), float(rank + 1))
    sources = {
        "plain": base[:, 0].contiguous(),
        "strided": base[:, 0],
        "negated": torch._neg_view(-base[:, 0].contiguous()),
        "subclass": base[:, 0].contiguous().as_subclass(Marked),
        "parameter": torch.nn.Parameter(base[:, 0].contiguous()),
        "lazily cloned": torch._lazy_clone(base[:, 0].contiguous()),
    }
    for name, source in sources.items():
        result = torch.empty(6)
        bagua.allreduce(source, result)
        assert result.tolist() == expected, name
    with torch.inference_mode():
        tensor = torch.full((6,), float(rank + 1))
        bagua.allreduce_inplace(tensor)
        assert tensor.tolist() == expected
    parameter = torch.nn.Parameter(torch.full((6,), float(rank + 1)))
    bagua.allreduce_inplace(parameter, ReduceOp.MAX)
    assert parameter.tolist() == [float(size)] * 6
    clone = torch._lazy_clone(base)
    bagua.allreduce_inplace(clone)
    assert base.unique().tolist() == [float(rank + 1)], "the original of a lazy clone was written"


def other_threads_run_while_a_small_verb_waits_for_a_late_peer(rank: int) -> None:
    if bagua.get_world_size() == 1:
        return  # there is no peer to be late
    path = Path(bagua.broadcast_object(tempfile.mktemp(prefix="bagua-late-")))
    tensor = torch.ones(8)
    if rank != 0:
        # The sign comes from a thread of rank 0 that gets the GIL only when its main thread releases it.
        until = time.monotonic() + 20.0
        while not path.exists() and time.monotonic() < until:
            time.sleep(0.001)
        there = path.exists()
        bagua.allreduce_inplace(tensor)
        assert there
        return
    begun = threading.Event()

    def sign() -> None:
        begun.wait()
        path.touch()

    thread = threading.Thread(target=sign)
    thread.start()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    try:
        begun.set()
        bagua.allreduce_inplace(tensor)
    finally:
        sys.setswitchinterval(before)
    thread.join()
    assert tensor.tolist() == [float(bagua.get_world_size())] * 8
    os.unlink(path)


CASES = cases_in(globals())

test = each_case(CASES, 1, 2, 3)
