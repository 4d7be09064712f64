"""The place of flight records in a temporary directory in which every user may make folders and links."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bagua import records, trace
from bagua.process_state import process

OTHER = 65534

JOB = "5a" * 8

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")


@pytest.fixture
def tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The temporary directory of this process, and a folder outside it."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.delenv("BAGUA_TRACE_DIR", raising=False)
    monkeypatch.setattr(process, "records", {})
    monkeypatch.setattr(process, "jobs", [JOB])
    yield tmp_path / "tmp"
    assert list((tmp_path / "elsewhere").iterdir()) == []


def record() -> tuple[str | None, str]:
    return records.of_failure(1, "world", 0, "host", "why")


def nothing(path: Path) -> None:
    """The name is free."""


def link(path: Path) -> None:
    path.symlink_to(path.parent.parent / "elsewhere")


def dangling_link(path: Path) -> None:
    path.symlink_to(path.parent / "absent")


def file(path: Path) -> None:
    path.touch()


def folder(mode: int, owner: int | None = None) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.mkdir()
        path.chmod(mode)
        if owner is not None:
            os.chown(path, owner, owner)

    return make


REFUSED = {
    "link": link,
    "link to nothing": dangling_link,
    "file": file,
    "all may change it": folder(0o1777),
    "a group may change it": folder(0o770),
}
OWN = f"bagua-{os.geteuid()}"


@pytest.mark.parametrize("make", [nothing, folder(0o755)], ids=["nothing", "own"])
def test_a_folder_of_this_user_has_the_record(tmp: Path, make: Callable[[Path], None]) -> None:
    make(tmp / OWN)
    path, note = record()
    assert path is not None
    assert Path(path).parent == tmp / OWN / JOB
    assert note == f"; flight record: {path}"
    assert json.loads(Path(path).read_text())["error"] == "why"
    assert stat.S_IMODE(os.lstat(path).st_mode) == 0o600
    assert make is not nothing or stat.S_IMODE((tmp / OWN).stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "make",
    [
        *(pytest.param(make, id=name) for name, make in REFUSED.items()),
        pytest.param(folder(0o755, OTHER), id="of another user", marks=needs_root),
    ],
)
def test_what_another_user_may_have_made_is_not_used_and_the_error_says_why(
    tmp: Path, make: Callable[[Path], None]
) -> None:
    make(tmp / OWN)
    path, note = record()
    assert path is None
    why = f"{tmp}/{OWN} is not a folder that only this user can change"
    assert note == f"; no flight record: PermissionError: {why}"


def test_a_directory_that_the_user_names_may_be_a_link(tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp / "mine").mkdir()
    (tmp / "link").symlink_to(tmp / "mine")
    monkeypatch.setenv("BAGUA_TRACE_DIR", str(tmp / "link"))
    path, _ = record()
    assert path is not None
    assert Path(path).parent == tmp / "link"


def test_the_first_record_of_a_job_removes_those_of_all_but_the_newest_jobs(
    tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "KEPT_JOBS", 3)
    jobs = [f"{number:016x}" for number in range(5)]
    for age, job in enumerate(jobs):
        monkeypatch.setattr(process, "jobs", [job, f"a later view of {job}"])
        monkeypatch.setattr(process, "records", {})
        path, _ = record()
        assert path is not None
        assert Path(path).parent.name == job
        os.utime(Path(path).parent, (age, age))
        if age == 1:
            # What is no folder of a job stays, however old it is.
            (tmp / OWN / "mine").mkdir()
            (tmp / OWN / ("f" * 16)).symlink_to(tmp / OWN / "mine")
    assert {path.name for path in (tmp / OWN).iterdir()} == {*jobs[2:], "mine", "f" * 16}
    assert trace.newest_job(records.folders()) == [Path(path)]
    assert records.folders() == [str(tmp / OWN), *(str(tmp / OWN / job) for job in jobs[2:])]
