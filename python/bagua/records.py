"""Flight records: the last operations of a rank, written to a file when its group has failed.

The extension calls `of_failure` when it creates the exception of a failed group; leaving a group that has failed does
so too, so that a rank that never raised the error has a record as well.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from typing import Any

from bagua import config, engine
from bagua.lifecycle import process

__all__ = ["VERSION", "flight_recorder", "of_failure"]

#: Format of the files.
VERSION = 1

# With them a reader sees at once whose file it is, and nobody has to be asked whether the name is free.
_NAME = "rank{rank}-{group}-{pid}-{number}.json"


def flight_recorder() -> list[dict[str, Any]]:
    """The last 1,000 operations of this process, in all of its groups, oldest first.

    Each is a dict: `n` (its number in this process, counts by one), `group` and `channel` (the lane), `seq` (its number
    in the lane, or, of a message, between the two ranks; None until it begins), `kind` such as "all_reduce(sum)",
    `label` (its bucket, or ""), `dtype`, `count` and `bytes`, `root` (rank of the group, or None), `state` ("queued",
    "started", "done" or "failed"), `begin` and `end` (seconds since the epoch, or None), and `missing` (the world ranks
    that had not come when it failed). In a forked child it starts empty.
    """
    return engine.flight_recorder()


def of_failure(failure: int, group: str, rank: int, host: str, error: str) -> tuple[str | None, str]:
    """Writes the record of a failed group, at the first call for this failure; the path, and what the error's text
    says of it. `failure` is the id of the group in this process, `rank` a world rank.

    Raises nothing: what prevents the record must not replace the error.
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
    # Also what an interpreter that is shutting down raises.
    except Exception as failure:
        return None, f"; no flight record: {type(failure).__name__}: {failure}"
    return path, f"; flight record: {path}"


def _write(directory: str, group: str, rank: int, host: str, error: str) -> str:
    record = {
        "version": VERSION,
        "rank": rank,
        "host": host,
        "pid": os.getpid(),
        "error": error,
        "ops": engine.flight_recorder(),
    }
    text = json.dumps(record, allow_nan=False)
    if not os.path.isdir(directory):
        os.makedirs(directory, exist_ok=True)
        if directory == config.default_trace_dir():
            # As the temporary directory that it is in: for every user of this host.
            os.chmod(directory, 0o1777)
    names = (_NAME.format(rank=rank, group=_plain(group), pid=os.getpid(), number=number) for number in range(10_000))
    for name in names:
        path = os.path.join(os.path.abspath(directory), name)
        # Neither an older file nor a link that somebody put there is ever written to.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(path, flags, 0o600)
        except FileExistsError:
            continue
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
        except BaseException:
            # Half a record would only mislead.
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise
        return path
    raise FileExistsError(f"{directory} has too many records of rank {rank}")


def _plain(group: str) -> str:
    """The group's name as a part of a file's name."""
    return re.sub(r"[^\w.,#-]+", "_", group)[:80] or "group"
