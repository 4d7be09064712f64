"""Buckets on devices: every operation returns the bits that it returns on the host."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import pytest

import bagua
from bagua import extension
from bagua.cuda.arrays import device_of
from tests.cases import slow_but
from tests.cuda import kernel_cases as cases
from tests.cuda.buckets import Queue, Sides, Tensors
from tests.cuda.device_arrays import Cuda
from tests.cuda.ranks import Ranks, device_rank, on_ranks

CODEC = ("minmax_u8", {})
#: Codecs that have kernels.
ON_DEVICES = ("minmax_u8", "f16", "bf16")
KERNELS = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
REPLICAS = ("weight", "left_peer_weight", "right_peer_weight")
HALVES = [[0, 1], [2]]


def centralized(tensors: Tensors, hierarchical: bool) -> None:
    tensors.raw.append_centralized(True, hierarchical, True)


def compressed(tensors: Tensors, hierarchical: bool) -> None:
    tensors.raw.append_compressed(extension.Codec(*CODEC), True, hierarchical, True)
    tensors.attach("error", tensors.count - sum(tensors.sizes[tensors.marks :]), np.float32)


def bytegrad(tensors: Tensors, hierarchical: bool) -> None:
    tensors.raw.append_compressed(extension.Codec(*CODEC), True, hierarchical, False)


def decentralized(tensors: Tensors, hierarchical: bool) -> None:
    tensors.raw.append_decentralized("ring", hierarchical)
    tensors.attach("peer_weight")


def low_precision(tensors: Tensors, hierarchical: bool) -> None:
    tensors.raw.append_low_precision_decentralized(extension.Codec(*CODEC), hierarchical)
    for name in REPLICAS:
        tensors.attach(name)


OPERATIONS = {
    operation.__name__: operation for operation in (centralized, compressed, bytegrad, decentralized, low_precision)
}
#: Those that are made of messages, and have the bits of the host by NCCL too.
BY_MESSAGES = ("compressed", "bytegrad", "decentralized", "low_precision")


@device_rank
def equals_the_host(rank: int, cuda: Cuda, operation: str, hierarchical: bool, dtypes: list[str]) -> None:
    stream = cuda.stream()

    def buckets(on: Cuda | None) -> list[Tensors]:
        made = []
        for dtype, flat in itertools.product(dtypes, (True, False)):
            padding = 4 if flat else 0
            made.append(Tensors(on, f"{dtype}-{flat}", flat=flat, dtype=dtype, padding=padding, stream=stream))
            OPERATIONS[operation](made[-1], hierarchical)
        return made

    random = np.random.default_rng(rank)

    def values(bucket: Tensors) -> Any:
        made = random.standard_normal(bucket.count).astype(bucket.dtype)
        if bucket.marks < len(bucket.sizes):
            made[-4:] = 0
        return made

    sides = Sides(cuda, buckets)
    for _ in range(3):
        sides.step(values, stream)
        assert all(host.raw.choice() == device.raw.choice() for host, device in sides.pairs)
    sides.shutdown()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_on_a_device_has_the_bits_of_the_host(ranks: Ranks, operation: str) -> None:
    ranks(2, equals_the_host, operation, False, ["float32", "float16"])


@pytest.mark.parametrize("operation", slow_but(["compressed"], BY_MESSAGES))
@pytest.mark.parametrize("size", [2, 3, 4])
def test_by_nccl_an_operation_has_the_bits_of_the_host_and_none_pass_through_it(
    ranks: Ranks, size: int, operation: str
) -> None:
    ranks.by("nccl", size, equals_the_host, operation, False, ["float32", "float16"])
    ranks.check_no_copies()


@pytest.mark.parametrize("operation", slow_but(["centralized", "compressed"], OPERATIONS))
def test_a_hierarchical_operation_on_a_device_has_the_bits_of_the_host(ranks: Ranks, operation: str) -> None:
    ranks(3, equals_the_host, operation, True, ["float32"], hosts=HALVES)


@device_rank
def ring(rank: int, cuda: Cuda, group: bagua.Group) -> list[dict[str, Any]]:
    """The compressed ring of every codec that has kernels, and what the group said before and after each."""
    stream, reports = cuda.stream(), []
    random = np.random.default_rng(rank)

    def buckets(on: Cuda | None, by: str) -> list[Tensors]:
        made = []
        for dtype, flat in itertools.product(KERNELS, (True, False)):
            made.append(Tensors(on, f"{dtype} {flat}", sizes=(1000, 3, 77), dtype=dtype, flat=flat, stream=stream))
            made[-1].raw.append_low_precision_decentralized(extension.Codec(by, {}), False)
            for name in REPLICAS:
                made[-1].attach(name, dtype=dtype)
        return made

    def values(bucket: Tensors, kind: str) -> Any:
        kind = kind if bucket.name == "float16 True" else "normal"
        name = KERNELS[bucket.name.split()[0]]
        seed = int(random.integers(1 << 30))
        return cases.elements(kind, name, bucket.count, seed=seed).view(bucket.dtype)

    for by in (*ON_DEVICES, "onebit"):
        sides = Sides(cuda, functools.partial(buckets, by=by), by)
        for kind in ("normal", "normal", "one NaN"):
            sides.step(functools.partial(values, kind=kind), stream)
        stats = group.stats()["cuda"]
        assert isinstance(stats, dict)
        reports.append(stats)
        sides.shutdown()
    return reports


@pytest.mark.parametrize("size", [2, 3])
def test_of_the_compressed_ring_only_records_come_to_the_host(ranks: Ranks, size: int) -> None:
    steps, elements, neighbours = 3, 1080, min(2, size - 1)
    for reports in ranks(size, ring):
        before = {"to_host_bytes": 0, "to_device_bytes": 0, "launches": 0}
        for by, stats in zip(ON_DEVICES, reports, strict=False):
            # Of float32, float16 and bfloat16, two buckets each: their own record, and those of the neighbours.
            records = 2 * sum(
                bagua.Codec(by).encoded_bytes(elements, dtype) for dtype in ("float32", "float16", "bfloat16")
            )
            assert stats["to_host_bytes"] - before["to_host_bytes"] == steps * records
            assert stats["to_device_bytes"] - before["to_device_bytes"] == steps * neighbours * records
            encoding = 2 if by == "minmax_u8" else 1
            assert stats["launches"] - before["launches"] == steps * 6 * (1 + encoding + 3 * 2)
            before = stats
        # A codec without kernels: weights and replicas are copied.
        assert reports[-1]["launches"] == before["launches"]
        assert reports[-1]["to_host_bytes"] - before["to_host_bytes"] == steps * 2 * elements * 4 * (4 + 2 + 2)


@pytest.mark.parametrize(("size", "hierarchical"), [(1, False), (2, True)])
def test_a_ring_of_one_member_has_the_bits_of_the_host(ranks: Ranks, size: int, hierarchical: bool) -> None:
    ranks(size, equals_the_host, "low_precision", hierarchical, ["float32"])


@device_rank
def large(rank: int, cuda: Cuda, group: bagua.Group) -> dict[str, Any]:
    def bucket(on: Cuda | None) -> list[Tensors]:
        # Rank 1 has them back to back, rank 0 has not: the ranks do the same all the same.
        made = Tensors(on, "large", flat=rank == 1, sizes=(3 << 20, 5, 1 << 20))
        centralized(made, False)
        return [made]

    sides = Sides(cuda, bucket)
    sides.step(lambda bucket: np.random.default_rng(rank).standard_normal(bucket.count).astype(np.float32))
    stats = group.stats()["cuda"]
    sides.shutdown()
    assert isinstance(stats, dict)
    return stats


def test_tensors_in_many_pieces_that_lie_apart_on_one_rank_only(ranks: Ranks) -> None:
    apart, adjacent = ranks(2, large)
    count = 4 * ((4 << 20) + 5)
    for stats in (apart, adjacent):
        assert (stats["collective"], stats["to_host_bytes"], stats["to_device_bytes"]) == ("staged", count, count)
        assert stats["pinned_bytes"] == 16 << 20
    assert (apart["device_bytes"], adjacent["device_bytes"]) == (count, 0)


@on_ranks(2)
def test_the_mean_of_peers_is_copied_within_the_device(rank: int, cuda: Cuda) -> None:
    stream = cuda.stream()
    for flat in (True, False):
        bucket = Tensors(cuda, "weights", flat=flat, stream=stream)
        decentralized(bucket, False)
        queue = Queue(f"engine {flat}", bucket)
        bucket.write(float(rank), stream)
        queue.step(stream)
        assert set(bucket.read(stream)) == {float(rank)}
        bucket.raw.copy_from_extra("peer_weight", stream=stream)
        assert set(bucket.read(stream)) == {0.5}
        queue.raw.shutdown()


@on_ranks(2)
def test_verbs_in_order_with_the_buckets_take_device_memory(rank: int, cuda: Cuda, group: bagua.Group) -> None:
    raw = group.communicator.engine("verbs")
    late, stream = cuda.stream(), cuda.stream()
    ones = np.full(3000, rank + 1, np.float32)
    code = extension.DTYPES["float32"]
    x, y, every = cuda.array(ones, stream=late), cuda.array(ones, stream=late), cuda.array(np.zeros(6000, np.float32))

    def place(*producers: int) -> extension.CudaCall:
        return raw.cuda_call(device_of(0), stream, producers, "auto")

    handles = [
        raw.run(extension.ALL_REDUCE, None, x.address, 3000, code, async_op=True, keep=x, place=place(late)),
        raw.run(extension.ALL_GATHER, y.address, every.address, 3000, code, async_op=True, place=place(late, 1)),
    ]
    raw.run(extension.BROADCAST, None, y.address, 3000, code, 0, 1, place=place(late))
    assert set(y.read(stream)) == {2.0}
    other = cuda.stream()
    for handle in handles:
        assert handle is not None
        handle.wait(30.0, stream=other)
    assert set(x.read(other)) == {3.0}
    assert every.read(other).tolist() == [1.0] * 3000 + [2.0] * 3000
    raw.shutdown()
