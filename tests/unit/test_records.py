"""Where flight records are written in a temporary directory in which every user may make folders and links."""

from __future__ import annotations

import json
import os
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bagua import config, records, trace
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
    """Writes a record, and waits until old ones are removed."""
    found = records.of_failure(1, "world", 0, "host", "why")
    for thread in threading.enumerate():
        if thread.name == records.REMOVING:
            thread.join()
    return found


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


ALLOWED = {"nothing": nothing, "own": folder(0o755), "own and sticky": folder(0o1777)}
REFUSED = {
    "link": (link, "is a symbolic link"),
    "link to nothing": (dangling_link, "is a symbolic link"),
    "file": (file, "cannot be used: Not a directory"),
    "all may change it": (folder(0o777), "can be changed by other users"),
    "a group may change it": (folder(0o770), "can be changed by other users"),
}
FOREIGN = {
    "of another user": (folder(0o755, OTHER), f"belongs to user {OTHER}"),
    "of another user, for all": (folder(0o1777, OTHER), f"belongs to user {OTHER}"),
}
CASES = [
    *(pytest.param(*case, id=name) for name, case in REFUSED.items()),
    *(pytest.param(*case, id=name, marks=needs_root) for name, case in FOREIGN.items()),
]


@pytest.mark.parametrize("make", ALLOWED.values(), ids=ALLOWED)
def test_a_folder_of_this_user_has_the_record(tmp: Path, make: Callable[[Path], None]) -> None:
    make(tmp / "bagua")
    path, note = record()
    assert path is not None
    assert Path(path).parent == tmp / "bagua" / JOB
    assert note == f"; flight record: {path}"
    assert json.loads(Path(path).read_text())["error"] == "why"
    assert stat.S_IMODE(os.lstat(path).st_mode) == 0o600


@pytest.mark.parametrize(("make", "why"), CASES)
def test_what_another_user_may_have_made_is_not_used(tmp: Path, make: Callable[[Path], None], why: str) -> None:
    make(tmp / "bagua")
    before = os.lstat(tmp / "bagua")
    path, _ = record()
    own = tmp / f"bagua-{os.geteuid()}"
    assert path is not None
    assert Path(path).parent == own / JOB
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    after = os.lstat(tmp / "bagua")
    assert (before.st_mtime_ns, before.st_mode) == (after.st_mtime_ns, after.st_mode)


@pytest.mark.parametrize(("make", "why"), CASES)
def test_without_a_folder_of_this_user_there_is_no_record_and_the_error_says_why(
    tmp: Path, make: Callable[[Path], None], why: str
) -> None:
    own = tmp / f"bagua-{os.geteuid()}"
    link(tmp / "bagua")
    make(own)
    path, note = record()
    assert path is None
    assert note == f"; no flight record: PermissionError: {tmp}/bagua is a symbolic link and {own} {why}"


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
            (tmp / "bagua" / "mine").mkdir()
            (tmp / "bagua" / ("f" * 16)).symlink_to(tmp / "bagua" / "mine")
    assert {path.name for path in (tmp / "bagua").iterdir()} == {*jobs[2:], "mine", "f" * 16}
    assert trace.newest_job(records.folders()) == [Path(path)]
    kept = [str(tmp / "bagua" / job) for job in jobs[2:]]
    assert records.folders() == [str(tmp / "bagua"), *kept, f"{tmp}/bagua-{os.geteuid()}"]


@needs_root
def test_a_jobs_folder_of_another_user_is_not_used(tmp: Path) -> None:
    folder(0o1777)(tmp / "bagua")
    folder(0o777, OTHER)(tmp / "bagua" / JOB)
    path, note = record()
    assert path is None
    assert note == f"; no flight record: PermissionError: {tmp}/bagua/{JOB} belongs to another user"


@pytest.mark.parametrize("variable", ["TMPDIR", "TEMP", "TMP", None])
@pytest.mark.parametrize("exists", [True, False])
def test_the_default_folder_is_in_the_temporary_directory_and_no_file_is_made_to_find_it(
    variable: str | None, exists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TMPDIR", "TEMP", "TMP"):
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv(variable, str(tmp_path if exists else tmp_path / "none"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    expected = os.path.join(tempfile.gettempdir(), "bagua")
    # What is set by the program, or was found before, counts.
    assert config.default_trace_dir() == expected
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: pytest.fail("it makes a file"))
    assert config.default_trace_dir() == expected
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert config.default_trace_dir() == str(tmp_path / "bagua")
