"""CUDA arrays that are refused: before anything is sent, and so that the group goes on."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

import bagua
from tests.cuda.device_arrays import Cuda
from tests.cuda.ranks import Ranks, device_rank, on_ranks

ONES = np.ones((2, 4), np.float32)


@on_ranks(2)
def test_arrays_that_cannot_travel_are_refused_and_the_group_goes_on(rank: int, cuda: Cuda, group: bagua.Group) -> None:

    def refuse(kind: type[Exception], text: str, x: Any, **options: Any) -> None:
        with pytest.raises(kind, match=text):
            group.all_reduce(x, **options)

    good = cuda.array(ONES)
    refuse(TypeError, "version 1", cuda.array(ONES, version=1))
    refuse(TypeError, "mask", cuda.array(ONES, mask=object()))
    refuse(TypeError, "supported are", cuda.array(ONES, typestr="|V4"))
    refuse(TypeError, "byte|supported are", cuda.array(ONES, typestr=">f4"))
    refuse(ValueError, "contiguous", cuda.array(ONES, strides=(4, 8)))
    refuse(ValueError, "read-only", cuda.array(ONES, data=(good.address, True)))
    refuse(ValueError, "stream 0", _named(cuda, 0))
    refuse(TypeError, "its memory is not", cuda.array(ONES, data=(ONES.ctypes.data, False)))
    for stream in (0, -1):
        refuse(ValueError, "not a stream", good, stream=stream)
    refuse(TypeError, "CUstream", good, stream="1")
    refuse(TypeError, "out is on the host, the array is on cuda:0", good, out=ONES.copy())
    refuse(TypeError, "out is on cuda:0, the array is on the host", ONES.copy(), out=good)
    refuse(ValueError, "shape", good, out=cuda.empty((4, 2), "float32"))
    refuse(TypeError, "float64", good, out=cuda.empty((2, 4), "float64"))
    # A result of another shape needs a place.
    for verb in (group.all_gather, group.gather, group.reduce_scatter, group.scatter):
        if rank == 0 or verb in (group.all_gather, group.reduce_scatter):
            with pytest.raises(TypeError, match="out="):
                verb(good)
    # A read-only array may be a source, and the group goes on.
    readable = cuda.array(ONES, data=(good.address, True))
    out = cuda.empty((2, 4), "float32")
    group.all_reduce(readable, out=out)
    assert out.read().tolist() == (2 * ONES).tolist()
    group.all_reduce(good, stream=2)


def _named(cuda: Cuda, stream: int) -> Any:
    x = cuda.array(ONES)
    x.stream = stream
    return x


@device_rank
def here_and_there(rank: int, cuda: Cuda, group: bagua.Group) -> str:
    x: Any = ONES.copy() if rank == 0 else cuda.array(ONES)
    with pytest.raises(bagua.MismatchError) as raised:
        group.all_reduce(x, timeout=20.0)
    return str(raised.value)


@pytest.mark.parametrize("variables", [{"BAGUA_TRANSPORT": "tcp"}, {}], ids=["tcp", "shm"])
def test_host_memory_on_one_rank_and_a_device_on_another_is_a_mismatch_on_both(
    ranks: Ranks, variables: dict[str, str]
) -> None:
    for text in ranks(2, here_and_there, **variables):
        assert "device" in text, text


class Pretended:
    """An array that says that it is on a device, where there is none."""

    __cuda_array_interface__ = {  # noqa: RUF012 - that is the protocol
        "version": 3,
        "shape": (1,),
        "typestr": "<f4",
        "data": (4096, False),
    }


def without_cuda(rank: int) -> tuple[str, str]:
    import bagua.cuda

    group = bagua.init()
    with pytest.raises(bagua.BaguaError) as raised:
        group.all_reduce(Pretended())
    x = ONES.copy()
    group.all_reduce(x)
    assert x.tolist() == (2 * ONES).tolist()
    bagua.shutdown()
    return str(raised.value), bagua.cuda.why_not() or ""


def test_without_cuda_the_error_says_why_not_and_the_group_goes_on(ranks: Ranks) -> None:
    for text, why_not in ranks(2, without_cuda, clean=False, BAGUA_LIBCUDA="/nowhere/libcuda.so.1"):
        assert text == why_not
        assert "/nowhere/libcuda.so.1" in text


def collectives_of(rank: int, wanted: list[str]) -> str:
    os.environ["BAGUA_CUDA_COLLECTIVE"] = wanted[rank]
    cuda, group = Cuda(), bagua.init()
    x = cuda.array(ONES)
    text = ""
    try:
        group.all_reduce(x)
    except (bagua.BaguaError, ValueError) as error:
        text = f"{type(error).__name__}: {error}"
    os.environ["BAGUA_CUDA_COLLECTIVE"] = "staged"
    group.all_reduce(x)
    bagua.shutdown()
    cuda.close()
    return text


def test_different_values_of_the_variable_are_an_error_on_all_ranks(ranks: Ranks) -> None:
    for text in ranks(2, collectives_of, ["auto", "staged"]):
        assert text.startswith("BaguaError: BAGUA_CUDA_COLLECTIVE is auto on rank 0 of the group and staged on rank 1")


def test_an_unknown_collective_is_refused_before_anything_is_sent(ranks: Ranks) -> None:
    for text in ranks(2, collectives_of, ["fastest", "fastest"]):
        assert text.startswith("ValueError: BAGUA_CUDA_COLLECTIVE must be one of auto, nccl, staged; got 'fastest'")
