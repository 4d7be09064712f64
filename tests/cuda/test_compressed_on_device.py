"""Compressed all_reduce of buckets on devices: encoded, combined and decoded there, with the bits of the host."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import bagua
from bagua import extension
from bagua import group as groups
from tests.cuda import kernel_cases as cases
from tests.cuda.buckets import Queue, Tensors
from tests.cuda.device_arrays import LEGACY, Cuda
from tests.cuda.ranks import Ranks, device_rank

#: Codecs that have kernels.
CODECS = ("minmax_u8", "f16", "bf16")
KERNELS = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


def bucket(
    on: Cuda | None,
    sizes: tuple[int, ...],
    average: bool = True,
    hierarchical: bool = False,
    by: str = "minmax_u8",
    name: str = "bucket",
    **how: Any,
) -> Tensors:
    """A bucket whose operation is a compressed all_reduce without error feedback."""
    made = Tensors(on, name, sizes=sizes, **how)
    made.raw.append_compressed(extension.Codec(by, {}), average, hierarchical, False)
    return made


def step(tensors: Tensors, values: Any, name: str, stream: int = LEGACY) -> bytes:
    """The bytes of a bucket after one communication of these values."""
    queue = Queue(name, tensors)
    tensors.write(values, stream)
    queue.step(None if tensors.cuda is None else stream)
    found = tensors.read(stream).tobytes()
    queue.raw.shutdown()
    return found


def on_the_device() -> dict[str, Any]:
    """Returns the statistics that the group has about its CUDA device."""
    stats = groups.default(required=True).stats()["cuda"]
    assert isinstance(stats, dict)
    return stats


def communicated(on: Cuda | None, cases_of: Any, name: str, stream: int) -> list[bytes]:
    """The bytes of buckets after one communication by one engine; of each its operation's arguments and its values."""
    made = [(bucket(on, sizes, stream=stream, **how), values) for sizes, values, how in cases_of]
    for tensors, values in made:
        tensors.write(values.view(tensors.dtype), stream)
    queue = Queue(name, *(tensors for tensors, _ in made))
    queue.step(None if on is None else stream)
    found = [tensors.read(stream).tobytes() for tensors, _ in made]
    queue.raw.shutdown()
    return found


@device_rank
def every_kind(rank: int, cuda: Cuda, group: bagua.Group, dtype: str, counts: list[int]) -> None:
    stream, launches = cuda.stream(), 0
    for by in CODECS:
        chosen: list[Any] = []
        for (number, kind), count in itertools.product(enumerate(cases.KINDS), counts):
            values = cases.elements(kind, KERNELS[dtype], count, seed=count + rank)
            flat = count % 2 == 1
            sizes = (count,) if flat else (count // 2, count - count // 2)
            how = {"average": number % 2 == 0, "by": by, "flat": flat, "dtype": dtype, "name": f"{kind} {count}"}
            chosen.append((sizes, values, how))
        host, device = (communicated(on, chosen, f"{by} {on}", stream) for on in (None, cuda))
        for case, expected, found in zip(chosen, host, device, strict=True):
            assert expected == found, case[2]
        if group.size > 1:
            stats = on_the_device()
            assert stats["launches"] >= launches + 3 * len(chosen), by
            assert stats["collective"] is None, "no verb has been used"
            launches = stats["launches"]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_device_combines_to_the_bits_of_the_host(ranks: Ranks, size: int) -> None:
    ranks(size, every_kind, "float32", [1, 5, 1000])


@device_rank
def half_on_devices(rank: int, cuda: Cuda) -> bytes:
    values = np.random.default_rng(rank).normal(size=1001).astype(np.float32)
    found = step(bucket(cuda if rank == 0 else None, (1001,)), values, "mixed")
    assert found == step(bucket(None, (1001,)), values, "host")
    return found


def test_ranks_on_devices_and_on_the_host_combine_the_same_bucket(ranks: Ranks) -> None:
    found = ranks(3, half_on_devices)
    assert found == found[:1] * 3


@device_rank
def automatic(rank: int, cuda: Cuda) -> tuple[str | None, bytes]:
    """Returns the codec that an automatic operation keeps, and the last values that it left."""
    stream = cuda.stream()
    tensors = Tensors(cuda, "auto", sizes=(1001,), stream=stream)
    tensors.raw.append_automatic(extension.Codec("minmax_u8", {}), True, False)
    queue = Queue("engine", tensors)
    values = np.random.default_rng(0).normal(size=1001).astype(np.float32)
    for number in range(12):
        tensors.write(values + rank, stream)
        queue.step(stream)
        mean = tensors.read(stream)
        assert np.allclose(mean, values + 0.5, atol=0.1), number
    queue.raw.shutdown()
    return tensors.raw.choice(), mean.tobytes()


@pytest.mark.parametrize("collective", ["staged", "nccl"])
def test_the_choice_by_time_is_the_same_on_all_ranks_and_times_the_device(ranks: Ranks, collective: str) -> None:
    first, second = ranks(2, automatic, BAGUA_CUDA_COLLECTIVE=collective)
    assert first == second
    assert first[0] in ("", "minmax_u8")
    for report in ranks.reports:
        # Ten communications were timed.
        assert report["calls"]["cuEventElapsedTime"] == 10
    if collective == "nccl":
        ranks.check_no_copies()


# --- order ------------------------------------------------------------------------------------------------------------


def ring(tensors: Tensors) -> None:
    """A step of the compressed ring of two ranks."""
    tensors.raw.append_low_precision_decentralized(extension.Codec("f16", {}), False)
    for name in ("weight", "left_peer_weight", "right_peer_weight"):
        tensors.attach(name)


def peers(tensors: Tensors) -> None:
    """The mean of two ranks, beside the tensors."""
    tensors.raw.append_decentralized("ring", False)
    tensors.attach("peer_weight")


# --- failures ---------------------------------------------------------------------------------------------------------
