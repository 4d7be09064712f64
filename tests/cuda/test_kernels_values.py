"""The kernels, run on the host, compute what the core computes, bit for bit."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from bagua.extension import CUDA_KERNELS
from tests.cuda import kernel_cases as cases
from tests.cuda.kernels_on_host import Kernels, kernels

__all__ = ["kernels"]


def test_every_kernel_computes_what_the_core_computes(kernels: Kernels) -> None:
    assert cases.check_all(kernels) > 200


@pytest.mark.parametrize("name", cases.CODED)
def test_a_million_elements_by_many_blocks(kernels: Kernels, name: str) -> None:
    cases.check_codec(kernels, name, cases.elements("normal", name, 1_000_000), columns=5)
    cases.check_codec(kernels, name, cases.elements("huge", name, 1_000_000), 4, columns=2, offset=1)


@pytest.mark.parametrize("name", cases.CODED)
def test_chunks_have_records_of_their_own(kernels: Kernels, name: str) -> None:
    for chunks, each in ((2, 1), (3, 61), (7, 600), (40, 3)):
        held = cases.elements("normal", name, chunks * each, seed=chunks)
        # One element is not finite, and the elements of one chunk are equal.
        held[0] = cases.elements("one NaN", name, 1)[0]
        held[each : 2 * each] = held[each]
        # As many rows of blocks as chunks, fewer, and more.
        for rows in (chunks, 2, chunks + 1):
            cases.check_codec(kernels, name, held, chunks, rows=rows)


@pytest.mark.parametrize("name", cases.CODED)
def test_means_of_every_pair_of_kinds_are_those_of_compressed_all_reduce(kernels: Kernels, name: str) -> None:
    for kinds in itertools.product(cases.KINDS, repeat=2):
        held = [cases.elements(kind, name, 300, seed=rank) for rank, kind in enumerate(kinds)]
        cases.check_mean(kernels, name, held, 2)
        for half in cases.HALVES:
            cases.check_convert_reduce(kernels, half, name, held, 3)
    many = [cases.elements("normal", name, 500, seed=rank) for rank in range(40)]
    cases.check_mean(kernels, name, many, 40, columns=1)


def test_halves_are_rounded_as_the_core_rounds_them(kernels: Kernels) -> None:
    every = cases.every_upper_half()
    cases.check_convert(kernels, "f32", "f16", every)
    cases.check_convert(kernels, "f32", "bf16", every)
    halves = np.arange(1 << 16, dtype=np.uint16)
    for source, target in cases.CONVERSIONS:
        if source != "f32":
            cases.check_convert(kernels, source, target, halves)


@pytest.mark.parametrize("name", cases.FLOATS)
def test_averages_follow_the_rules_of_the_core(kernels: Kernels, name: str) -> None:
    for number, count in itertools.product(range(1, 9), (1, 15, 64, 700)):
        cases.check_average(kernels, name, number, count)
    cases.check_average(kernels, name, 3, 5000, in_place=1)


def test_the_library_has_every_kernel(kernels: Kernels) -> None:
    assert all(kernels.parameters(name) for program in CUDA_KERNELS.values() for name in program)
    # A structure of eight addresses by value, and so on.
    assert kernels.parameters("average_f32") == [64, 4, 8, 8, 8]
