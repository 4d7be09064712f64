"""The engine and its buckets on NumPy arrays, starting by every init method, and the example that embeds the engine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bagua
from tests.groups import on_ranks
from tests.waits import on_threads

ROOT = Path(__file__).resolve().parents[2]
World = Callable[..., Any]


def steps(group: bagua.Group) -> None:
    rank, world = group.rank, group.size
    arrays = {name: np.zeros(size, np.float32) for name, size in (("c", 5), ("b", 1000), ("a", 7))}
    called: list[tuple[str, str]] = []
    first = bagua.Bucket("first", [("c", arrays["c"]), ("b", arrays["b"])]).append_centralized(average=True)
    first.append_callback(lambda name: called.append((name, threading.current_thread().name)))
    second = bagua.Bucket("second", {"a": arrays["a"]}).append_centralized(average=False)
    assert (first.name, first.bytes, first.tensors, first.ops) == (
        "first",
        4020,
        ["c", "b"],
        ["centralized", "callback"],
    )
    with bagua.Engine("steps") as engine:
        engine.register([first, second])
        for step in range(5):
            for array in arrays.values():
                array[:] = step + rank
            # Ready in another order than that of the buckets on the odd ranks.
            for name in ("a", "b", "c") if rank % 2 else ("c", "b", "a"):
                engine.mark_ready(name)
            assert engine.wait(timeout=60) == 2
            assert (arrays["c"] == step + (world - 1) / 2).all()
            assert (arrays["b"] == step + (world - 1) / 2).all()
            assert (arrays["a"] == step * world + world * (world - 1) / 2).all()
        assert [name for name, _ in called] == ["first"] * 5
        assert threading.main_thread().name not in {thread for _, thread in called}

        engine.mark_ready("c")
        with pytest.raises(ValueError, match="'c'"):
            engine.mark_ready("c")
        with pytest.raises(ValueError, match="no_such"):
            engine.mark_ready("no_such")
        assert engine.unready() == ["b", "a"]
        with pytest.raises(ValueError, match="'b'"):
            engine.wait()

        moved = np.full(7, 1.0, np.float32)
        engine.mark_ready("a", moved)
        engine.mark_ready("c")
        engine.mark_ready("b")
        assert engine.wait() == 2
        assert (moved == world).all()
        with pytest.raises(TypeError, match="registered as float32"):
            engine.mark_ready("a", np.zeros(7))
        with pytest.raises(ValueError, match="share memory"):
            engine.register([first, bagua.Bucket("third", {"x": arrays["c"]})])


def construction() -> None:
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="tensor 'x' is read-only"):
        bagua.Bucket("b", {"x": frozen})
    with pytest.raises(ValueError, match="twice"):
        bagua.Bucket("b", [("x", np.zeros(3)), ("x", np.zeros(3))])
    with pytest.raises(TypeError, match="float"):
        bagua.Bucket("b", {"x": np.zeros(3), "y": np.zeros(3, np.float32)})
    with pytest.raises(ValueError, match="b"):
        bagua.Bucket("b", {})
    with pytest.raises(TypeError, match="callable"):
        bagua.Bucket("b", {"x": np.zeros(3)}).append_callback(3)  # type: ignore[arg-type]


def two_engines_on_two_threads(group: bagua.Group) -> None:
    arrays = [np.ones(100), np.ones(100)]
    engines = [bagua.Engine(f"model {number}", group=group) for number in range(2)]
    for number, (engine, array) in enumerate(zip(engines, arrays, strict=True)):
        engine.register([bagua.Bucket(f"bucket {number}", {"x": array}).append_centralized(average=False)])

    def work(number: int) -> None:
        for _ in range(20):
            arrays[number][:] = 1
            engines[number].mark_ready("x")
            engines[number].wait()

    # The ranks begin with different ones.
    order = (0, 1) if group.rank % 2 else (1, 0)
    on_threads(work, order)
    assert all((array == group.size).all() for array in arrays)
    for engine in engines:
        engine.shutdown()


@pytest.mark.parametrize("size", [1, 2, 3])
@on_ranks()
def test_buckets_travel_in_order_while_the_program_goes_on(group: bagua.Group, size: int) -> None:
    construction()
    steps(group)
    two_engines_on_two_threads(group)


def averages(rank: int) -> dict[str, Any]:
    """Averages of values whose sum depends on the order of additions, flat and inside hosts first."""
    bagua.init(timeout=60)
    found: dict[str, Any] = {}
    with bagua.Engine("order") as engine:
        for hierarchical in (False, True):
            # More than one chunk of a hierarchical all_reduce, and not a whole number of them.
            x = np.random.default_rng(rank).uniform(-1e3, 1e3, 300_001).astype(np.float32)
            engine.register([bagua.Bucket("b", {"x": x}).append_centralized(hierarchical=hierarchical)])
            for _ in range(2):
                engine.mark_ready("x")
                engine.wait()
            found["hierarchical" if hierarchical else "flat"] = x.tobytes()
            counts = bagua.stats()["groups"]["world"]["ops"]["all_reduce"]
            found[f"calls {hierarchical}"] = (counts["calls"], counts["hierarchical"])
            found["payload"] = counts["payload_bytes"]
    found["collective"] = bagua.stats()["groups"]["world"]["collective"]
    bagua.shutdown()
    return found


def test_hierarchical_adds_inside_hosts_first_also_where_the_group_goes_flat(world: World) -> None:
    hosts = [[0, 1], [2, 3]]
    flat = world(4, hosts=hosts, env={"BAGUA_TRANSPORT": "tcp"}).run(averages)
    near = world(4, hosts=hosts).run(averages)
    assert ({r["collective"] for r in flat}, {r["collective"] for r in near}) == ({"net"}, {"hier"})
    by_host = {result["hierarchical"] for result in (*flat, *near)}
    assert len(by_host) == 1
    assert {result["flat"] for result in near} == by_host
    assert len({result["flat"] for result in flat}) == 1
    assert flat[0]["flat"] != flat[0]["hierarchical"], "the values do not distinguish the routes"
    assert flat[0]["calls False"] == (2, 0)
    # One count for an operation, on the hosts' first ranks too.
    assert [result["calls True"] for result in flat] == [(4, 2)] * 4
    assert {result["payload"] for result in (*flat, *near)} == {4 * 4 * 300_001}
    assert near[0]["calls False"] == (2, 2)
    assert near[0]["calls True"] == (4, 4)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@on_ranks(2)
def test_ranks_that_differ_in_hierarchical_get_a_mismatch(rank: int, transport: str) -> None:
    with bagua.Engine("differ") as engine:
        x = np.ones(5, np.float32)
        engine.register([bagua.Bucket("b", {"x": x}).append_centralized(hierarchical=rank == 0)])
        engine.mark_ready("x")
        with pytest.raises(bagua.MismatchError, match="hierarchical"):
            engine.wait()


@on_ranks(2)
def test_an_exception_in_a_callback_is_kept_on_its_rank_and_named_on_the_others(rank: int, group: bagua.Group) -> None:
    x = np.ones(3)
    bucket = bagua.Bucket("b", {"x": x}).append_centralized()

    def fail(name: str) -> None:
        raise KeyError(f"nothing for {name}")

    if rank == 0:
        bucket.append_callback(fail)
    engine = bagua.Engine(group=group)
    engine.register([bucket])

    def step() -> None:
        while True:
            engine.mark_ready("x")
            engine.wait()

    with pytest.raises(bagua.BaguaError) as raised:
        step()
    error = raised.value
    assert "KeyError: 'nothing for b'" in str(error)
    assert "bucket 'b'" in str(error)
    if rank == 0:
        assert type(error) is bagua.BaguaError
        assert isinstance(error.__cause__, KeyError)
        assert [frame.name for frame in traceback.extract_tb(error.__cause__.__traceback__)] == ["fail"]
    else:
        assert isinstance(error, bagua.PeerRaisedError)
        assert (error.rank, error.kind) == (0, "KeyError")
    engine.shutdown()


def starts(rank: int, method: str, size: int) -> list[int]:
    group = bagua.init(rank, size, method, secret="between us", timeout=30)
    x = np.array([rank])
    seen = group.all_gather(x).ravel().tolist()
    bagua.shutdown()
    return list(seen)


def test_ranks_find_each_other_by_a_file(world: World, tmp_path: Path) -> None:
    assert world(3, launcher_env=False).run(starts, f"file://{tmp_path}/ranks", 3) == [[0, 1, 2]] * 3


def starts_by_tcp_twice(rank: int) -> list[int]:
    method = f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}"
    return starts(rank, method, 2) + starts(1 - rank, method, 2)


def test_ranks_find_each_other_by_tcp_and_again_in_other_roles(world: World) -> None:
    assert world(2).run(starts_by_tcp_twice) == [[0, 1, 0, 1]] * 2


def starts_under_torchrun(rank: int) -> list[int]:
    from torch.distributed import TCPStore

    # As torchrun's agent does, in a process of its own: here rank 0 plays it for the others.
    port = int(os.environ["MASTER_PORT"])
    store = TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    os.environ["TORCHELASTIC_RUN_ID"] = "some-run"
    group = bagua.init(timeout=30)
    seen = group.all_gather(np.array([rank])).ravel().tolist()
    group.barrier()
    bagua.shutdown()
    del store
    return list(seen)


@pytest.mark.slow
def test_under_torchrun_its_own_store_is_used(world: World) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    assert world(2).run(starts_under_torchrun) == [[0, 1]] * 2


@pytest.mark.parametrize(
    "method",
    [
        "http://x",
        "tcp://host",
        "file://",
        "somewhere",
        "tcp://host:99999",
        "tcp://[::1:5",
        "tcp://host:1/path",
        "tcp://host:1?rank=0&world_size=2",
        "env://?world_size=2",
        "file:///shared/group#2",
    ],
)
def test_a_method_that_is_none_is_refused(method: str) -> None:
    # Also in a world of one, which a rank would be in whose method were read without its end.
    for size in (1, 2):
        with pytest.raises(ValueError, match=re.escape(f"{method!r}")):
            bagua.init(0, size, method)


@pytest.mark.slow
def test_the_example_trains_and_its_ranks_agree() -> None:
    shown = subprocess.run(
        [sys.executable, ROOT / "examples/numpy_training.py"],
        env={name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    words = shown.stdout.split()
    assert words[0] == "accuracy"
    assert float(words[1]) > 0.95
    assert "over 2 ranks, weights bitwise equal, through shm" in shown.stdout
