"""Ranks that share one GPU, by host memory: every verb has the host's bits, in the order of streams."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bagua
from tests.cuda import test_buckets_values as buckets
from tests.cuda import test_failures as failures
from tests.cuda import test_staged_values as values
from tests.cuda import test_verb_order as order
from tests.cuda.device_arrays import Cuda
from tests.cuda.failing_calls import is_lost
from tests.cuda.ranks import Ranks, device_rank
from tests.cuda.verb_contract import move_everything, reduce_everything

SIZES = [1, 2, 4]
ONES = np.ones(1000, np.float32)

# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "bool", "complex64"])
def test_every_reduction_has_the_bits_of_the_host(ranks: Ranks, size: int, dtype: str) -> None:
    assert len({found.digest for found in ranks(size, reduce_everything, dtype, True)}) == 1


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dlpack", [False, True], ids=["interface", "dlpack"])
def test_every_verb_that_moves_has_the_bits_of_the_host(ranks: Ranks, size: int, dlpack: bool) -> None:
    ranks(size, move_everything, "float32", dlpack, (3, 2))


@pytest.mark.parametrize("size", [2, 4])
def test_arrays_of_many_pieces_have_the_bits_of_the_host(ranks: Ranks, size: int) -> None:
    for cuda in ranks(size, values.long_arrays, size):
        assert cuda["collective"] == "staged"
        assert 0 < cuda["pinned_bytes"] <= 32 << 20


def test_bfloat16_is_reduced_by_dlpack(ranks: Ranks) -> None:
    ranks(2, values.test_bfloat16_is_reduced_by_dlpack.on_ranks)


def test_ranks_of_two_pretended_hosts_have_the_bits_of_the_host(ranks: Ranks) -> None:
    ranks(4, reduce_everything, "float32", True, hosts=[[0, 1], [2, 3]])


# --- order ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scenario",
    [
        order.test_an_operation_begins_after_every_producer_of_its_arrays.on_ranks,
        order.test_a_result_does_not_overtake_work_on_its_array.on_ranks,
        order.test_a_handle_orders_the_streams_that_it_gets.on_ranks,
        order.test_dropped_handles_leave_nothing_behind_when_the_group_is_left.on_ranks,
        order.test_a_stream_that_is_captured_is_refused_and_its_capture_stays_valid.on_ranks,
    ],
    ids=lambda it: it.__name__,
)
def test_what_holds_on_the_simulated_driver_holds_on_a_device(ranks: Ranks, scenario: Any) -> None:
    ranks(2, scenario)


@device_rank
def late_producers(rank: int, cuda: Cuda, group: bagua.Group) -> None:
    first, second = cuda.stream(), cuda.stream()
    for dlpack in (False, True):
        x = cuda.array(7 * ONES, stream=first, dlpack=dlpack)
        x.read(first)
        with cuda.late(first).opened_after(0.2):
            x.write(ONES, first)
            group.all_reduce(x, stream=second)
        assert x.read(second).tolist() == [2.0] * 1000
        # The result does not overtake work on its array, where a rank only gets it.
        with cuda.late(first).opened_after(0.2):
            x.write(5 * ONES, first)
            group.broadcast(x, 0, stream=second)
        assert x.read(second).tolist() == [5.0] * 1000
        # A handle orders another stream.
        with cuda.late(first).opened_after(0.2):
            x.write((rank + 1) * ONES, first)
            handle = group.all_reduce(x, async_op=True, stream=second)
            handle.wait(30.0, stream=first)
        assert x.read(first).tolist() == [3.0] * 1000


def test_an_operation_begins_after_work_that_comes_late(anywhere: Ranks) -> None:
    anywhere(2, late_producers)


@device_rank
def held_while_late(rank: int, cuda: Cuda, group: bagua.Group) -> None:
    stream = cuda.stream()
    x, y = cuda.array(ONES), cuda.array(ONES)
    # Makes what the first operation needs.
    group.all_reduce(y, async_op=True).synchronize(30.0)
    x.read()
    cuda.arrays.remove(x)
    weakref.finalize(x, cuda.driver.cuMemFree_v2, x.address)
    alive = weakref.ref(x)
    gate = cuda.late(stream)
    handle = group.all_reduce(x, async_op=True, stream=stream)
    x.stream = stream
    assert not handle.is_completed()
    del x, handle
    gc.collect()
    assert alive() is not None
    gate.open()
    group.all_reduce(y, async_op=True).synchronize(30.0)
    group.all_reduce(y)
    group.barrier()
    gc.collect()
    assert alive() is None
    assert y.read().tolist() == [8.0] * 1000


def test_an_operation_holds_its_array_until_the_device_is_done(anywhere: Ranks) -> None:
    anywhere(2, held_while_late)


# --- buckets and failures ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", buckets.OPERATIONS)
def test_a_bucket_on_a_device_has_the_bits_of_the_host(ranks: Ranks, operation: str) -> None:
    ranks(2, buckets.equals_the_host, operation, False, ["float32", "float16"])


@pytest.mark.parametrize(
    "scenario",
    [
        buckets.large,
        buckets.test_the_mean_of_peers_is_copied_within_the_device.on_ranks,
        buckets.test_verbs_in_order_with_the_buckets_take_device_memory.on_ranks,
        buckets.ring,
    ],
    ids=lambda it: it.__name__,
)
def test_buckets_behave_on_a_device_as_on_the_simulated_driver(ranks: Ranks, scenario: Any) -> None:
    ranks(2, scenario)


def test_a_rank_that_is_killed_in_the_middle_is_lost(ranks: Ranks, tmp_path: Path) -> None:
    is_lost(ranks, failures.one_dies, tmp_path, "verb", 8 << 20)


def test_a_deadline_names_the_rank_that_did_not_come(ranks: Ranks) -> None:
    missing, _ = ranks(2, failures.waits_for_the_other, "verb")
    assert missing == (1,)
