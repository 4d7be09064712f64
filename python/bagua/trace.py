"""Compares the flight records of several ranks: finds which ranks are missing from which operation.

Operations of different ranks are the same if group, channel and number are equal. Each rank numbers messages (send,
recv, exchange) on its own, so for a message only that rank's record is used.
"""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bagua.records import VERSION

__all__ = ["Record", "chrome_trace", "findings", "newest_job", "read"]

Operation = dict[str, Any]

# Kinds of messages, which have their own numbers.
_MESSAGES = ("send/recv", "exchange")

# Fields that must be equal on all ranks of one operation.
_EQUAL = ("kind", "root", "dtype", "count")

# Types of the fields that are used.
_TYPES: dict[str, tuple[type, ...]] = {
    "group": (str,),
    "channel": (int,),
    "seq": (int, type(None)),
    "state": (str,),
    "begin": (int, float, type(None)),
    "end": (int, float, type(None)),
    "missing": (list,),
    "kind": (str,),
    "root": (int, type(None)),
    "dtype": (str, type(None)),
    "count": (int, type(None)),
}


@dataclass
class Record:
    """The flight records of one rank."""

    rank: int
    """World rank."""
    host: str
    """Name of the rank's host."""
    pid: int
    """Id of the rank's process."""
    jobs: set[str]
    """Ids of the job. Two records with an id in common are of the same job. Empty in a record of an older version."""
    errors: list[str]
    """Error text of each file."""
    ops: dict[int, Operation]
    """Operations by number in the process, in ascending order."""


@dataclass(frozen=True, order=True)
class _OperationKey:
    """The key of a collective operation of a job."""

    group: str
    channel: int
    seq: int

    def __str__(self) -> str:
        return f"number {self.seq} of group {self.group}, channel {self.channel}"


def read(paths: Iterable[Path]) -> list[Record]:
    """Reads flight records. Returns one record per rank, in order of rank; several files of one process become one
    record.

    Raises ValueError for a file that is not a record, for files of several jobs, and for two processes of the same
    rank; OSError for a file that cannot be read.
    """
    files = [(path, _read_one(path)) for path in paths]
    known_jobs = _jobs([(path, record) for path, record in files if record.jobs])
    if len(known_jobs) > 1:
        jobs = "; ".join(", ".join(str(path) for path, _ in job) for job in known_jobs)
        raise ValueError(f"these records are of {len(known_jobs)} jobs; pass the records of one job: {jobs}")
    found: dict[int, tuple[Path, Record]] = {}
    for path, record in files:
        first, known = found.setdefault(record.rank, (path, record))
        if (known.host, known.pid) != (record.host, record.pid):
            raise ValueError(
                f"{first} and {path} are of rank {record.rank} in two processes ({known.pid} on {known.host}, "
                f"{record.pid} on {record.host}): pass the records of one job"
            )
        if known is not record:
            known.errors += record.errors
            for n, op in record.ops.items():
                # A later file may know how the operation ended.
                if n not in known.ops or op["end"] is not None:
                    known.ops[n] = op
            known.ops = dict(sorted(known.ops.items()))
    return [record for _, (_, record) in sorted(found.items())]


def newest_job(folders: Iterable[str]) -> list[Path]:
    """Returns the record files of the job that wrote last, in these folders. Raises ValueError if there are none."""
    folders = list(folders)
    files = []
    for path in (path for folder in folders for path in Path(folder).glob("*.json")):
        # Skip files that are not records, or are still being written.
        with contextlib.suppress(ValueError, OSError):
            files.append((path, _read_one(path)))
    if not files:
        raise ValueError(f"there are no flight records in {' or '.join(folders)}: pass the files")
    newest = max(_jobs(files), key=lambda job: max(path.stat().st_mtime for path, _ in job))
    return sorted(path for path, _ in newest)


def _jobs(files: Iterable[tuple[Path, Record]]) -> list[list[tuple[Path, Record]]]:
    """Groups files by job. Files are of one job if they have an id in common, directly or through other files."""
    jobs: list[tuple[set[str], list[tuple[Path, Record]]]] = []
    for path, record in files:
        names, members = set(record.jobs), [(path, record)]
        for job in [job for job in jobs if job[0] & names]:
            jobs.remove(job)
            names, members = names | job[0], job[1] + members
        jobs.append((names, members))
    return [members for _, members in jobs]


def _read_one(path: Path) -> Record:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise ValueError(f"expected a JSON object, got {type(data).__name__}")
        if data.get("version") != VERSION:
            raise ValueError(f"version {data.get('version')!r}, expected {VERSION}")
        ops = {op["n"]: op for op in sorted(data["ops"], key=lambda op: int(op["n"]))}
        for op in ops.values():
            absent = [
                key for key in ("group", "channel", "seq", "state", "begin", "end", "missing", *_EQUAL) if key not in op
            ]
            if absent:
                raise ValueError(f"operation {op['n']} has no {absent[0]!r}")
            wrong = [key for key, types in _TYPES.items() if not isinstance(op[key], types)]
            if wrong:
                raise ValueError(f"operation {op['n']} has {op[wrong[0]]!r} as {wrong[0]!r}")
        jobs = set(map(str, data.get("jobs", ())))
        return Record(int(data["rank"]), str(data["host"]), int(data["pid"]), jobs, [str(data["error"])], ops)
    except IsADirectoryError as error:
        raise ValueError(f"{path} is a directory: pass the records in it, {path / '*.json'}") from error
    except KeyError as error:
        raise ValueError(f"{path} is not a flight record: it lacks {error}") from error
    # RecursionError: the JSON is nested too deeply.
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a flight record: {error}") from error


def findings(records: Sequence[Record]) -> list[str]:
    """Returns lines of text about the operations that hung, failed or differed, in the order in which they began. Lines
    about messages come last.
    """
    found: list[str] = []
    places, messages = _by_key(records)
    for place, ops in sorted(places.items(), key=lambda item: _first_begin(item[1].values())):
        if all(op["state"] == "done" for op in ops.values()):
            continue
        waiting = sorted(rank for rank, op in ops.items() if op["state"] != "done")
        missing = _missing(place, ops, records)
        if len({tuple(op[key] for key in _EQUAL) for op in ops.values()}) > 1:
            found += _disagreement(place, ops)
        elif missing:
            found.append(_waited(waiting, missing, ops[waiting[0]], place))
        else:
            found.append(f"{_ranks(waiting)} failed, and no rank was missing: {_name(ops[waiting[0]])} {place}")
    for rank, op in messages:
        if op["missing"]:
            at = _OperationKey(op["group"], op["channel"], op["seq"])
            found.append(_waited([rank], sorted(op["missing"]), op, at))
    return found


def _by_key(
    records: Sequence[Record],
) -> tuple[dict[_OperationKey, dict[int, Operation]], list[tuple[int, Operation]]]:
    """Returns the collectives that began, by operation and rank, and the messages that failed, with their ranks."""
    places: dict[_OperationKey, dict[int, Operation]] = defaultdict(dict)
    messages = []
    for record in records:
        for op in record.ops.values():
            if op["begin"] is None or op["seq"] is None:
                continue
            if op["kind"] in _MESSAGES:
                if op["state"] != "done":
                    messages.append((record.rank, op))
                continue
            # A group that was rebuilt under the same name counts from 0 again. The last one wins.
            places[_OperationKey(op["group"], op["channel"], op["seq"])][record.rank] = op
    return places, messages


def _first_begin(ops: Iterable[Operation]) -> float:
    return min(float(op["begin"]) for op in ops)


def _missing(place: _OperationKey, ops: Mapping[int, Operation], records: Sequence[Record]) -> list[int]:
    """Returns the world ranks that never began the operation.

    These are the ranks that other ranks missed and whose own record does not have the operation, and ranks whose record
    ends before it on this channel.
    """
    missed = {rank for op in ops.values() for rank in op["missing"]}
    for record in records:
        numbers = [
            op["seq"]
            for op in record.ops.values()
            if (op["group"], op["channel"]) == (place.group, place.channel)
            and op["begin"] is not None
            and op["seq"] is not None
            and op["kind"] not in _MESSAGES
        ]
        if numbers and max(numbers) < place.seq:
            missed.add(record.rank)
    return sorted(missed - set(ops))


def _disagreement(place: _OperationKey, ops: Mapping[int, Operation]) -> list[str]:
    """Returns lines that say what each rank did. Ranks that did the same share a line."""
    by_doing: dict[str, list[int]] = defaultdict(list)
    for rank, op in sorted(ops.items()):
        by_doing[f"{_name(op)} of {op['count']} elements of {op['dtype']}{_label(op)}"].append(rank)
    return [f"ranks disagree on {place}:", *(f"  {_ranks(ranks)}: {doing}" for doing, ranks in by_doing.items())]


def _waited(waiting: Sequence[int], missing: Sequence[int], op: Operation, place: _OperationKey) -> str:
    return f"{_ranks(waiting)} waited for {_ranks(missing)}: {_name(op)} {place}{_label(op)}"


def _name(op: Operation) -> str:
    """Returns the kind with its root, as in error texts: "reduce(sum, root 1)"."""
    kind, root = str(op["kind"]), op["root"]
    if root is None:
        return kind
    return f"{kind[:-1]}, root {root})" if kind.endswith(")") else f"{kind}(root {root})"


def _label(op: Operation) -> str:
    label = str(op.get("label") or "")
    return f", in {'bucket ' if label.isdecimal() else ''}{label}" if label else ""


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def chrome_trace(records: Sequence[Record]) -> dict[str, Any]:
    """Returns all operations that began as a trace in Chrome's format, in microseconds since the epoch.

    Each rank is a process, and each channel a thread. An operation that never ended lasts until the last time in any
    record.

    Source: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU ("Trace Event Format").
    """
    times = [time for record in records for op in record.ops.values() for time in (op["begin"], op["end"]) if time]
    return {"traceEvents": [event for record in records for event in _events(record, max(times, default=0.0))]}


def _events(record: Record, last: float) -> Iterator[dict[str, Any]]:
    for op in record.ops.values():
        if op["begin"] is None:
            continue
        end = last if op["end"] is None else op["end"]
        yield {
            "name": _name(op),
            "cat": op["group"],
            "ph": "X",
            "ts": op["begin"] * 1e6,
            "dur": max(end - op["begin"], 0.0) * 1e6,
            "pid": record.rank,
            "tid": op["channel"],
            "args": {key: value for key, value in op.items() if key not in ("begin", "end", "kind", "channel")},
        }
