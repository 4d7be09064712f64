"""The kernels, run on the host, compute what the core computes, bit for bit."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from bagua.engine import CUDA_KERNELS
from tests.cuda import kernel_cases as cases
from tests.cuda.kernels_on_host import Kernels, kernels, placed, room
from tests.waits import on_threads

__all__ = ["kernels"]


# --- minmax_u8 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", cases.KINDS)
@pytest.mark.parametrize("name", cases.CODED)
def test_records_and_values_are_those_of_the_codec(kernels: Kernels, name: str, kind: str) -> None:
    for count in (1, 2, 7, 31, 32, 33, 1000, 4099):
        cases.check_codec(kernels, name, cases.elements(kind, name, count, seed=count), columns=1 + count % 3)


@pytest.mark.parametrize("name", cases.CODED)
def test_elements_and_records_may_be_at_any_address(kernels: Kernels, name: str) -> None:
    for offset, shift in itertools.product(range(8), (0, 1, 4, 8, 13)):
        cases.check_codec(kernels, name, cases.elements("normal", name, 613, seed=offset), offset=offset, shift=shift)


@pytest.mark.parametrize("name", cases.CODED)
def test_chunks_have_records_of_their_own(kernels: Kernels, name: str) -> None:
    for chunks, each in ((2, 1), (3, 61), (7, 600), (40, 3)):
        held = cases.elements("normal", name, chunks * each, seed=chunks)
        # One of them is not finite, and one has equal elements only.
        held[0] = cases.elements("one NaN", name, 1)[0]
        held[each : 2 * each] = held[each]
        cases.check_codec(kernels, name, held, chunks)
        # Fewer rows of blocks than chunks, and more.
        cases.check_codec(kernels, name, held, chunks, rows=2)
        cases.check_codec(kernels, name, held, chunks, rows=chunks + 1)


@pytest.mark.parametrize("name", cases.CODED)
def test_a_million_elements_by_many_blocks(kernels: Kernels, name: str) -> None:
    cases.check_codec(kernels, name, cases.elements("normal", name, 1_000_000), columns=5)
    cases.check_codec(kernels, name, cases.elements("huge", name, 1_000_000), 4, columns=2, offset=1)


@pytest.mark.parametrize("name", cases.CODED)
def test_the_mean_of_records_is_that_of_compressed_all_reduce(kernels: Kernels, name: str) -> None:
    for ranks, count in itertools.product((1, 2, 3, 4, 7, 8), (1, 33, 1000, 2055)):
        held = [cases.elements("normal", name, count, seed=rank) for rank in range(ranks)]
        cases.check_mean(kernels, name, held, ranks, shift=ranks % 4)
        cases.check_mean(kernels, name, held, 1, keeps=False)
    for kinds in itertools.product(cases.KINDS, repeat=2):
        held = [cases.elements(kind, name, 300, seed=rank) for rank, kind in enumerate(kinds)]
        cases.check_mean(kernels, name, held, 2)


@pytest.mark.parametrize("name", cases.CODED)
def test_means_of_many_ranks_and_of_many_elements(kernels: Kernels, name: str) -> None:
    many = [cases.elements("normal", name, 500, seed=rank) for rank in range(40)]
    cases.check_mean(kernels, name, many[:32], 32)
    cases.check_mean(kernels, name, many, 40, columns=1)
    large = [cases.elements("normal", name, 400_000, seed=rank) for rank in range(2)]
    cases.check_mean(kernels, name, large, 2, columns=4)


# --- conversions, updates, reductions ---------------------------------------------------------------------------------


def test_halves_are_rounded_as_the_core_rounds_them(kernels: Kernels) -> None:
    every = cases.every_upper_half()
    cases.check_convert(kernels, "f32", "f16", every)
    cases.check_convert(kernels, "f32", "bf16", every)
    halves = np.arange(1 << 16, dtype=np.uint16)
    for source, target in cases.CONVERSIONS:
        if source != "f32":
            cases.check_convert(kernels, source, target, halves)


def test_converted_arrays_may_be_at_any_address_and_in_any_chunks(kernels: Kernels) -> None:
    for source, target in cases.CONVERSIONS:
        places = ((0, 0), (1, 2), (2, 4), (4, 8), (3, 0), (0, 5), (1, 13))
        for count, (offset, shift) in itertools.product((1, 7, 8, 9, 300), places):
            held = cases.elements("normal", source, count)
            cases.check_convert(kernels, source, target, held, offset=offset, shift=shift)
        for chunks, each in ((2, 1), (3, 61), (7, 600), (40, 16)):
            held = cases.elements("normal", source, chunks * each, seed=chunks)
            # Fewer rows of blocks than chunks, and more.
            cases.check_convert(kernels, source, target, held, chunks, grid=(1, chunks + 1), shift=chunks % 3)
            cases.check_convert(kernels, source, target, held, chunks, grid=(3, 2), offset=chunks % 4)


@pytest.mark.parametrize("name", cases.CODED)
@pytest.mark.parametrize("half", cases.HALVES)
def test_the_mean_of_halves_is_that_of_compressed_all_reduce(kernels: Kernels, half: str, name: str) -> None:
    for ranks, count in itertools.product((1, 2, 3, 4, 8, 9, 20), (1, 16, 33, 2055)):
        held = [cases.elements("normal", name, count, seed=rank) for rank in range(ranks)]
        cases.check_convert_reduce(kernels, half, name, held, ranks)
        cases.check_convert_reduce(kernels, half, name, held, 1, columns=1)
    for kinds in itertools.product(cases.KINDS, repeat=2):
        held = [cases.elements(kind, name, 300, seed=rank) for rank, kind in enumerate(kinds)]
        cases.check_convert_reduce(kernels, half, name, held, 3)


@pytest.mark.parametrize(("name", "op"), cases.operations(), ids=lambda value: value)
def test_reductions_follow_the_rules_of_the_core(kernels: Kernels, name: str, op: str) -> None:
    for number, count in itertools.product(range(1, 9), (1, 15, 64, 700)):
        cases.check_reduce(kernels, name, op, number, count)
    cases.check_reduce(kernels, name, op, 3, 5000, in_place=1)
    for offsets in ((1,), (3,), (0, 1, 2), (5, 5, 5, 1)):
        cases.check_reduce(kernels, name, op, 4, 333, offsets=offsets)


@pytest.mark.parametrize("name", cases.FLOATS)
def test_updates_follow_the_rules_of_the_core(kernels: Kernels, name: str) -> None:
    for count in (1, 7, 16, 100, 5000):
        cases.check_update(kernels, name, count)
    for offsets in ((1,), (3,), (0, 1), (2, 2, 1)):
        cases.check_update(kernels, name, 333, offsets=offsets)


@pytest.mark.parametrize("name", cases.CODED)
def test_error_feedback_follows_the_rules_of_the_core(kernels: Kernels, name: str) -> None:
    for count in (1, 333, 5000):
        cases.check_feedback(kernels, name, count)
    for kind in ("too large a range", "one infinity"):
        cases.check_feedback(kernels, name, 300, kind)


# --- the library itself -----------------------------------------------------------------------------------------------


def test_the_library_has_every_kernel_and_no_other_name(kernels: Kernels) -> None:
    names = [name for program in CUDA_KERNELS.values() for name in program]
    assert all(kernels.parameters(name) for name in names)
    assert kernels.parameters("minmax_u8_encode_f64") is None
    assert kernels.outcome("minmax_u8_encode_f64", (1,)) == 1
    # Of a parameter list: a struct of eight addresses by value, and so on.
    assert kernels.parameters("reduce_f32_sum") == [64, 4, 8, 8, 8]


def test_only_the_first_blocks_run_where_that_is_asked_for(kernels: Kernels) -> None:
    number = cases.U64(4096)
    source, out = placed(np.ones(4096, np.uint16)), room(4 * 4096)
    assert kernels.outcome("convert_f16_f32", (2,), source, number, out, number, number, cases.U64(1), run=1) == 0
    written = (out.reshape(-1, 32) != 0xA5).any(axis=1)
    assert written.reshape(2, 256).all(axis=1).tolist() == [True, False]


def test_launches_of_several_threads_do_not_disturb_each_other(kernels: Kernels) -> None:
    def run(seed: int) -> None:
        for count in range(900, 910):
            cases.check_codec(kernels, "f32", cases.elements("normal", "f32", count, seed))

    on_threads(run, range(4))
