"""Collectives of torch.distributed on tensors that are not plain, and under dispatch modes: as on gloo.

Each verb is a row and each kind of tensors or modes a column of one table, whose fields are cases. A case calls its
verb on the groups of a `Pair` in turn, of which gloo's is the oracle.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor.debug import CommDebugMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor

from tests.distributed.c10d_ranks import Case, Pair, cases_in, each_case, run_cases
from tests.distributed.left_out import needs_backend_class

WHY = "the dispatcher calls a Python backend only where Python can subclass torch's Backend"

Group = dist.ProcessGroup
Tensors = list[torch.Tensor]
#: A verb on a tensor of 4 elements: its results.
Verb = Callable[[Group, torch.Tensor], Tensors]

# --- verbs ------------------------------------------------------------------------------------------------------------


def world_rank(group: Group, rank: int) -> int:
    return dist.get_global_rank(group, rank)


def lists(group: Group, like: torch.Tensor) -> Tensors:
    return [torch.zeros_like(like) for _ in range(group.size())]


def all_reduce(group: Group, x: torch.Tensor) -> Tensors:
    dist.all_reduce(x, group=group)
    return [x]


def all_reduce_async(group: Group, x: torch.Tensor) -> Tensors:
    work = dist.all_reduce(x, group=group, async_op=True)
    if work is not None:
        work.wait()
    return [x]


def all_reduce_coalesced(group: Group, x: torch.Tensor) -> Tensors:
    tensors = [x, x + 1]
    with dist._coalescing_manager(group):
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    return tensors


def broadcast(group: Group, x: torch.Tensor) -> Tensors:
    dist.broadcast(x, world_rank(group, 1), group=group)
    return [x]


def reduce(group: Group, x: torch.Tensor) -> Tensors:
    dist.reduce(x, world_rank(group, 1), group=group)
    # gloo leaves sums of some ranks on the others.
    return [x] if group.rank() == 1 else []


def all_gather(group: Group, x: torch.Tensor) -> Tensors:
    out = lists(group, x)
    dist.all_gather(out, x, group=group)
    return out


def all_gather_coalesced(group: Group, x: torch.Tensor) -> Tensors:
    out = [[torch.zeros_like(x)] for _ in range(group.size())]
    dist.all_gather_coalesced(out, [x], group=group)
    return [each for (each,) in out]


def all_gather_into_tensor(group: Group, x: torch.Tensor) -> Tensors:
    out = torch.cat(lists(group, x))
    dist.all_gather_into_tensor(out, x, group=group)
    return [out]


def all_gather_into_tensor_coalesced(group: Group, x: torch.Tensor) -> Tensors:
    out = torch.cat(lists(group, x))
    with dist._coalescing_manager(group):
        dist.all_gather_into_tensor(out, x, group=group)
    return [out]


def reduce_scatter(group: Group, x: torch.Tensor) -> Tensors:
    out = torch.zeros_like(x)
    dist.reduce_scatter(out, [x] * group.size(), group=group)
    return [out]


def reduce_scatter_tensor(group: Group, x: torch.Tensor) -> Tensors:
    out = torch.zeros_like(x)
    dist.reduce_scatter_tensor(out, torch.cat([x] * group.size()), group=group)
    return [out]


def reduce_scatter_tensor_coalesced(group: Group, x: torch.Tensor) -> Tensors:
    out = torch.zeros_like(x)
    with dist._coalescing_manager(group):
        dist.reduce_scatter_tensor(out, torch.cat([x] * group.size()), group=group)
    return [out]


def gather(group: Group, x: torch.Tensor) -> Tensors:
    out = lists(group, x) if group.rank() == 1 else None
    dist.gather(x, out, world_rank(group, 1), group=group)
    return out or []


def scatter(group: Group, x: torch.Tensor) -> Tensors:
    out = torch.zeros_like(x)
    parts = [x] * group.size() if group.rank() == 1 else None
    dist.scatter(out, parts, world_rank(group, 1), group=group)
    return [out]


def all_to_all_single(group: Group, x: torch.Tensor) -> Tensors:
    out = torch.zeros_like(x)
    dist.all_to_all_single(out, x, group=group)
    return [out]


def all_to_all(group: Group, x: torch.Tensor) -> Tensors:
    out = lists(group, x)
    dist.all_to_all(out, [x] * group.size(), group=group)
    return out


def barrier(group: Group, x: torch.Tensor) -> Tensors:
    dist.barrier(group)
    return [x]


def messages(group: Group, x: torch.Tensor) -> Tensors:
    if group.rank() == 0:
        dist.send(x, world_rank(group, 1), group=group)
    if group.rank() == 1:
        dist.recv(x, world_rank(group, 0), group=group)
    return [x]


def batch_of_messages(group: Group, x: torch.Tensor) -> Tensors:
    out = torch.zeros_like(x)
    peer = world_rank(group, 1 - group.rank())
    messages = [dist.P2POp(dist.isend, x, peer, group), dist.P2POp(dist.irecv, out, peer, group)]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    return [out]


def objects(group: Group, x: torch.Tensor) -> Tensors:
    everyones: list[Any] = [None] * group.size()
    dist.all_gather_object(everyones, group.rank(), group)
    first = [group.rank()]
    dist.broadcast_object_list(first, world_rank(group, 1), group)
    own: list[Any] = [None]
    dist.scatter_object_list(own, everyones, world_rank(group, 1), group)
    at_root = everyones.copy() if group.rank() == 1 else None
    dist.gather_object(own, at_root, world_rank(group, 1), group)
    return [x + sum(everyones) + first[0] + own[0]]


def functional_all_reduce(group: Group, x: torch.Tensor) -> Tensors:
    return [functional.all_reduce(x, "sum", group)]


def functional_broadcast(group: Group, x: torch.Tensor) -> Tensors:
    return [functional.broadcast(x, 1, group)]


def functional_all_gather(group: Group, x: torch.Tensor) -> Tensors:
    return [functional.all_gather_tensor(x, 0, group)]


def functional_reduce_scatter(group: Group, x: torch.Tensor) -> Tensors:
    return [functional.reduce_scatter_tensor(x, "sum", 0, group)]


def functional_all_to_all(group: Group, x: torch.Tensor) -> Tensors:
    return [functional.all_to_all_single(x, None, None, group)]


VERBS: tuple[Verb, ...] = (
    all_reduce,
    all_reduce_async,
    all_reduce_coalesced,
    broadcast,
    reduce,
    all_gather,
    all_gather_coalesced,
    all_gather_into_tensor,
    all_gather_into_tensor_coalesced,
    reduce_scatter,
    reduce_scatter_tensor,
    reduce_scatter_tensor_coalesced,
    gather,
    scatter,
    all_to_all_single,
    all_to_all,
    barrier,
    messages,
    batch_of_messages,
    objects,
    functional_all_reduce,
    functional_broadcast,
    functional_all_gather,
    functional_reduce_scatter,
    functional_all_to_all,
)

# --- kinds of tensors and modes ---------------------------------------------------------------------------------------


class Named(torch.Tensor):
    """A subclass whose values are where torch's are."""


def plain(rank: int) -> torch.Tensor:
    return torch.arange(4.0) + 10 * rank


def values(tensor: torch.Tensor) -> Any:
    """Returns the values that a tensor holds, whatever its class."""
    if isinstance(tensor, functional.AsyncCollectiveTensor):
        return values(tensor.wait())
    if isinstance(tensor, TwoTensor):
        return [values(tensor.a), values(tensor.b)]
    return (type(tensor).__name__, tensor.tolist())


def outcome(call: Callable[[], Any]) -> Any:
    """Returns the result of a call, or that it raises. Texts and classes differ between backends."""
    try:
        return call()
    except Exception:
        return "raises"


def all_values(verb: Verb, group: Group, x: torch.Tensor) -> list[Any]:
    return list(map(values, verb(group, x)))


def of_a_functional_collectives_result(pair: Pair, verb: Verb) -> tuple[Any, Any]:
    total = functional.all_reduce(plain(pair.rank), "sum", pair.ours)
    # Waited for beforehand: gloo reads the memory of such tensors in lists of lists, of which they have none.
    expected = functional.all_reduce(plain(pair.rank), "sum", pair.gloo).wait()
    found = [tensor.wait() if hasattr(tensor, "wait") else tensor for tensor in verb(pair.ours, total)]
    return list(map(values, found)), all_values(verb, pair.gloo, expected)


def of_a_tensor_that_holds_tensors(pair: Pair, verb: Verb) -> tuple[Any, Any]:
    parts = plain(pair.rank), plain(pair.rank) + 1
    found = verb(pair.ours, TwoTensor(*(part.clone() for part in parts)))
    # One after the other: gloo's Work waits for the first part alone.
    expected = zip(*(all_values(verb, pair.gloo, part) for part in parts), strict=True)
    return list(map(values, found)), list(map(list, expected))


def of_a_subclass(pair: Pair, verb: Verb) -> tuple[Any, Any]:
    def found(group: Group) -> Any:
        return outcome(lambda: all_values(verb, group, plain(pair.rank).as_subclass(Named)))

    return found(pair.ours), found(pair.gloo)


def of_a_fake_tensor(pair: Pair, verb: Verb) -> tuple[Any, Any]:
    def shapes(group: Group) -> Any:
        with FakeTensorMode():
            return outcome(lambda: [tensor.shape for tensor in verb(group, torch.ones(4))])

    return shapes(pair.ours), shapes(pair.gloo)


def is_counted_as_on_gloo(pair: Pair, verb: Verb) -> tuple[Any, Any]:
    def counts(group: Group, mode: CommDebugMode, inner: Any) -> Any:
        with mode, inner:
            found = verb(group, plain(pair.rank))
        return mode.get_comm_counts(), list(map(values, found))

    def in_each_mode(group: Group) -> list[Any]:
        inner = CommDebugMode()
        return [
            counts(group, CommDebugMode(), contextlib.nullcontext()),
            counts(group, CommDebugMode(), inner),
            inner.get_comm_counts(),
            # The mode is there, and sees nothing.
            counts(group, CommDebugMode(), torch._C._DisableTorchDispatch()),
        ]

    return in_each_mode(pair.ours), in_each_mode(pair.gloo)


def is_traced_as_on_gloo(pair: Pair, verb: Verb) -> tuple[Any, Any]:
    def collectives(group: Group) -> Any:
        graph = outcome(lambda: make_fx(lambda x: verb(group, x))(plain(0)).graph)
        # Not the copies that gloo makes around them.
        return graph if graph == "raises" else [str(node.target) for node in graph.nodes if "c10d" in str(node.target)]

    return collectives(pair.ours), collectives(pair.gloo)


def moves_version_counters_as_on_gloo(pair: Pair, verb: Verb) -> tuple[Any, Any]:
    def moved(group: Group) -> list[bool]:
        x = plain(pair.rank)
        return [tensor._version > 0 for tensor in [x, *verb(group, x)]]

    return moved(pair.ours), moved(pair.gloo)


Kind = Callable[[Pair, Verb], tuple[Any, Any]]
KINDS: tuple[Kind, ...] = (
    of_a_functional_collectives_result,
    of_a_tensor_that_holds_tensors,
    of_a_subclass,
    of_a_fake_tensor,
    is_counted_as_on_gloo,
    is_traced_as_on_gloo,
    moves_version_counters_as_on_gloo,
)


def field(kind: Kind, verb: Verb) -> Case:
    """The case of a row and a column."""

    def case(pair: Pair) -> None:
        found, expected = kind(pair, verb)
        assert found == expected, f"{found}\nis not gloo's\n{expected}"

    case.__name__ = f"{verb.__name__}_{kind.__name__}"
    return needs_backend_class(WHY)(case)


TABLE = [field(kind, verb) for kind, verb in itertools.product(KINDS, VERBS)]

# --- what is not in the table -----------------------------------------------------------------------------------------


@needs_backend_class(WHY)
def works_under_a_mode_have_all_methods(pair: Pair) -> None:
    x = torch.ones(3)
    with CommDebugMode():
        work = dist.all_reduce(x, group=pair.ours, async_op=True)
    assert work.get_future().wait() == [x]
    assert (work.is_completed(), work.is_success(), work.exception(), work.result()) == (True, True, None, [x])


def a_changed_view_or_copy_does_not_count(pair: Pair) -> None:
    weight = torch.full((4,), pair.rank + 1.0, requires_grad=True)
    halves = weight.chunk(2)
    dist.broadcast(weight.detach(), pair.world_rank(0), group=pair.ours)
    halves[pair.rank % 2].sum().backward()
    assert weight.grad.sum() == 2.0
    # Through a copy, and by a division afterwards.
    for tensor in (torch.ones(3, 2).t(), torch.ones(3, dtype=torch.int64)):
        dist.all_reduce(tensor, dist.ReduceOp.AVG, group=pair.ours)
        assert (tensor._version, tensor.flatten()[0].item()) == (0, 1)


CASES = [*TABLE, *cases_in(globals())]


def in_the_world(rank: int) -> dict[str, str]:
    return run_cases(rank, CASES)


test = each_case(CASES, 2, run=in_the_world)
