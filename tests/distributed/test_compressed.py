"""Compressed all_reduce of buckets equals the NumPy oracle bit for bit: flat and by host, every codec, shm and TCP."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import bagua
from tests.distributed.compressed_oracle import CompressedAllReduce, Values
from tests.groups import on_ranks
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
    ("int4", {}),
    ("top_k", {"k": 3, "chunk": 20}),
]
SIZES = (5, 24, 1001)
#: Each codec with each size, and two that work in parts of 4096 elements with more of them in a chunk.
CASES = [*itertools.product(CODECS, SIZES), (CODECS[0], 16_501), (("int4", {}), 16_501)]
STEPS = 3


def values(rank: int, count: int, step: int, dtype: str) -> Values:
    rng = np.random.default_rng([rank, count, step])
    return (rng.standard_normal(count) * (rank + 1)).astype(dtype)


def same_bits(one: Values, other: Values) -> bool:
    return one.dtype == other.dtype and one.tobytes() == other.tobytes()


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
            if hierarchical and len(members) == 1:
                # One host compresses nothing: the plain sum or mean.
                total = np.sum([part.astype(np.float32) for part in given], axis=0, dtype=np.float32)
                expected = (total / np.float32(oracle.divisor)).astype(dtype)
            x[:] = given[group.rank]
            engine.mark_ready("x")
            assert engine.wait(timeout=60) == 1
            what = f"{codec!r} {count} {dtype} average={average} feedback={feedback} step {step}"
            assert same_bits(x, expected), what
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


def not_finite(rank: int, codec_name: str, options: dict[str, Any]) -> list[int]:
    """Three steps, of which the second has a NaN on rank 1: error memory stays as it was, and the third is as if the
    second had not been. Returns the counts of records that are not finite.
    """
    group = bagua.init()
    oracle = CompressedAllReduce(codec_name, options, group.size, group.size, True, feedback=True)
    x = np.zeros(64, np.float32)
    codec = bagua.Codec(codec_name, **options)
    bucket = bagua.Bucket("b", {"x": x}).append_centralized(compression=codec, error_feedback=True)
    assert bucket.error is not None
    counts = []
    with bagua.Engine("e") as engine:
        engine.register([bucket])
        for step in range(3):
            given = [values(each, 64, step, "float32") for each in range(group.size)]
            if step == 1:
                given[1][40] = np.nan
            expected = oracle.step(given)
            x[:] = given[rank]
            before = bucket.error.copy()
            engine.mark_ready("x")
            engine.wait(timeout=60)
            np.testing.assert_array_equal(x, expected, f"step {step}")
            assert np.isnan(x).any() == (step == 1)
            if step == 1:
                np.testing.assert_array_equal(bucket.error, before)
            counts.append(group.stats()["ops"]["compressed_all_reduce"]["nonfinite_records"])
    bagua.shutdown()
    return counts


@pytest.mark.parametrize(
    ("codec", "options", "records"),
    [
        # Rank 1's record of the chunk with the NaN; and that of the chunk's mean, which its owner encodes.
        ("minmax_u8", {}, [0, 2]),
        ("block_i8", {"block": 16}, [0, 2]),
        ("onebit", {}, [0, 2]),
        ("f16", {}, [0, 0]),
        ("top_k", {"k": 0.2}, [0, 0]),
        ("random_k", {"k": 0.2}, [0, 1]),
    ],
)
def test_a_round_that_is_not_finite_leaves_error_memory_alone_and_is_counted(
    codec: str, options: dict[str, Any], records: list[int]
) -> None:
    counts = make_world(2).run(not_finite, codec, options)
    for step, expected in ((0, 0), (1, records[1]), (2, records[1])):
        assert sum(of_rank[step] for of_rank in counts) == expected, counts
    assert records[0] == 0


@pytest.mark.parametrize("options", [{}, {"hosts": [[0, 1], [2]]}, {"hosts": [[0, 1, 2]]}], ids=str)
@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ({"compression": "minmax_u8"}, {"compression": "onebit"}),
        ({"compression": bagua.Codec("top_k", k=0.1)}, {"compression": bagua.Codec("top_k", k=0.2)}),
        ({"compression": "minmax_u8"}, {"compression": "minmax_u8", "average": False}),
        ({"compression": "onebit"}, {"compression": "onebit", "error_feedback": True}),
        ({"compression": "minmax_u8"}, {}),
    ],
    ids=["codec", "option", "average", "error feedback", "none"],
)
@on_ranks(3)
def test_ranks_that_differ_in_the_operation_get_mismatch_error(
    group: bagua.Group, mine: dict[str, Any], theirs: dict[str, Any], options: dict[str, Any]
) -> None:
    how = theirs if group.rank == group.size - 1 else mine
    bucket = bagua.Bucket("b", {"x": np.ones(100, np.float32)})
    bucket.append_centralized(**how, hierarchical="hosts" in options)
    engine = bagua.Engine("e")

    def step() -> None:
        # The others' failure may come first.
        engine.register([bucket])
        engine.mark_ready("x")
        engine.wait(timeout=30)

    with pytest.raises(bagua.MismatchError, match="does"):
        step()
    engine.shutdown()


def all_cases(rank: int, hosts: list[list[int]] | None) -> dict[str, int]:
    group = bagua.init()
    for ((name, options), count), dtype, average, feedback in itertools.product(
        CASES, ("float32", "float16"), (True, False), (False, True)
    ):
        if options.get("k") == 3 and count < 3:
            continue
        case(group, hosts, bagua.Codec(name, **options), count, dtype, average, feedback)
    ops = group.stats()["ops"]
    bagua.shutdown()
    return {kind: counts["calls"] for kind, counts in ops.items()}


@pytest.mark.parametrize("transport", ["auto", pytest.param("tcp", marks=pytest.mark.slow)])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_flat_results_equal_the_oracle(size: int, transport: str) -> None:
    world = make_world(size, env={"BAGUA_TRANSPORT": transport}, timeout=2 * DEADLINE)
    for calls in world.run(all_cases, None):
        assert calls["compressed_all_reduce"] == len(CASES) * 2 * 2 * 2 * STEPS


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [[[0, 1], [2, 3]], [[0, 1], [2]], [[0], [1]], [[0, 1]]], ids=str)
def test_results_by_host_equal_the_oracle(hosts: list[list[int]]) -> None:
    size = sum(len(host) for host in hosts)
    calls = make_world(size, hosts=hosts, timeout=2 * DEADLINE).run(all_cases, hosts)
    if len(hosts) == 1:
        assert all("compressed_all_reduce" not in of_rank for of_rank in calls), "one host compresses nothing"
