"""Flight records: a rank's last operations, written to a file when its group has failed.

The extension calls `of_failure` when it creates the exception of a failed group. Leaving a failed group calls it too,
so that a rank that never raised the error also has a record.

By default each job has a folder, and only the newest jobs of a host are kept. The rank that makes a job's folder
removes the oldest ones.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
from typing import Any

from bagua import config, extension
from bagua.process_state import process

__all__ = ["VERSION", "flight_recorder", "folders", "of_failure"]

#: Version of the file format.
VERSION = 1

# The name shows which rank wrote the file, and ranks need not coordinate to choose different names.
_NAME = "rank{rank}-{group}-{pid}-{number}.json"

#: Number of jobs per user whose records are kept on a host.
KEPT_JOBS = 50

# The id of a job, see `process_state.note_job`.
_JOB = re.compile(r"[0-9a-f]{16}")
_NO_JOB = "0" * 16
_NOT_PLAIN = re.compile(r"[^\w.,#-]+")


def flight_recorder() -> list[dict[str, Any]]:
    """Returns the last 1,000 operations of this process, in all its groups, oldest first.

    Each operation is a dict with these keys:

    - `n`: number of the operation in this process.
    - `group` and `channel`: channel 0 has the group's own operations, and each engine has a further one.
    - `seq`: number in the channel, or for a message between the two ranks; None until the operation begins.
    - `kind`, such as "all_reduce(sum)"; `label` (the bucket, or ""); `dtype`, `count` and `bytes`.
    - `root`: rank of the group, or None.
    - `state`: "queued", "started", "done" or "failed".
    - `begin` and `end`: seconds since the epoch, or None.
    - `missing`: world ranks that had not come when the operation failed.

    The list starts empty in a forked child.
    """
    return extension.flight_recorder()


def of_failure(failure: int, group: str, rank: int, host: str, error: str) -> tuple[str | None, str]:
    """Writes the record of a failed group, at the first call for this failure.

    `failure` is the id of the group in this process, `rank` a world rank. Returns the record's path (None if there is
    no record), and the text that the error's message ends with. Raises nothing, because a problem with the record must
    not replace the error.
    """
    with process.records_lock:
        known = process.records.get(failure)
        if known is None:
            known = process.records[failure] = _write_or_explain(group, rank, host, error)
        return known


def _write_or_explain(group: str, rank: int, host: str, error: str) -> tuple[str | None, str]:
    directory = config.trace_dir()
    if directory is None:
        return None, ""
    try:
        path = _write(directory, group, rank, host, error)
    # Any exception, including those of an interpreter that is shutting down.
    except Exception as failure:
        return None, f"; no flight record: {type(failure).__name__}: {failure}"
    return path, f"; flight record: {path}"


def _write(directory: str, group: str, rank: int, host: str, error: str) -> str:
    record = {
        "version": VERSION,
        "rank": rank,
        "host": host,
        "pid": os.getpid(),
        "jobs": process.jobs,
        "error": error,
        "ops": extension.flight_recorder(),
    }
    text = json.dumps(record, allow_nan=False)
    jobs = None
    if directory == config.default_trace_dir():
        jobs = _own_folder(directory)
        # If ranks have several ids, they share the first one: in an elastic job that of its address book.
        directory = os.path.join(directory, next(iter(process.jobs), _NO_JOB))
    is_first = jobs is not None and not os.path.exists(directory)
    os.makedirs(directory, mode=0o700, exist_ok=True)
    path = _write_new(os.path.abspath(directory), rank, group, text)
    if is_first and jobs is not None:
        for old in _job_folders(jobs)[:-KEPT_JOBS]:
            shutil.rmtree(old, ignore_errors=True)
    return path


def folders() -> list[str]:
    """Returns the folders of this user's flight records on this host. Raises ValueError if records are turned off."""
    directory = config.trace_dir()
    if directory is None:
        raise ValueError("BAGUA_TRACE_DIR is empty, so there are no flight records: pass the files")
    return [directory, *(_job_folders(directory) if directory == config.default_trace_dir() else ())]


def _own_folder(directory: str) -> str:
    """Makes a folder that no other user can change, and returns it. Raises OSError if another user has taken the name.

    In a temporary directory, another user may have made a folder or a link of this name.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(directory, 0o700)
    found = os.lstat(directory)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise PermissionError(f"{directory} is not a folder that only this user can change")
    return directory


def _job_folders(folder: str) -> list[str]:
    """Returns the folders of this user's jobs, oldest first. Empty if the parent cannot be read."""
    found = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if _JOB.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                found.append((entry.stat(follow_symlinks=False).st_mtime_ns, entry.path))
    return [path for _, path in sorted(found)]


def _write_new(directory: str, rank: int, group: str, text: str) -> str:
    for number in range(10_000):
        name = _NAME.format(rank=rank, group=_plain(group), pid=os.getpid(), number=number)
        path = os.path.join(directory, name)
        # Never write to an existing file, or to a link that another user made.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(path, flags, 0o600)
        except FileExistsError:
            continue
        try:
            with open(descriptor, "wb") as file:
                file.write(text.encode())
        except BaseException:
            # Half a record would mislead.
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise
        return path
    raise FileExistsError(f"{directory} has too many records of rank {rank}")


def _plain(group: str) -> str:
    return _NOT_PLAIN.sub("_", group)[:80] or "group"
