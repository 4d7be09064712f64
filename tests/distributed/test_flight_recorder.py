"""The flight recorder, the records of failed groups, and what `bagua trace merge` makes of them."""

from __future__ import annotations

import json
import os
import queue
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bagua
from bagua import cli
from tests.groups import arrive_waiting, on_ranks
from tests.waits import arrive, await_arrival, meet, until

World = Callable[..., Any]

KEYS = ["n", "group", "channel", "seq", "kind", "label", "dtype", "count", "bytes", "root", "state", "begin", "end"]


def record_of(error: bagua.BaguaError) -> str:
    """The path of the record, which the end of the text and the attribute name."""
    assert error.record is not None
    assert str(error).endswith(f"; flight record: {error.record}")
    return error.record


def merge(capsys: pytest.CaptureFixture[str], files: list[str], out: Path) -> tuple[list[str], list[dict[str, Any]]]:
    """Runs the command. Returns the lines that it prints, and the events that it writes."""
    assert cli.main(["trace", "merge", *files, "--out", str(out)]) == 0
    events = json.loads(out.read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"X"}
    assert all(event["dur"] >= 0 and event["ts"] > 1.7e15 for event in events)
    return capsys.readouterr().out.splitlines(), events


# --- recording --------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_the_last_thousand_of_twelve_hundred_operations_are_right(group: bagua.Group) -> None:
    started = time.time()
    pair = group.new_group([0, 1])
    x, y, z = np.ones(4, np.float32), np.ones(2, np.float64), np.ones(8, np.int32)
    bucket = bagua.Bucket("b0", {"z": z})
    bucket.append_centralized(average=False)
    with bagua.Engine() as engine:
        engine.register([bucket])
        for _ in range(300):
            group.all_reduce(x, "max")
            pair.broadcast(y, 1)
            engine.mark_ready("z")
            handle = group.all_reduce(x, "max", async_op=True)
            handle.wait()
            engine.wait()
        shown = bagua.flight_recorder()
    group.barrier()
    assert all(started <= op["begin"] <= op["end"] <= time.time() for op in shown)
    assert [op["n"] for op in shown] == list(range(200, 1200))
    assert all([*op] == [*KEYS, "missing"] for op in shown)
    assert all((op["state"], op["missing"]) == ("done", []) for op in shown)
    by_lane: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for op in shown:
        by_lane.setdefault((op["group"], op["channel"]), []).append(op)
    kinds = {
        ("world", 0): ("all_reduce(max)", "", "float32", 4, 16, None),
        ("world/0,1", 0): ("broadcast", "", "float64", 2, 16, 1),
        ("world", 1): ("all_reduce(sum)", "b0", "int32", 8, 32, None),
    }
    assert by_lane.keys() == kinds.keys()
    for lane, ops in by_lane.items():
        says = {tuple(op[key] for key in ("kind", "label", "dtype", "count", "bytes", "root")) for op in ops}
        assert says == {kinds[lane]}
        last = 600 if lane == ("world", 0) else 300
        assert [op["seq"] for op in ops] == list(range(last - len(ops), last))


def queued_behind_one_that_waits(rank: int, folder: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    group = bagua.init(timeout=60)
    x = np.ones(4, np.float32)
    group.barrier()
    come = Path(folder, "come")
    if rank == 1:
        until(come.exists)
    handles = [group.all_reduce(x, "max", async_op=True) for _ in range(1199)]
    if rank == 0:
        until(lambda: any(op["state"] == "started" for op in bagua.flight_recorder()))
    waiting = bagua.flight_recorder()
    come.touch()
    for handle in handles:
        handle.wait()
    group.barrier()
    return waiting, bagua.flight_recorder()


def test_queued_operations_are_shown_behind_the_one_that_runs_however_old_it_is(world: World, tmp_path: Path) -> None:
    results = world(2).run(queued_behind_one_that_waits, str(tmp_path))
    running, *queued = results[0][0]
    assert (running["n"], running["seq"], running["state"], running["end"]) == (1, 1, "started", None)
    assert [op["n"] for op in queued] == list(range(200, 1200))
    shows = ("kind", "dtype", "count", "bytes", "channel", "seq", "state", "begin", "end")
    says = {tuple(op[key] for key in shows) for op in queued}
    assert says == {("all_reduce(max)", "float32", 4, 16, 0, None, "queued", None, None)}
    for _, done in results:
        assert [(op["n"], op["seq"], op["state"]) for op in done] == [(n, n, "done") for n in range(201, 1201)]


# --- a failed group ---------------------------------------------------------------------------------------------------


def failed(group: bagua.Group) -> bool:
    try:
        group.communicator.cause()
    except bagua.BaguaError:
        return True
    return False


def hangs(rank: int, folder: str) -> tuple[str | None, int]:
    group = bagua.init()
    x = np.ones(4, np.float32)
    for _ in range(17):
        group.all_reduce(x)
    meet("after 17", rank, range(3))
    record = None
    if rank == 2:
        # Busy with something else; it gets the failure when it leaves.
        until(lambda: Path(folder, "0").exists() and Path(folder, "1").exists())
        until(lambda: failed(group))
    else:
        if rank == 0:
            # Of two whose time passes, one might be too late for the other's.
            await_arrival("waits", [1])
        else:
            arrive_waiting("waits", rank)
        with pytest.raises(bagua.BaguaTimeoutError) as raised:
            group.all_reduce(x, timeout=1 if rank == 0 else 60)
        record = record_of(raised.value)
        with pytest.raises(bagua.BaguaTimeoutError) as again:
            group.barrier()
        assert again.value.record == record
        Path(folder, str(rank)).touch()
    bagua.shutdown()
    return record, os.getpid()


def test_a_rank_that_never_calls_is_named_with_the_operation_that_the_others_waited_in(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    traces = tmp_path / "traces"
    results = world(3, env={"BAGUA_TRACE_DIR": str(traces)}).run(hangs, str(tmp_path))
    files = sorted(map(str, traces.iterdir()))
    assert len(files) == 3
    assert {path for path, _ in results[:2]} <= set(files)
    for rank, path in enumerate(files):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        record = json.loads(Path(path).read_text())
        assert record.keys() == {"version", "rank", "host", "pid", "jobs", "error", "ops"}
        assert (record["version"], record["rank"], record["pid"]) == (1, rank, results[rank][1])
        assert record["error"].startswith("timed out after 1.0 s waiting for rank 2")
        assert "flight record" not in record["error"]
        if rank < 2:
            assert (record["ops"][-1]["state"], record["ops"][-1]["missing"]) == ("failed", [2])
    expected = "ranks 0, 1 waited for rank 2: all_reduce(sum) number 17 of group world, channel 0"
    shown, events = merge(capsys, files, tmp_path / "out.json")
    assert shown == [expected]
    assert sorted((event["pid"], event["args"]["seq"]) for event in events) == sorted(
        (rank, seq) for rank in range(3) for seq in range(18) if (rank, seq) != (2, 17)
    )
    hung = [event for event in events if event["args"]["seq"] == 17]
    assert all((event["name"], event["tid"]) == ("all_reduce(sum)", 0) for event in hung)
    assert all(0.9e6 < event["dur"] < 20e6 for event in hung)
    # The record of the rank that did not come is not needed.
    assert merge(capsys, files[:2], tmp_path / "out.json")[0] == [expected]


def disagrees(rank: int, folder: str) -> str:
    group = bagua.init()
    group.barrier()
    x = np.ones(4, np.float32)
    if rank == 2:
        # A rank that is late would only get the report that the others disagree.
        until(lambda: len(list(Path(folder).iterdir())) == 2)
        handle = group.broadcast(x, 1, async_op=True)
    else:
        handle = group.all_reduce(x, async_op=True)
        until(lambda: bagua.flight_recorder()[-1]["state"] == "started")
        Path(folder, str(rank)).touch()
    with pytest.raises(bagua.MismatchError) as raised:
        handle.wait()
    return record_of(raised.value)


def test_a_mismatch_shows_what_each_rank_did(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    waiting = tmp_path / "waiting"
    waiting.mkdir()
    files = world(3, env={"BAGUA_TRACE_DIR": str(tmp_path)}).run(disagrees, str(waiting))
    shown, events = merge(capsys, files, tmp_path / "out.json")
    assert shown == [
        "ranks disagree on number 1 of group world, channel 0:",
        "  ranks 0, 1: all_reduce(sum) of 4 elements of float32",
        "  rank 2: broadcast(root 1) of 4 elements of float32",
    ]
    assert {event["name"] for event in events} == {"barrier", "all_reduce(sum)", "broadcast(root 1)"}


def is_killed(rank: int) -> str:
    group = bagua.init()
    x = np.ones(4, np.float32)
    for _ in range(5):
        group.all_reduce(x)
    meet("after 5", rank, range(3))
    if rank == 1:
        await_arrival("in the reduce", (0, 2))
        os.kill(os.getpid(), signal.SIGKILL)

    def go_on() -> None:
        handle = group.reduce(x, dst=2, op="max", async_op=True)
        # A rank that is not the root may be done before rank 1 is missed; one that has not begun would be missed too.
        until(lambda: bagua.flight_recorder()[-1]["state"] in ("started", *(["done"] if rank == 0 else [])))
        arrive("in the reduce", rank)
        handle.wait()
        group.barrier()

    with pytest.raises(bagua.PeerLostError) as raised:
        go_on()
    assert raised.value.rank == 1
    return record_of(raised.value)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_killed_rank_has_no_record_and_is_named(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], transport: str
) -> None:
    env = {"BAGUA_TRACE_DIR": str(tmp_path / "traces"), "BAGUA_TRANSPORT": transport}
    results = world(3, env=env, expect_exit={1: -signal.SIGKILL}).run(is_killed)
    shown, events = merge(capsys, [results[0], results[2]], tmp_path / "out.json")
    assert any(
        line.endswith("waited for rank 1: reduce(max, root 2) number 5 of group world, channel 0") for line in shown
    ), shown
    assert {event["pid"] for event in events} == {0, 2}


def fails(rank: int, how: str) -> tuple[str, str | None]:
    # An engine's operation has the group's time, which is also that to connect; a verb has its own.
    group = bagua.init(timeout=10 if how == "engine" else 60)
    limit = None if how == "abort" else 1.0
    x = np.ones(4, np.float32)
    group.barrier()
    bucket = bagua.Bucket("b0", {"x": x})
    bucket.append_centralized()
    engine = bagua.Engine()
    engine.register([bucket])
    group.barrier()
    meet("before the failure", rank, range(2))

    def go_on() -> None:
        if rank == 1:
            group.abort("enough") if how == "abort" else until(lambda: failed(group))
            group.barrier()
        elif how == "engine":
            engine.mark_ready("x")
            engine.wait()
        elif how == "handle":
            group.all_reduce(x, async_op=True, timeout=limit).wait()
        elif how == "callback":
            errors: queue.Queue[Any] = queue.Queue()
            group.all_reduce(x, async_op=True, timeout=limit).then(errors.put)
            raise errors.get(timeout=30)
        else:
            group.all_reduce(x, timeout=limit)

    with pytest.raises(bagua.BaguaError) as raised:
        go_on()
    with pytest.raises(bagua.BaguaError) as again:
        engine.mark_ready("x")
    assert again.value.record == raised.value.record
    engine.shutdown()
    bagua.shutdown()
    return str(raised.value), raised.value.record


@pytest.mark.slow
@pytest.mark.parametrize("how", ["engine", "handle", "callback", "verb"])
def test_one_failure_has_one_record_wherever_it_is_raised(world: World, tmp_path: Path, how: str) -> None:
    results = world(2, env={"BAGUA_TRACE_DIR": str(tmp_path)}).run(fails, how)
    assert sorted(map(str, tmp_path.iterdir())) == sorted(path for _, path in results)
    for text, path in results:
        assert text.endswith(f"; flight record: {path}")
    ops = json.loads(Path(results[0][1]).read_text())["ops"]
    last = next(op for op in ops if op["state"] == "failed")
    assert (last["label"], last["missing"]) == ("b0" if how == "engine" else "", [1])


@pytest.mark.parametrize(("how", "directory"), [("abort", "traces"), ("verb", "")])
def test_an_aborted_group_and_an_empty_directory_leave_no_record(
    world: World, tmp_path: Path, how: str, directory: str
) -> None:
    traces = str(tmp_path / directory) if directory else ""
    env = {"BAGUA_TRACE_DIR": traces, "TMPDIR": str(tmp_path)}
    for text, path in world(2, env=env).run(fails, how):
        assert path is None
        assert "flight record" not in text
    assert list(tmp_path.rglob("*.json")) == []


def in_the_default_directory(rank: int, waiting: str) -> str:
    del os.environ["BAGUA_TRACE_DIR"]
    group = bagua.init()
    group.barrier()
    if rank == 1:
        until(Path(waiting).exists)
        raise KeyError("no luck")
    handle = group.all_reduce(np.ones(4, np.float32), async_op=True)
    until(lambda: bagua.flight_recorder()[-1]["state"] == "started")
    Path(waiting).touch()
    with pytest.raises(bagua.PeerRaisedError) as raised:
        handle.wait()
    return record_of(raised.value)


def test_a_rank_that_ends_by_an_exception_has_a_record_too_by_default_in_the_temporary_directory(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = world(2, env={"TMPDIR": str(tmp_path)}, expect_exit={1: 1})
    found = run.run(in_the_default_directory, str(tmp_path / "waiting"))[0]
    assert Path(found).parent.parent == tmp_path / f"bagua-{os.geteuid()}"
    assert stat.S_IMODE(Path(found).parent.parent.stat().st_mode) == 0o700
    files = sorted(map(str, Path(found).parent.iterdir()))
    assert [json.loads(Path(file).read_text())["rank"] for file in files] == [0, 1]
    shown, _ = merge(capsys, files, tmp_path / "out.json")
    assert shown == ["rank 0 waited for rank 1: all_reduce(sum) number 1 of group world, channel 0"]


# --- the command ------------------------------------------------------------------------------------------------------
