"""Flight records: a rank's last operations, written to a file when its group has failed.

The extension calls `of_failure` when it creates the exception of a failed group. Leaving a failed group calls it too,
so that a rank that never raised the error also has a record.

By default each job has a folder, and only the newest jobs of a host are kept. The rank that makes a job's folder
removes the oldest ones. Other ranks never list folders, which would be slow when a thousand ranks fail at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
import threading
from typing import Any

from bagua import config, extension
from bagua.process_state import process

__all__ = ["VERSION", "flight_recorder", "folders", "of_failure"]

#: Version of the file format.
VERSION = 1

# The name shows which rank wrote the file, and ranks need not coordinate to choose different names.
_NAME = "rank{rank}-{group}-{pid}-{number}.json"

_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC

#: Number of jobs per user whose records are kept on a host.
KEPT_JOBS = 50

#: Name of the thread that removes older jobs.
REMOVING = "bagua-old-records"

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
    with contextlib.ExitStack() as open_folders:
        if directory != config.default_trace_dir():
            os.makedirs(directory, exist_ok=True)
            place, is_first = os.open(directory, _FOLDER), False
        else:
            folder, parent = _own_folder(directory)
            open_folders.callback(os.close, parent)
            # If ranks have several ids, they share the first one: in an elastic job that of its address book.
            directory = os.path.join(folder, next(iter(process.jobs), _NO_JOB))
            place, is_first = _job_folder(directory, parent)
        open_folders.callback(os.close, place)
        path = os.path.join(os.path.abspath(directory), _write_new(place, directory, rank, group, text))
    if is_first:
        _remove_old_jobs_meanwhile(os.path.dirname(directory))
    return path


def folders() -> list[str]:
    """Returns the folders of this user's flight records on this host. Raises ValueError if records are turned off."""
    directory = config.trace_dir()
    if directory is None:
        raise ValueError("BAGUA_TRACE_DIR is empty, so there are no flight records: pass the files")
    if directory != config.default_trace_dir():
        return [directory]
    return [path for candidate in _candidates(directory) for path in (candidate, *_job_folders(candidate))]


def _candidates(directory: str) -> tuple[str, str]:
    return directory, f"{directory}-{os.geteuid()}"


def _own_folder(directory: str) -> tuple[str, int]:
    """Returns a folder that no other user but root can change, and its descriptor: `directory`, or one with the user's
    id.

    In a temporary directory, another user may have made a folder or a link of this name.
    """
    problems = []
    for candidate in _candidates(directory):
        try:
            place, _ = _open_or_make(candidate)
        except OSError as error:
            why = "is a symbolic link" if os.path.islink(candidate) else f"cannot be used: {error.strerror}"
        else:
            found = os.fstat(place)
            if found.st_uid not in (0, os.geteuid()):
                why = f"belongs to user {found.st_uid}"
            elif found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX:
                why = "can be changed by other users"
            elif not os.access(candidate, os.W_OK | os.X_OK, effective_ids=True):
                why = "cannot be written to"
            else:
                return candidate, place
            os.close(place)
        problems.append(f"{candidate} {why}")
    raise PermissionError(" and ".join(problems))


def _open_or_make(path: str, parent: int | None = None) -> tuple[int, bool]:
    """Returns the descriptor of a folder, and True if this process made it.

    First tries to open the folder, because most ranks of a host find it, and ranks that try to make it wait for each
    other.
    """
    flags = _FOLDER | os.O_NOFOLLOW
    with contextlib.suppress(FileNotFoundError):
        return os.open(path, flags, dir_fd=parent), False
    try:
        os.mkdir(path, 0o700, dir_fd=parent)
        is_new = True
    except FileExistsError:
        is_new = False
    return os.open(path, flags, dir_fd=parent), is_new


def _job_folder(path: str, parent: int) -> tuple[int, bool]:
    """Returns the descriptor of a job's folder inside the user's folder, and True if this process made it."""
    place, is_first = _open_or_make(os.path.basename(path), parent)
    # All users share root's sticky folder, so another user may have made this one.
    if os.fstat(place).st_uid != os.geteuid():
        os.close(place)
        raise PermissionError(f"{path} belongs to another user")
    return place, is_first


def _job_folders(folder: str) -> list[str]:
    """Returns the folders of this user's jobs, oldest first. Empty if the parent cannot be read."""
    found = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if _JOB.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                about = entry.stat(follow_symlinks=False)
                if about.st_uid == os.geteuid():
                    found.append((about.st_mtime_ns, entry.path))
    return [path for _, path in sorted(found)]


def _remove_old_jobs_meanwhile(folder: str) -> None:
    """Runs `_remove_old_jobs` on a thread, so that ranks that continue after a failure need not wait for this one.

    The process does not exit before that thread ends, so that old records do not pile up.
    """
    thread = threading.Thread(target=_remove_old_jobs, args=(folder,), name=REMOVING)
    try:
        thread.start()
    # An interpreter that is shutting down cannot start threads. No rank waits for it either.
    except RuntimeError:
        _remove_old_jobs(folder)


def _remove_old_jobs(folder: str) -> None:
    for path in _job_folders(folder)[:-KEPT_JOBS]:
        shutil.rmtree(path, ignore_errors=True)


def _write_new(place: int, directory: str, rank: int, group: str, text: str) -> str:
    for number in range(10_000):
        name = _NAME.format(rank=rank, group=_plain(group), pid=os.getpid(), number=number)
        # Never write to an existing file, or to a link that another user made.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(name, flags, 0o600, dir_fd=place)
        except FileExistsError:
            continue
        try:
            with open(descriptor, "wb") as file:
                file.write(text.encode())
        except BaseException:
            # Half a record would mislead.
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=place)
            raise
        return name
    raise FileExistsError(f"{directory} has too many records of rank {rank}")


def _plain(group: str) -> str:
    return _NOT_PLAIN.sub("_", group)[:80] or "group"
