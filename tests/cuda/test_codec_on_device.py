"""Codecs on CUDA arrays: the host's bytes, the order of streams, lifetimes, refusals.

On the simulated driver, which runs the kernels that the machine code names, compiled for the host. Where there is no
NVRTC, a pretended one names them.
"""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bagua
from tests.cases import slow_but
from tests.cuda import kernel_cases as cases
from tests.cuda.device_arrays import LEGACY, Cuda, DeviceArray
from tests.cuda.ranks import Ranks, arrays, on_ranks

#: Codecs that have kernels.
CODECS = ("minmax_u8", "f16", "bf16")
ONES = np.ones(1000, np.float32)
RECORD = 32 + 1024


@pytest.fixture
def rank(ranks: Ranks) -> Any:
    """`rank(function, …)` runs it in a process of its own, which must leave nothing behind and wait for nothing."""

    def run(function: Any, *arguments: Any, **variables: Any) -> Any:
        return ranks(1, function, *arguments, **variables)[0]

    return run


# --- values -----------------------------------------------------------------------------------------------------------


def part(whole: DeviceArray, first: int, count: int) -> DeviceArray:
    """Elements of an array, from `first` on."""
    found = copy.copy(whole)
    found.address, found.shape = whole.address + first * whole.dtype.itemsize, (count,)
    found.nbytes = count * whole.dtype.itemsize
    return found


def coded(cuda: Cuda, name: str, size: int) -> DeviceArray:
    """An array for elements of a type, whose values are integers of its size."""
    if name == "bf16":
        return cuda.empty(size, np.uint16, dlpack=True, bfloat16=True)
    return cuda.empty(size, {"f32": np.float32, "f16": np.float16}[name])


def check(
    cuda: Cuda, name: str, held: Any, chunks: int = 1, offset: int = 0, shift: int = 0, *, by: str = "minmax_u8"
) -> None:
    """Records and decoded elements are the host's, and nothing beside them is written."""
    codec, size = bagua.Codec(by), held.itemsize
    expected = cases.core_encode(by, name, held, chunks)
    whole = coded(cuda, name, offset + held.size)
    whole.write(np.concatenate([np.zeros(offset, held.dtype), held]).view(whole.dtype), whole.stream)
    records = cuda.array(np.full(shift + expected.size + 7, 0xA5, np.uint8))
    at = part(records, shift, expected.size)
    assert codec.encode(part(whole, offset, held.size), chunks=chunks, out=at) is at
    found = records.read()
    assert np.array_equal(found[shift : shift + expected.size], expected)
    assert (np.delete(found, np.s_[shift : shift + expected.size]) == 0xA5).all()
    back = coded(cuda, name, offset + held.size + 3)
    back.write(np.full(back.nbytes, 0xA5, np.uint8).view(back.dtype), back.stream)
    codec.decode(at, part(back, offset, held.size), chunks=chunks)
    restored = cases.core_decode(by, name, expected, held.size, chunks)
    found, inside = back.read().view(np.uint8), np.s_[offset * size : (offset + held.size) * size]
    assert np.array_equal(found[inside], restored.view(np.uint8))
    assert (np.delete(found, inside) == 0xA5).all()
    for array in (whole, records, back):
        array.free()


@pytest.mark.parametrize("name", slow_but(["f32"], cases.CODED))
@on_ranks(1, arrays)
def test_records_and_values_are_those_of_the_host(cuda: Cuda, name: str) -> None:
    for kind in cases.KINDS:
        for count in (1, 2, 31, 32, 33, 1000, 4099):
            for by in CODECS:
                check(cuda, name, cases.elements(kind, name, count, seed=count), by=by)


@pytest.mark.parametrize("name", slow_but(["f32"], cases.CODED))
@on_ranks(1, arrays)
def test_arrays_may_be_at_any_address_and_cut_into_any_chunks(cuda: Cuda, name: str) -> None:
    for by in CODECS:
        for offset, shift in ((1, 0), (0, 1), (3, 5), (7, 13), (8, 32)):
            check(cuda, name, cases.elements("normal", name, 613, seed=offset), offset=offset, shift=shift, by=by)
        for chunks, each in ((2, 1), (3, 61), (7, 600), (40, 3), (3, 64)):
            held = cases.elements("normal", name, chunks * each, seed=chunks)
            held[0] = cases.elements("one NaN", name, 1)[0]
            check(cuda, name, held, chunks, offset=chunks % 4, shift=chunks % 5, by=by)
        check(cuda, name, cases.elements("normal", name, 1)[:0], by=by)


@on_ranks(1, arrays)
def test_a_million_elements_are_encoded_by_many_blocks(cuda: Cuda) -> None:
    check(cuda, "f32", cases.elements("normal", "f32", 1_000_000))
    check(cuda, "f16", cases.elements("normal", "f16", 1_000_000), 5, offset=1)
    check(cuda, "bf16", cases.elements("huge", "bf16", 1_000_000), 32, shift=3)
    check(cuda, "f32", cases.elements("normal", "f32", 1_000_000), by="bf16")
    check(cuda, "bf16", cases.elements("huge", "bf16", 999_999), 3, offset=1, by="f16")


def every_half(rank: int) -> None:
    """Signalling NaNs too, which become quiet also where the type stays."""
    cuda, halves = Cuda(), np.arange(1 << 16, dtype=np.uint16)
    for name in ("f16", "bf16"):
        for by in ("f16", "bf16"):
            check(cuda, name, halves, by=by)
    check(cuda, "f32", cases.every_upper_half(), by="f16")
    check(cuda, "f32", cases.every_upper_half(), by="bf16")
    cuda.close()


def test_halves_of_all_bits_are_converted_as_on_the_host(rank: Any, ranks: Ranks) -> None:
    rank(every_half)
    # One launch each way, whatever the chunks are.
    assert ranks.reports[0]["calls"]["cuLaunchKernel"] == 6 * 2


def large_chunks(rank: int) -> None:
    cuda, codec = Cuda(), bagua.Codec("minmax_u8")
    # Three chunks of 8 MiB.
    held = np.tile(cases.elements("normal", "f32", 1 << 10), 3 << 11)
    held[::999_983] = cases.elements("huge", "f32", 7)
    x, out = cuda.array(held.view(np.float32)), cuda.empty(codec.encoded_bytes(held.size, chunks=3), np.uint8)
    codec.encode(x, chunks=3, out=out)
    assert np.array_equal(out.read(), cases.core_encode("minmax_u8", "f32", held, 3))
    cuda.close()


def test_large_chunks_are_encoded_by_two_launches(rank: Any, ranks: Ranks) -> None:
    rank(large_chunks)
    assert ranks.reports[0]["calls"]["cuLaunchKernel"] == 2


# --- order ------------------------------------------------------------------------------------------------------------


@on_ranks(1, arrays)
def test_the_work_is_behind_that_of_every_producer_and_before_that_of_the_stream(cuda: Cuda) -> None:
    codec = bagua.Codec("minmax_u8")
    own, other, call = cuda.stream(), cuda.stream(), cuda.stream()
    expected = codec.encode(ONES)
    late = np.full(RECORD, 7, np.uint8)

    def encoded(x: DeviceArray, stream: int | None, *, dlpack: bool = False) -> None:
        # What another stream writes to `out` before the call is written before the result.
        out = cuda.array(late, stream=other, dlpack=dlpack)
        codec.encode(x, out=out, stream=stream)
        back = cuda.array(3 * ONES, stream=other, dlpack=dlpack)
        codec.decode(out, back, stream=stream)
        assert back.read(LEGACY if stream is None else stream).tolist() == ONES.tolist()
        assert np.array_equal(out.read(LEGACY if stream is None else stream), expected)

    # The interface names a stream, of each array; DLPack orders the stream that it is given.
    encoded(cuda.array(ONES, stream=own), call)
    encoded(cuda.array(ONES, stream=own, dlpack=True), call, dlpack=True)
    encoded(cuda.array(ONES, stream=own), None)
    # It names none: the work is that of the call's stream.
    x = cuda.array(ONES, stream=call)
    x.stream = None  # type: ignore[assignment]
    encoded(x, call)
    # The stream of the calling thread.
    encoded(cuda.array(ONES, stream=own), 2)


@on_ranks(1, arrays)
def test_a_call_holds_its_arrays_until_the_device_is_done(cuda: Cuda) -> None:
    codec = bagua.Codec("minmax_u8")
    x, out = cuda.array(ONES), cuda.empty(RECORD, np.uint8)
    cuda.arrays.remove(x)
    weakref.finalize(x, cuda.driver.cuMemFree_v2, x.address)
    alive = weakref.ref(x)
    codec.encode(x, out=out)
    del x
    gc.collect()
    # The kernels have not run yet; a later call finds that out, and holds on.
    back = cuda.empty(1000, np.float32)
    codec.decode(out, back)
    assert alive() is not None
    assert back.read().tolist() == ONES.tolist()
    # The device is done, and a later call lets go.
    codec.decode(out, back)
    gc.collect()
    assert alive() is None


@on_ranks(1, arrays)
def test_a_stream_that_is_captured_is_refused_and_its_capture_stays_valid(cuda: Cuda) -> None:
    codec = bagua.Codec("minmax_u8")
    stream = cuda.stream()
    x, out = cuda.array(ONES, stream=stream), cuda.empty(RECORD, np.uint8)
    x.read(stream)
    with cuda.driver.captured(stream):
        for call in (lambda: codec.encode(x, out=out, stream=stream), lambda: codec.decode(out, x, stream=stream)):
            with pytest.raises(NotImplementedError, match="captured"):
                call()
    x.stream = LEGACY
    codec.encode(x, out=out)
    assert np.array_equal(out.read(), codec.encode(ONES))


# --- refusals ---------------------------------------------------------------------------------------------------------


def refused(rank: int) -> None:
    cuda, codec = Cuda(), bagua.Codec("minmax_u8")
    x, out = cuda.array(ONES), cuda.empty(RECORD, np.uint8)

    def refuse(kind: type[Exception], text: str, x: Any = x, out: Any = out, **options: Any) -> None:
        with pytest.raises(kind, match=text):
            codec.encode(x, out=out, **options)
        if out is not None:
            with pytest.raises(kind, match=text.replace("out is", "(data|out) is").replace("x is", "(data|out) is")):
                codec.decode(out, x, **options)

    refuse(TypeError, "out=", out=None)
    refuse(TypeError, "is on the host, x is on cuda:0", out=np.empty(RECORD, np.uint8))
    refuse(TypeError, "is on cuda:0, x is on the host", x=ONES.copy())
    refuse(TypeError, "uint8", out=cuda.empty(RECORD, np.int8))
    refuse(TypeError, "float64", x=cuda.empty(1000, np.float64))
    refuse(ValueError, "have 1056 bytes, not 1024", out=cuda.empty(RECORD - 32, np.uint8))
    refuse(ValueError, "3 equal", chunks=3)
    refuse(ValueError, "chunks", chunks=0)
    refuse(ValueError, "contiguous", x=cuda.array(ONES, strides=(8,)))
    refuse(ValueError, "contiguous", out=cuda.empty(RECORD, np.uint8, strides=(2,)))
    refuse(ValueError, "overlap", out=cuda.empty(RECORD, np.uint8, data=(x.address, False)))
    refuse(
        ValueError, "aligned", x=cuda.empty(999, np.float32, data=(x.address + 2, False)), out=part(out, 0, 1024 + 32)
    )
    refuse(ValueError, "not a stream", stream=0)
    refuse(TypeError, "CUstream", stream="1")
    for read_only, call in (
        (cuda.empty(RECORD, np.uint8, data=(out.address, True)), lambda it: codec.encode(x, out=it)),
        (cuda.empty(1000, np.float32, data=(x.address, True)), lambda it: codec.decode(out, it)),
    ):
        with pytest.raises(ValueError, match="read-only"):
            call(read_only)
    other = Cuda(1)
    there = other.empty(RECORD, np.uint8)
    refuse(TypeError, "is on cuda:1, x is on cuda:0|is on cuda:0, x is on cuda:1", out=there)
    with pytest.raises(ValueError, match="have 2016 bytes"):
        bagua.Codec("f16").encode(x, out=out)
    for name in ("block_i8", "top_k", "random_k", "onebit", "int4"):
        unknown = bagua.Codec(name)
        with pytest.raises(NotImplementedError, match=f"codec {name} "):
            unknown.encode(x, out=out)
        with pytest.raises(NotImplementedError, match=f"codec {name} "):
            unknown.decode(out, x)
    cuda.driver.start()
    codec.encode(x, out=out)
    assert np.array_equal(out.read(), codec.encode(ONES))
    cuda.close()
    other.close()


def test_what_cannot_be_encoded_is_refused_before_anything_is_launched(rank: Any, ranks: Ranks) -> None:
    rank(refused)
    assert ranks.reports[0]["calls"]["cuLaunchKernel"] == 2


def without_nvrtc(rank: int) -> None:
    cuda, codec = Cuda(), bagua.Codec("minmax_u8")
    x, out = cuda.array(ONES), cuda.empty(RECORD, np.uint8)
    for call in (lambda: codec.encode(x, out=out), lambda: codec.decode(out, x)):
        with pytest.raises(bagua.BaguaError, match=r"minmax_u8 need NVRTC .*BAGUA_LIBNVRTC=/nowhere"):
            call()
    with pytest.raises(bagua.BaguaError, match="kernels of convert need NVRTC"):
        bagua.Codec("f16").encode(x, out=cuda.empty(2016, np.uint8))
    assert codec.encode(ONES).size == RECORD
    assert x.read().tolist() == ONES.tolist()
    cuda.close()


def test_without_nvrtc_the_error_names_it(rank: Any, tmp_path: Path) -> None:
    rank(without_nvrtc, BAGUA_LIBNVRTC="/nowhere/libnvrtc.so", XDG_CACHE_HOME=tmp_path)
