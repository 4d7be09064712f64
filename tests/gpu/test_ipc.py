"""Ranks that share one GPU and read each other's memory: every verb has the host's bits, in the order of streams."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.cuda import test_buckets_values as buckets
from tests.cuda import test_ipc_failures as failures
from tests.cuda import test_ipc_order as order
from tests.cuda import test_ipc_values as values
from tests.cuda import test_staged_order as staged
from tests.cuda.ranks import Ranks
from tests.gpu.test_staged import held_while_late, late_producers

IPC = {"BAGUA_CUDA_COLLECTIVE": "ipc"}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_verb_type_and_operation_has_the_bits_of_the_host(ranks: Ranks, compiler: Any, size: int) -> None:
    for stats in ranks(size, values.everything, **IPC, **compiler):
        assert (stats["collective"], stats["to_host_bytes"]) == ("ipc", 0)


@pytest.mark.parametrize("size", [2, 4])
def test_arrays_for_which_windows_grow_have_the_bits_of_the_host(ranks: Ranks, compiler: Any, size: int) -> None:
    for stats in ranks(size, values.several_pieces, **IPC, **compiler):
        assert stats["device_bytes"] > 2 << 20


@pytest.mark.parametrize("hosts", [values.HOSTS, [[0, 2], [1]]], ids=["two-and-two", "two-and-one"])
def test_ranks_of_several_pretended_hosts_have_the_bits_of_the_hosts_hier(
    ranks: Ranks, compiler: Any, hosts: list[list[int]]
) -> None:
    for stats in ranks(sum(len(host) for host in hosts), values.over_hosts, hosts=hosts, **IPC, **compiler):
        assert stats["collective"] == "hier"


@pytest.mark.parametrize(
    "scenario",
    [
        staged.producers,
        staged.receivers,
        staged.handles,
        staged.freed_at_once,
        staged.left_behind,
        staged.captured,
        order.windows_in_turn,
        failures.leaves_early,
    ],
    ids=lambda it: it.__name__,
)
def test_what_holds_on_the_simulated_driver_holds_on_a_device(ranks: Ranks, compiler: Any, scenario: Any) -> None:
    ranks(2, scenario, **IPC, **compiler)


def test_operations_over_several_hosts_keep_the_order_of_streams(ranks: Ranks, compiler: Any) -> None:
    ranks(4, order.over_hosts, hosts=values.HOSTS, **IPC, **compiler)


@pytest.mark.parametrize("scenario", [late_producers, held_while_late], ids=lambda it: it.__name__)
def test_work_that_comes_late_is_waited_for(anywhere: Ranks, compiler: Any, scenario: Any) -> None:
    anywhere(2, scenario, **IPC, **compiler)


@pytest.mark.parametrize("operation", ["centralized", "compressed"])
def test_a_bucket_on_a_device_has_the_bits_of_the_host(ranks: Ranks, compiler: Any, operation: str) -> None:
    ranks(2, buckets.equals_the_host, operation, False, ["float32", "float16"], **IPC, **compiler)


def test_a_rank_that_is_killed_in_the_middle_is_lost_within_a_second(
    ranks: Ranks, compiler: Any, tmp_path: Path
) -> None:
    with ranks.world(2, **IPC, **compiler) as world:
        world._expect_exit = {1: -signal.SIGKILL}
        (lost, after), _ = world.run(failures.dies, str(tmp_path))
    assert (lost, after < 1.0) == (1, True), after
