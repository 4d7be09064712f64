"""`Group.new_group(ranks, ordered=True)`: a sub-group in the order of its ranks does what any other group does."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

import bagua
from bagua.process_state import process
from tests.distributed import test_neutral_verbs as verbs
from tests.groups import arrive_waiting, on_ranks
from tests.waits import await_arrival

#: One host, TCP alone, and two hosts, of 3 and 4 ranks: the options of a world, and orders of its ranks.
PLACES = [
    (3, {}),
    pytest.param(3, {"hosts": [[0, 2], [1]]}, marks=pytest.mark.slow),
    pytest.param(3, {"env": {"BAGUA_TRANSPORT": "tcp"}}, marks=pytest.mark.slow),
    pytest.param(4, {}, marks=pytest.mark.slow),
    pytest.param(4, {"env": {"BAGUA_TRANSPORT": "tcp"}}, marks=pytest.mark.slow),
    pytest.param(4, {"hosts": [[0, 1], [2, 3]]}, marks=pytest.mark.slow),
    pytest.param(4, {"hosts": [[0, 3], [1, 2]]}, marks=pytest.mark.slow),
]
ORDERS = {3: [[2, 0, 1], [1, 2, 0], [2, 0]], 4: [[3, 1, 0, 2], [2, 3, 0, 1], [3, 0, 2]]}


def check_place(group: bagua.Group, order: list[int], rank: int) -> None:
    assert (group.rank, group.size, group.ranks) == (order.index(rank), len(order), order)
    gathered = np.zeros((group.size, 1), np.int64)
    group.all_gather(np.array([rank]), out=gathered)
    assert gathered[:, 0].tolist() == order
    for root in range(group.size):
        x = np.full(5, float(rank))
        group.broadcast(x, root)
        assert (x == order[root]).all()


def check_messages(group: bagua.Group, order: list[int], rank: int) -> None:
    for size in (4, 1 << 20):
        receives = [
            (peer, group.recv(np.empty(size, np.int32), peer, tag=peer, async_op=True))
            for peer in range(group.size)
            if peer != group.rank
        ]
        for peer, _ in receives:
            group.send(np.full(size, rank, np.int32), peer, tag=group.rank)
        for peer, receive in receives:
            assert (receive.wait() == order[peer]).all()
    if group.rank == 0:
        senders = []
        for _ in range(group.size - 1):
            x, sender = group.recv_any(np.empty(1, np.int32), tag=1000)
            assert x[0] == order[sender]
            senders.append(sender)
        assert sorted(senders) == list(range(1, group.size))
    else:
        group.send(np.array([rank], np.int32), 0, tag=1000)


def check_arenas(group: bagua.Group) -> None:
    x = group.empty(1000)
    x[:] = group.rank + 1
    group.all_reduce(x)
    assert (x == group.size * (group.size + 1) / 2).all()
    x[:] = group.rank
    group.broadcast(x, group.size - 1)
    assert (x == group.size - 1).all()


@pytest.mark.parametrize(("size", "options"), PLACES, ids=str)
@on_ranks()
def test_verbs_messages_and_arenas_follow_the_order(rank: int, size: int, options: dict[str, Any]) -> None:
    world = bagua.group.default(required=True)
    for order in ORDERS[world.size]:
        group = world.new_group(order, ordered=True)
        assert (group is not None) == (rank in order)
        if group is not None:
            assert group.name.endswith(",".join(map(str, order)))
            check_place(group, order, rank)
            check_messages(group, order, rank)
            check_arenas(group)
            # Some of these call the functions of the package.
            process.default_group = group
            digest = hashlib.sha256()
            verbs.reductions(group, lambda x, digest=digest: digest.update(x.tobytes()))
            verbs.movements(group)
            verbs.messages(group)
            process.default_group = world
            verbs.asynchronous(group)
            # All ranks have the same bits.
            digests = np.zeros((group.size, 32), np.uint8)
            group.all_gather(np.frombuffer(digest.digest(), np.uint8).copy(), out=digests)
            assert (digests == digests[0]).all()
            # The order counts in a sub-group of it, and not without `ordered`.
            turned = group.new_group(list(reversed(range(group.size))), ordered=True)
            assert turned is not None
            check_place(turned, list(reversed(order)), rank)
            ascending = group.new_group(list(reversed(range(group.size))))
            assert ascending is not None
            check_place(ascending, order, rank)
        world.barrier()
    with pytest.raises(ValueError, match="each rank only once"):
        world.new_group([1, 0, 1], ordered=True)


@on_ranks(3)
def test_a_rank_that_leaves_and_one_that_is_late_are_named_by_their_world_ranks(rank: int, group: bagua.Group) -> None:
    part = group.new_group([2, 0, 1], ordered=True)
    assert part is not None
    part.barrier()
    if rank == 0:
        part.leave()
    else:
        with pytest.raises(bagua.PeerLostError, match="left the group") as caught:
            part.recv(np.empty(1, np.float32), 1)
        assert caught.value.rank == 0
    group.barrier()
    # A deadline names the rank that did not come, by its rank in the world.
    late = group.new_group([1, 2, 0], ordered=True)
    assert late is not None
    late.barrier()
    if rank == 0:
        # Rank 1 is there, or it would be missing too.
        await_arrival("waits", [1])
    elif rank == 1:
        arrive_waiting("waits", rank)
    if rank != 2:
        with pytest.raises(bagua.BaguaTimeoutError) as timed_out:
            late.barrier(timeout=0.5 if rank == 0 else 60)
        assert timed_out.value.missing == (2,)
    group.barrier()
