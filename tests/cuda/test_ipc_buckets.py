"""Buckets on devices whose ranks read each other's memory: the host's bits, and the order of streams."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cuda import test_buckets_order as order
from tests.cuda import test_buckets_values as values
from tests.cuda.ranks import Ranks
from tests.cuda.test_ipc_values import run


def test_tensors_that_lie_apart_on_one_rank_only_do_not_pass_through_host_memory(ranks: Ranks) -> None:
    for stats in run(ranks, 2, values.large):
        assert (stats["collective"], stats["to_host_bytes"], stats["to_device_bytes"]) == ("ipc", 0, 0)
        assert stats["launches"] == 1


@pytest.mark.parametrize("operation", ["centralized", "compressed"])
def test_an_operation_on_a_device_has_the_bits_of_the_host(ranks: Ranks, operation: str) -> None:
    run(ranks, 2, values.equals_the_host, operation, False, ["float32", "float16"])


@pytest.mark.parametrize("operation", ["centralized", "compressed"])
def test_a_hierarchical_operation_on_a_device_has_the_bits_of_the_host(ranks: Ranks, operation: str) -> None:
    run(ranks, 3, values.equals_the_host, operation, True, ["float32"], hosts=values.HALVES)


@pytest.mark.parametrize("flat", [True, False], ids=["adjacent", "apart"])
def test_a_bucket_begins_after_the_streams_of_its_marks_and_a_wait_orders_its_stream(ranks: Ranks, flat: bool) -> None:
    run(ranks, 2, order.producers, "centralized", flat)


@pytest.mark.parametrize("scenario", [order.replaced, order.callbacks], ids=lambda scenario: scenario.__name__)
def test_buckets_are_held_and_called_back_as_with_staged(ranks: Ranks, scenario: Any) -> None:
    run(ranks, 2, scenario)
