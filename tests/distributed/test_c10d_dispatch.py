"""Collectives of torch.distributed on tensors that are not plain, and under dispatch modes: as on gloo.

Each verb is called on the groups of a `Pair` in turn, of which gloo's is the oracle.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor.debug import CommDebugMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor

from tests.distributed.c10d_ranks import Pair, cases_in, each_case, run_cases
from tests.distributed.left_out import needs_backend_class

WHY = "the dispatcher calls a Python backend only where Python can subclass torch's Backend"

Group = dist.ProcessGroup
Tensors = list[torch.Tensor]
#: A verb on some inputs, which have 4 elements each: its results.
Verb = Callable[[Group, Tensors], Tensors]


def lists(group: Group, like: torch.Tensor) -> Tensors:
    return [torch.zeros_like(like) for _ in range(group.size())]


def all_reduce(group: Group, x: Tensors) -> Tensors:
    dist.all_reduce(x[0], group=group)
    return x


def all_reduce_async(group: Group, x: Tensors) -> Tensors:
    work = dist.all_reduce(x[0], group=group, async_op=True)
    if work is not None:
        work.wait()
    return x


def broadcast(group: Group, x: Tensors) -> Tensors:
    dist.broadcast(x[0], dist.get_global_rank(group, 1), group=group)
    return x


def reduce(group: Group, x: Tensors) -> Tensors:
    dist.reduce(x[0], dist.get_global_rank(group, 1), group=group)
    # gloo leaves sums of some ranks on the others.
    return x if group.rank() == 1 else []


def all_gather(group: Group, x: Tensors) -> Tensors:
    out = lists(group, x[0])
    dist.all_gather(out, x[0], group=group)
    return out


def all_gather_into_tensor(group: Group, x: Tensors) -> Tensors:
    out = torch.cat(lists(group, x[0]))
    dist.all_gather_into_tensor(out, x[0], group=group)
    return [out]


def reduce_scatter(group: Group, x: Tensors) -> Tensors:
    out = torch.zeros_like(x[0])
    dist.reduce_scatter(out, [x[0]] * group.size(), group=group)
    return [out]


def reduce_scatter_tensor(group: Group, x: Tensors) -> Tensors:
    out = torch.zeros_like(x[0])
    dist.reduce_scatter_tensor(out, torch.cat([x[0]] * group.size()), group=group)
    return [out]


def gather(group: Group, x: Tensors) -> Tensors:
    out = lists(group, x[0]) if group.rank() == 1 else None
    dist.gather(x[0], out, dist.get_global_rank(group, 1), group=group)
    return out or []


def scatter(group: Group, x: Tensors) -> Tensors:
    out = torch.zeros_like(x[0])
    parts = [x[0]] * group.size() if group.rank() == 1 else None
    dist.scatter(out, parts, dist.get_global_rank(group, 1), group=group)
    return [out]


def all_to_all_single(group: Group, x: Tensors) -> Tensors:
    out = torch.zeros_like(x[0])
    dist.all_to_all_single(out, x[0], group=group)
    return [out]


def all_to_all(group: Group, x: Tensors) -> Tensors:
    out = lists(group, x[0])
    dist.all_to_all(out, [x[0]] * group.size(), group=group)
    return out


def messages(group: Group, x: Tensors) -> Tensors:
    if group.rank() == 0:
        dist.send(x[0], dist.get_global_rank(group, 1), group=group)
    if group.rank() == 1:
        dist.recv(x[0], dist.get_global_rank(group, 0), group=group)
    return x


def functional_all_reduce(group: Group, x: Tensors) -> Tensors:
    return [functional.all_reduce(x[0], "sum", group)]


def functional_all_gather(group: Group, x: Tensors) -> Tensors:
    return [functional.all_gather_tensor(x[0], 0, group)]


VERBS: tuple[Verb, ...] = (
    all_reduce,
    all_reduce_async,
    broadcast,
    reduce,
    all_gather,
    all_gather_into_tensor,
    reduce_scatter,
    reduce_scatter_tensor,
    gather,
    scatter,
    all_to_all_single,
    all_to_all,
    messages,
    functional_all_reduce,
    functional_all_gather,
)


def plain(rank: int) -> torch.Tensor:
    return torch.arange(4.0) + 10 * rank


def values(tensor: torch.Tensor) -> Any:
    """What a tensor holds, whatever it is."""
    if isinstance(tensor, functional.AsyncCollectiveTensor):
        return values(tensor.wait())
    if isinstance(tensor, TwoTensor):
        return values(tensor.a), values(tensor.b)
    return tensor.tolist()


def outcome(call: Callable[[], Any]) -> Any:
    """What a call returns, or that it raises. Texts and classes differ between backends."""
    try:
        return call()
    except Exception:
        return "raises"


@needs_backend_class(WHY)
def results_of_functional_collectives_are_waited_for(pair: Pair) -> None:
    # Not beside gloo: it reads the memory of such tensors in lists of lists, of which they have none.
    for verb in VERBS:
        total = functional.all_reduce(plain(pair.rank), "sum", pair.ours)
        found = verb(pair.ours, [total])
        expected = verb(pair.ours, [torch.stack([plain(rank) for rank in range(pair.size)]).sum(0)])
        assert list(map(values, found)) == list(map(values, expected)), verb.__name__


@needs_backend_class(WHY)
def tensors_that_hold_tensors_are_communicated_part_by_part(pair: Pair) -> None:
    # Not beside gloo: nothing waits for its second part.
    for verb in (all_reduce, broadcast, all_gather_into_tensor, reduce_scatter_tensor, all_to_all_single):
        (found,) = verb(pair.ours, [TwoTensor(plain(pair.rank), plain(pair.rank) + 1)])
        parts = [verb(pair.ours, [plain(pair.rank) + part])[0].tolist() for part in (0, 1)]
        assert list(values(found)) == parts, verb.__name__


@needs_backend_class(WHY)
def a_mode_counts_each_collective_once_and_the_results_are_gloos(pair: Pair) -> None:
    for verb in VERBS:
        counts = []
        for group in (pair.gloo, pair.ours):
            x = plain(pair.rank)
            with CommDebugMode() as mode:
                found = verb(group, [x])
            counts.append((mode.get_total_counts(), list(map(values, found))))
        assert counts[1] == counts[0], (verb.__name__, counts)


@contextlib.contextmanager
def fake() -> Iterator[None]:
    with FakeTensorMode():
        yield


@needs_backend_class(WHY)
def fake_tensors_communicate_as_on_gloo(pair: Pair) -> None:
    for verb in VERBS:
        shapes = []
        for group in (pair.gloo, pair.ours):
            with fake():
                shapes.append(outcome(lambda group=group, verb=verb: [t.shape for t in verb(group, [torch.ones(4)])]))
        assert shapes[1] == shapes[0], (verb.__name__, shapes)
        # No rank waits for the others' fake call.
        dist.barrier(pair.ours)


@needs_backend_class(WHY)
def traced_collectives_are_those_of_gloo(pair: Pair) -> None:
    for verb in VERBS:
        graphs = []
        for group in (pair.gloo, pair.ours):

            def traced(x: torch.Tensor, group: Group = group, verb: Verb = verb) -> Tensors:
                return verb(group, [x])

            graphs.append(outcome(lambda traced=traced: [n.name for n in make_fx(traced)(plain(0)).graph.nodes]))
        assert graphs[1] == graphs[0], (verb.__name__, graphs)


@needs_backend_class(WHY)
def version_counters_move_as_on_gloo_in_place(pair: Pair) -> None:
    for verb in (all_reduce, broadcast, reduce, messages, scatter, all_to_all_single):
        moved = []
        for group in (pair.gloo, pair.ours):
            x = plain(pair.rank)
            verb(group, [x])
            moved.append(x._version)
        assert moved == [0, 0], verb.__name__
    weight = torch.full((4,), pair.rank + 1.0, requires_grad=True)
    halves = weight.chunk(2)
    dist.broadcast(weight.detach(), pair.world_rank(0), group=pair.ours)
    halves[pair.rank % 2].sum().backward()
    assert weight.grad.sum() == 2.0


def parts_of_different_sizes_are_reduced_and_scattered(pair: Pair) -> None:
    sizes = [[3, 1, 0, 2][rank] for rank in range(pair.size)]
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):

        def verb(group: Group, op: Any = op) -> torch.Tensor:
            parts = [torch.arange(2.0 * size).view(size, 2) + 10 * pair.rank for size in sizes]
            out = torch.zeros(sizes[pair.rank], 2)
            dist.reduce_scatter(out, parts, op, group=group)
            return out

        pair.both(verb)
    # Averages of integers are divided afterwards.
    parts = [torch.full((size,), 3 + pair.rank) for size in sizes]
    out = torch.zeros(sizes[pair.rank], dtype=torch.int64)
    dist.reduce_scatter(out, parts, dist.ReduceOp.AVG, group=pair.ours)
    assert out.tolist() == [sum(3 + rank for rank in range(pair.size)) // pair.size] * sizes[pair.rank]


CASES = cases_in(globals())


def in_the_world(rank: int) -> dict[str, str]:
    return run_cases(rank, CASES)


test = each_case(CASES, 2, run=in_the_world)
