"""Codecs on a GPU: the host's bytes and bits, up to 100 million elements, in the order of streams."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

import bagua
from tests.cuda import kernel_cases as cases
from tests.cuda import test_codec_on_device as codecs
from tests.cuda.device_arrays import Cuda
from tests.cuda.ranks import OnDevice, Ranks


@pytest.mark.parametrize(
    "scenario",
    [
        codecs.test_records_and_values_are_those_of_the_host.on_ranks,
        codecs.test_arrays_may_be_at_any_address_and_cut_into_any_chunks.on_ranks,
    ],
    ids=lambda it: it.__name__,
)
@pytest.mark.parametrize("name", cases.CODED)
def test_records_and_values_are_those_of_the_host(ranks: Ranks, scenario: Any, name: str) -> None:
    ranks(1, scenario, name)


@pytest.mark.parametrize(
    "scenario",
    [
        codecs.test_a_million_elements_are_encoded_by_many_blocks.on_ranks,
        codecs.every_half,
        codecs.large_chunks,
        codecs.test_the_work_is_behind_that_of_every_producer_and_before_that_of_the_stream.on_ranks,
        codecs.test_a_stream_that_is_captured_is_refused_and_its_capture_stays_valid.on_ranks,
    ],
    ids=lambda it: it.__name__,
)
def test_what_holds_on_the_simulated_driver_holds_on_a_device(ranks: Ranks, scenario: Any) -> None:
    ranks(1, scenario)


def large(rank: int, name: str, count: int) -> None:
    """By minmax_u8, and by bf16 in chunks that are not aligned."""
    held = np.resize(cases.elements("normal", name, min(count, 10_000_019), seed=3), count)
    held[:: count // 7] = cases.elements("huge", name, held[:: count // 7].size)
    # Also not aligned, in chunks of more than 16 MiB and of less.
    for by, chunks, offset, shift in (
        ("minmax_u8", 1, 0, 0), ("minmax_u8", 5, 1, 3), ("minmax_u8", 1000, 0, 5), ("bf16", 5, 1, 3),
    ):  # fmt: skip
        # Gives its pinned memory back each time.
        cuda = Cuda()
        codecs.check(cuda, name, held, chunks, offset=offset, shift=shift, by=by)
        cuda.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", cases.CODED)
def test_a_hundred_million_elements_have_the_bytes_of_the_host(anywhere: Ranks, name: str) -> None:
    count = 100_000_000 if isinstance(anywhere, OnDevice) else 5_000
    anywhere(1, large, name, count, timeout=240)


def held_while_late(rank: int) -> None:
    cuda, codec = Cuda(), bagua.Codec("minmax_u8")
    stream = cuda.stream()
    x, out = cuda.array(codecs.ONES), cuda.empty(codecs.RECORD, np.uint8)
    back = cuda.empty(1000, np.float32)
    cuda.arrays.remove(x)
    weakref.finalize(x, cuda.driver.cuMemFree_v2, x.address)
    alive = weakref.ref(x)
    # Loads the kernels, which may wait for the device.
    codec.encode(x, out=out)
    back.read()
    gate = cuda.late(stream)
    codec.encode(x, out=out, stream=stream)
    del x
    gc.collect()
    # Another call finds that the kernels have not run, and holds on.
    codec.decode(out, back, stream=stream)
    assert alive() is not None
    gate.open()
    assert back.read(stream).tolist() == codecs.ONES.tolist()
    codec.decode(out, back)
    gc.collect()
    assert alive() is None
    cuda.close()


def test_a_call_holds_its_arrays_until_the_device_is_done(anywhere: Ranks) -> None:
    anywhere(1, held_while_late)
