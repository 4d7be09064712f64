"""Compressed all_reduce of buckets equals the NumPy oracle bit for bit: flat and by host, every codec, shm and TCP."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import bagua
from tests.distributed.compressed_oracle import CompressedAllReduce, Values
from tests.world import DEADLINE, make_world

CODECS: list[tuple[str, dict[str, Any]]] = [
    ("minmax_u8", {}),
    ("f16", {}),
    ("bf16", {}),
    ("block_i8", {"block": 64}),
    ("top_k", {"k": 0.1}),
    ("top_k", {"k": 3}),
    ("random_k", {"k": 0.2, "seed": 5}),
    ("onebit", {}),
]
SIZES = (5, 24, 1001)
STEPS = 3


def values(rank: int, count: int, step: int, dtype: str) -> Values:
    rng = np.random.default_rng([rank, count, step])
    return (rng.standard_normal(count) * (rank + 1)).astype(dtype)


def case(
    group: bagua.Group,
    hosts: list[list[int]] | None,
    codec: bagua.Codec,
    count: int,
    dtype: str,
    average: bool,
    feedback: bool,
) -> None:
    """Three steps of one bucket against the oracle."""
    ranks, hierarchical = group.size, hosts is not None
    members = hosts or [[rank] for rank in range(ranks)]
    oracle = CompressedAllReduce(codec.name, codec.options, len(members), ranks, average, feedback=feedback)
    x = np.zeros(count, dtype)
    bucket = bagua.Bucket("b", {"x": x}).append_centralized(
        average=average, hierarchical=hierarchical, compression=codec, error_feedback=feedback
    )
    with bagua.Engine("e") as engine:
        engine.register([bucket])
        for step in range(STEPS):
            given = [values(rank, count, step, dtype) for rank in range(ranks)]
            sums = [
                np.sum([given[rank].astype(np.float32) for rank in member], axis=0, dtype=np.float32).astype(dtype)
                for member in members
            ]
            before = oracle.errors
            expected = oracle.step(sums)
            x[:] = given[group.rank]
            engine.mark_ready("x")
            assert engine.wait(timeout=60) == 1
            what = f"{codec!r} {count} {dtype} average={average} feedback={feedback} step {step}"
            if len(members) > 1:
                np.testing.assert_array_equal(x, expected, what)
            if feedback and oracle.errors is not None:
                check_feedback(group, bucket, members, oracle, before, sums, x, what)


def check_feedback(
    group: bagua.Group,
    bucket: bagua.Bucket,
    members: list[list[int]],
    oracle: CompressedAllReduce,
    before: list[Values] | None,
    sums: list[Values],
    result: Values,
    what: str,
) -> None:
    """Each member's error is the oracle's, and nothing is lost over all of them."""
    leads = [member[0] for member in members]
    assert bucket.error is not None
    assert oracle.errors is not None
    mine = oracle.errors[leads.index(group.rank)] if group.rank in leads else np.zeros_like(bucket.error)
    np.testing.assert_array_equal(bucket.error, mine, what)
    if len(members) == 1 or result.dtype != np.float32:
        return
    given = sum(s.astype(np.float64) for s in sums)
    earlier = 0 if before is None else sum(e.astype(np.float64) for e in before)
    later = sum(e.astype(np.float64) for e in oracle.errors)
    scale = max(1.0, float(np.abs(given).max()))
    np.testing.assert_allclose(given + earlier, oracle.divisor * result.astype(np.float64) + later, atol=1e-5 * scale)


def all_cases(rank: int, hosts: list[list[int]] | None) -> dict[str, int]:
    group = bagua.init()
    for (name, options), count, dtype, average, feedback in itertools.product(
        CODECS, SIZES, ("float32", "float16"), (True, False), (False, True)
    ):
        if options.get("k") == 3 and count < 3:
            continue
        case(group, hosts, bagua.Codec(name, **options), count, dtype, average, feedback)
    ops = group.stats()["ops"]
    bagua.shutdown()
    return {kind: counts["calls"] for kind, counts in ops.items()}


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_flat_results_equal_the_oracle(size: int, transport: str) -> None:
    world = make_world(size, env={"BAGUA_TRANSPORT": transport}, timeout=2 * DEADLINE)
    for calls in world.run(all_cases, None):
        assert calls["compressed_all_reduce"] == len(CODECS) * len(SIZES) * 2 * 2 * 2 * STEPS


@pytest.mark.parametrize("hosts", [[[0, 1], [2, 3]], [[0, 1], [2]], [[0], [1]], [[0, 1]]], ids=str)
def test_results_by_host_equal_the_oracle(hosts: list[list[int]]) -> None:
    size = sum(len(host) for host in hosts)
    calls = make_world(size, hosts=hosts, timeout=2 * DEADLINE).run(all_cases, hosts)
    if len(hosts) == 1:
        assert all("compressed_all_reduce" not in of_rank for of_rank in calls), "one host compresses nothing"
