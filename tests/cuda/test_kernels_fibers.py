"""The threads of a block as fibers: barriers, also those that some threads never reach, shuffles, shared memory."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.cuda.kernels_on_host import ROOT, Kernels, room

DIVERGED = 3

#: Kernels of this file's own.
SOURCE = r"""
#include "device.cuh"

// Reverses what the threads of a block write.
KERNEL reverse(u32 *out) {
    DYNAMIC_SHARED(u32, shared);
    shared[threadIdx.x] = blockIdx.x * 1000 + threadIdx.x;
    __syncthreads();
    out[blockIdx.x * blockDim.x + threadIdx.x] = shared[blockDim.x - 1 - threadIdx.x];
}
EXPORT(reverse)

// Sums over each warp by every kind of shuffle.
KERNEL shuffles(u32 *out) {
    u32 by_xor = threadIdx.x, by_down = threadIdx.x;
    for (u32 distance = 16; distance > 0; distance /= 2) {
        by_xor += __shfl_xor_sync(0xffffffffu, by_xor, distance);
        by_down += __shfl_down_sync(0xffffffffu, by_down, distance);
    }
    by_down = __shfl_sync(0xffffffffu, by_down, 0);
    // Only the lower lanes of a warp, the others go on.
    if (threadIdx.x % 32 < 4) {
        by_down += __shfl_sync(0xfu, threadIdx.x, 3) % 32;
        __syncwarp(0xfu);
    }
    out[threadIdx.x] = by_xor * 1000 + by_down;
    atomicAdd(out + blockDim.x, 1u);
}
EXPORT(shuffles)

// Shared memory of the first thread is read before anything was written.
KERNEL unwritten(u32 *out) {
    DYNAMIC_SHARED(u32, shared);
    out[blockIdx.x] = shared[threadIdx.x];
    shared[threadIdx.x] = 0;
}
EXPORT(unwritten)

KERNEL some_threads_at_the_barrier(u32 *out) {
    if (threadIdx.x < 5) __syncthreads();
    out[threadIdx.x] = 1;
}
EXPORT(some_threads_at_the_barrier)

KERNEL a_lane_is_missing(u32 *out) {
    if (threadIdx.x != 7) out[threadIdx.x] = __shfl_sync(0xffffffffu, threadIdx.x, 0);
}
EXPORT(a_lane_is_missing)

KERNEL two_kinds_of_barriers(u32 *out) {
    if (threadIdx.x % 2 == 0) __syncwarp();
    else __syncthreads();
    out[threadIdx.x] = 1;
}
EXPORT(two_kinds_of_barriers)

KERNEL not_in_its_mask(u32 *out) {
    out[threadIdx.x] = __shfl_sync(threadIdx.x == 3 ? 0x7u : 0xfu, threadIdx.x, 0);
}
EXPORT(not_in_its_mask)
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    """The kernels above."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++ to compile the kernels for the host with")
    folder = tmp_path_factory.mktemp("fibers")
    (folder / "own.cu").write_text(SOURCE)
    host = ROOT / "tests/cuda/host"
    includes = [f"-I{path}" for path in (ROOT / "rust/bagua-cuda/kernels", host)]
    flags = [
        "-std=c++17",
        "-shared",
        "-fPIC",
        "-O1",
        "-DBAGUA_ON_HOST",
        "-DDEFAULT_NAN_SIGN=1u",
        "-Wno-unknown-pragmas",
    ]
    files: list[str | Path] = [host / "fibers.cpp", host / "kernels.cpp", "-x", "c++", folder / "own.cu"]
    subprocess.run([compiler, *flags, *includes, "-o", folder / "libown.so", *files], check=True)
    return Kernels(folder / "libown.so")


def test_threads_meet_at_the_barriers_of_their_block(kernels: Kernels) -> None:
    for threads in (1, 31, 32, 256, 1024):
        out = room(3 * threads * 4)
        assert kernels.outcome("reverse", (3,), out, shared=threads * 4, threads=threads) == 0
        expected = [block * 1000 + thread for block in range(3) for thread in reversed(range(threads))]
        assert out.view(np.uint32).tolist() == expected


def test_lanes_exchange_values(kernels: Kernels) -> None:
    out = room(65 * 4)
    out.view(np.uint32)[64] = 0
    assert kernels.outcome("shuffles", (2,), out, threads=64) == 0
    sums = [sum(range(32)), sum(range(32, 64))]
    expected = [sums[i // 32] * 1001 + (3 if i % 32 < 4 else 0) for i in range(64)]
    assert out.view(np.uint32).tolist() == [*expected, 128]


def test_shared_memory_is_never_zero_at_first(kernels: Kernels) -> None:
    out = room(12)
    assert kernels.outcome("unwritten", (3,), out, shared=16, threads=4) == 0
    assert np.all(out.view(np.uint32) == 0xA5A5A5A5)


@pytest.mark.parametrize(
    "kernel",
    ["some_threads_at_the_barrier", "a_lane_is_missing", "two_kinds_of_barriers", "not_in_its_mask"],
)
def test_a_barrier_that_not_all_threads_reach_is_an_error(kernels: Kernels, kernel: str) -> None:
    out = room(32 * 4)
    assert kernels.outcome(kernel, (1,), out, threads=32) == DIVERGED
    # The next launch is as if nothing had happened.
    assert kernels.outcome("reverse", (1,), out, shared=128, threads=32) == 0
    assert out.view(np.uint32).tolist() == list(reversed(range(32)))


def test_a_launch_that_no_device_could_run_is_an_error(kernels: Kernels) -> None:
    out = room(4)
    for blocks, threads in (((1,), 0), ((1,), 1025), ((0,), 32)):
        assert kernels.outcome("reverse", blocks, out, shared=4, threads=threads) == 2
    assert kernels.outcome("nothing", (1,), out) == 1
    assert (out == 0xA5).all()
