"""The command line: `bagua`, or `python -m bagua`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from bagua import engine, trace
from bagua.commands import bench, doctor, top
from bagua.errors import BaguaError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; the exit code: 0, 1 for problems and failed ranks, 2 for what cannot be used or is missing."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        code: int = options.run(options)
    except (ImportError, OSError, ValueError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    except BaguaError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bagua", description="Tools for jobs that communicate with Bagua.")
    parser.add_argument("-V", "--version", action="version", version=f"bagua {engine.version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    traces = commands.add_parser("trace", help="flight records of failed ranks")
    actions = traces.add_subparsers(required=True, metavar="ACTION")
    merge = actions.add_parser(
        "merge",
        help="which rank did not come to which operation",
        description="Compares the flight records of one failed job and prints each operation that hung or differed.",
    )
    merge.add_argument("files", nargs="+", metavar="FILE", type=Path, help="flight records, one or more of each rank")
    merge.add_argument(
        "--out", type=Path, metavar="FILE", help="write all operations as a trace for Perfetto or Chrome"
    )
    merge.set_defaults(run=_merge)
    for command in (doctor, bench, top):
        command.add(commands)
    return parser


def _merge(options: argparse.Namespace) -> int:
    records = trace.read(options.files)
    for line in trace.findings(records) or ["no operation hung in these records"]:
        print(line)
    if options.out is not None:
        options.out.write_text(json.dumps(trace.chrome_trace(records), allow_nan=False), encoding="utf-8")
    return 0
