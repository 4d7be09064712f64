"""Averaging with peers as a bucket operation, without a model, against the mean of the peers' weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import bagua.torch_api as bagua
from bagua.torch_api.bucket import BaguaBucket
from bagua.torch_api.communication import get_backend
from tests.distributed.torch_ranks import cases_in, each_case

COUNT = 50_000
ROUNDS = 5


def peers(mode: str, i: int, n: int, r: int) -> set[int]:
    """Whose weights member i takes in round r, beside its own."""
    powers = [2**j for j in range(n) if 2**j < n]
    if mode == "all":
        found = set(range(n))
    elif mode == "shift_one":
        half = n // 2
        found = {(r + i) % ((n + 1) // 2) + half if i < half else (i - half - r) % half}
    elif mode == "ring":
        found = {(i - 1) % n, (i + 1) % n}
    elif mode == "exponential":
        found = {(i + power) % n for power in powers}
    else:
        found = {(i + powers[r % len(powers)]) % n}
    return found - {i}


def every_mode_gives_the_mean_of_the_peers(rank: int) -> None:
    size = bagua.get_world_size()
    for mode in ("all", "shift_one", "ring", "exponential", "one_peer_exponential"):
        tensor = torch.zeros(COUNT).ensure_bagua_tensor(f"w {mode}", f"model {mode}")
        bucket = BaguaBucket([tensor], f"bucket {mode}", flatten=True)
        result = bucket.flattened_tensor()
        if mode == "shift_one" and size % 2:
            with pytest.raises(ValueError, match=str(size)):
                bucket.append_decentralized_synchronous_op(result, False, mode)
            continue
        op = bucket.append_decentralized_synchronous_op(result, False, mode)
        backend = get_backend(f"model {mode}")
        backend.register_ordered_buckets([bucket])
        for round_ in range(ROUNDS):
            weights = [np.random.default_rng([each, round_]).standard_normal(COUNT, np.float32) for each in range(size)]
            tensor.copy_(torch.from_numpy(weights[rank]))
            before = sent()
            backend.mark_communication_ready(tensor)
            backend.wait_pending_comm_ops()
            members = sorted(peers(mode, rank, size, round_) | {rank})
            total = weights[members[0]]
            for member in members[1:]:
                total = total + weights[member]
            expected = torch.from_numpy(total / np.float32(len(members)))
            assert torch.equal(result, expected), (mode, round_)
            assert torch.equal(tensor, torch.from_numpy(weights[rank])), "the bucket stays as it was"
            if mode == "shift_one":
                # One model a round, and headers; nothing inside a host.
                moved = sent() - before
                assert moved == 0 or 4 * COUNT <= moved <= 1.02 * 4 * COUNT
            op.copy_back_peer_weight(bucket.backend_bucket)
            assert torch.equal(tensor, expected)
        assert bucket.backend_bucket.step == ROUNDS


def sent() -> int:
    ops = bagua.communication._get_default_group().get_global_communicator().raw.stats()["ops"]
    return int(ops.get("gossip", {"wire_bytes_sent": 0})["wire_bytes_sent"])


def a_peer_weight_of_another_size_is_refused(rank: int) -> None:
    tensor = torch.zeros(10).ensure_bagua_tensor("x", "sizes")
    bucket = BaguaBucket([tensor], "sizes", flatten=True, alignment=4)
    with pytest.raises(ValueError, match="12 elements"):
        bucket.append_decentralized_synchronous_op(torch.zeros(10))
    bucket.append_decentralized_synchronous_op(torch.zeros(12))


def a_backend_belongs_to_one_group(rank: int) -> None:
    own = bagua.communication.new_group([0])
    if rank == 0:
        backend = get_backend("alone", own)
        assert backend.size == 1
        assert get_backend("alone", own) is backend
        with pytest.raises(ValueError, match="alone"):
            get_backend("alone", bagua.communication._get_default_group())


CASES = cases_in(globals())

test = each_case(CASES, 2, 3, 4, "1+1", "1+1+1", "1+1+1+1")
