"""`bagua trace merge` on records that are written here: what a line says, and what no line is printed for."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from bagua import cli, trace


def op(n: int, seq: int | None, state: str = "done", **more: Any) -> dict[str, Any]:
    begun = state != "queued"
    return {
        "n": n,
        "group": "world",
        "channel": 0,
        "seq": seq,
        "kind": "all_reduce(sum)",
        "label": "",
        "dtype": "float32",
        "count": 4,
        "bytes": 16,
        "root": None,
        "state": state,
        "begin": 1.8e9 + n if begun else None,
        "end": 1.8e9 + n + 0.5 if state in ("done", "failed") else None,
        "missing": [],
    } | more


def write(folder: Path, rank: int, ops: list[dict[str, Any]], name: str = "", pid: int = 7) -> Path:
    path = folder / f"{name or rank}.json"
    path.write_text(json.dumps({"version": 1, "rank": rank, "host": "a", "pid": pid, "error": "x", "ops": ops}))
    return path


def lines(folder: Path, *ranks: list[dict[str, Any]]) -> list[str]:
    return trace.findings(trace.read([write(folder, rank, ops) for rank, ops in enumerate(ranks)]))


@pytest.mark.parametrize(("label", "where"), [("b0", "b0"), ("12", "bucket 12")])
def test_a_rank_whose_record_ends_earlier_is_missing_even_where_no_record_says_so(
    tmp_path: Path, label: str, where: str
) -> None:
    hung = [op(0, 0), op(1, 1, "started", kind="reduce(max)", root=2, label=label)]
    shown = lines(tmp_path, hung, [op(0, 0), op(1, None, "queued")], hung)
    waited = "ranks 0, 2 waited for rank 1: reduce(max, root 2) number 1"
    assert shown == [f"{waited} of group world, channel 0, in {where}"]


def test_a_rank_that_others_missed_and_that_had_begun_by_its_own_record_was_not_missing(tmp_path: Path) -> None:
    first = [op(0, 0, "failed", missing=[1, 2])]
    shown = lines(tmp_path, first, [op(0, 0, "failed", missing=[2])])
    assert shown == ["ranks 0, 1 waited for rank 2: all_reduce(sum) number 0 of group world, channel 0"]


def test_ranks_that_wait_for_each_other_in_two_channels_are_both_shown(tmp_path: Path) -> None:
    both = [op(0, 0), op(1, 0, channel=1)]
    one, other = op(2, 1, "failed", missing=[1]), op(2, 1, "failed", channel=1, kind="barrier", missing=[0])
    assert lines(tmp_path, [*both, one], [*both, other]) == [
        "rank 0 waited for rank 1: all_reduce(sum) number 1 of group world, channel 0",
        "rank 1 waited for rank 0: barrier number 1 of group world, channel 1",
    ]


def test_operations_that_all_ranks_did_are_no_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = [op(n, n) for n in range(3)]
    # An older operation that only one ring still holds.
    files = [write(tmp_path, 0, done), write(tmp_path, 1, done[1:])]
    assert cli.main(["trace", "merge", *map(str, files)]) == 0
    assert capsys.readouterr().out == "no operation hung in these records\n"


def test_an_operation_that_failed_with_all_ranks_in_it_says_so(tmp_path: Path) -> None:
    failed = [op(0, 0, "failed")]
    assert lines(tmp_path, failed, failed) == [
        "ranks 0, 1 failed, and no rank was missing: all_reduce(sum) number 0 of group world, channel 0"
    ]


def test_ranks_that_did_different_things_are_shown_with_what_each_did(tmp_path: Path) -> None:
    differs = op(0, 0, "failed")
    shown = lines(tmp_path, [differs], [differs | {"count": 5}], [differs])
    assert shown == [
        "ranks disagree on number 0 of group world, channel 0:",
        "  ranks 0, 2: all_reduce(sum) of 4 elements of float32",
        "  rank 1: all_reduce(sum) of 5 elements of float32",
    ]


def test_records_of_two_processes_of_one_rank_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [write(tmp_path, 0, [], "a"), write(tmp_path, 0, [], "b", pid=8)]
    assert cli.main(["trace", "merge", *map(str, files)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "a.json" in shown.err
    assert "b.json are of rank 0 in two processes (7 on a, 8 on a)" in shown.err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "Expecting value"),
        ("[]", "expected a JSON object, got list"),
        ("null", "expected a JSON object, got NoneType"),
        ("{}", "version None, expected 1"),
        ('{"version": 2}', "version 2, expected 1"),
        (
            '{"version": 1, "rank": 0, "host": "a", "pid": 1, "error": "", "ops": [{"n": 3}]}',
            "operation 3 has no 'group'",
        ),
        ('{"version": 1}', "is not a flight record: it lacks 'ops'"),
        ('{"version": 1, "ops": [{}]}', "is not a flight record: it lacks 'n'"),
        ("[" * 200_000, "is not a flight record: "),
    ],
)
def test_a_file_that_is_no_record_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, says: str
) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    assert cli.main(["trace", "merge", str(path)]) == 2
    shown = capsys.readouterr().err
    assert str(path) in shown
    assert says in shown
    assert cli.main(["trace", "merge", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err
    assert cli.main(["trace", "merge", str(tmp_path)]) == 2
    assert f"{tmp_path} is a directory: pass the records in it, {tmp_path}/*.json" in capsys.readouterr().err


def of_job(folder: Path, rank: int, jobs: list[str], ops: list[dict[str, Any]], name: str) -> Path:
    path = write(folder, rank, ops, name)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"jobs": jobs}))
    return path


def test_records_of_two_jobs_are_refused_and_each_job_is_named(tmp_path: Path) -> None:
    one = of_job(tmp_path, 0, ["a"], [op(0, 3466, "failed", missing=[1])], "first")
    other = of_job(tmp_path, 1, ["b"], [op(0, 1, "failed", missing=[0])], "second")
    with pytest.raises(ValueError, match=f"records are of 2 jobs; pass the records of one job: {one}; {other}"):
        trace.read([one, other])
    assert cli.main(["trace", "merge", str(one), str(other)]) == 2
    # Rank 2 rejoined the job of rank 0, and rank 1 was in both of its groups.
    middle = of_job(tmp_path, 1, ["a", "c"], [op(0, 0)], "middle")
    joined = of_job(tmp_path, 2, ["c"], [op(0, 0)], "joined")
    assert [record.rank for record in trace.read([one, joined, middle])] == [0, 1, 2]
    # An older version wrote no job.
    assert len(trace.read([one, write(tmp_path, 1, [op(0, 0)])])) == 2


def test_without_files_the_newest_job_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BAGUA_TRACE_DIR", str(tmp_path))
    assert cli.main(["trace", "merge"]) == 2
    assert f"there are no flight records in {tmp_path}" in capsys.readouterr().err
    for age, (name, rank, jobs) in enumerate([("r1", 1, ["b"]), ("old", 0, ["a"]), ("r0", 0, ["b"])]):
        path = of_job(tmp_path, rank, jobs, [op(0, 7, "failed", missing=[2])], name)
        os.utime(path, (1e9 + age, 1e9 + age))
    (tmp_path / "other.json").write_text("{}")
    assert cli.main(["trace", "merge"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"2 records of the newest job: {tmp_path}",
        "ranks 0, 1 waited for rank 2: all_reduce(sum) number 7 of group world, channel 0",
    ]
    monkeypatch.setenv("BAGUA_TRACE_DIR", "")
    assert cli.main(["trace", "merge"]) == 2
    assert "BAGUA_TRACE_DIR is empty" in capsys.readouterr().err
