"""The command line: `bagua`, or `python -m bagua`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from bagua import records, trace
from bagua.commands import bench, doctor, tables, top
from bagua.commands.parser import Parser, output_file
from bagua.errors import BaguaError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Returns the exit code.

    The exit code is 0 on success, 1 for problems found and failed ranks, 2 for bad arguments and missing files or
    packages, and 130 after Ctrl-C.
    """
    parser = _parser()
    options = parser.parse(sys.argv[1:] if arguments is None else arguments)
    try:
        code: int = options.run(options)
    except (ImportError, OSError, ValueError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    except BaguaError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return code


def _parser() -> Parser:
    parser = Parser(
        prog="bagua",
        description="Tools for jobs that communicate with Bagua.",
        epilog="example: bagua doctor. Each command has a --help of its own.",
    )
    parser.add_version()
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    traces = commands.add_parser("trace", help="flight records of failed ranks", epilog="example: bagua trace merge")
    actions = traces.add_subparsers(required=True, metavar="ACTION")
    merge = actions.add_parser(
        "merge",
        help="find the ranks that did not reach an operation",
        description="Compares the flight records of one failed job and prints each operation that hung or differed.",
        epilog="example: bagua trace merge /shared/records/*.json --out trace.json",
    )
    merge.add_argument(
        "files",
        nargs="*",
        metavar="FILE",
        type=Path,
        help="records of all ranks (default: the newest job on this host)",
    )
    merge.add_argument(
        "--out",
        type=output_file,
        metavar="FILE",
        help="write all operations as a trace for Perfetto or Chrome to this file",
    )
    merge.set_defaults(run=_merge)
    for command in (doctor, bench, top):
        command.add(commands)
    return parser


def _merge(options: argparse.Namespace) -> int:
    files = options.files or trace.newest_job(records.folders())
    read = trace.read(files)
    if options.out is not None:
        options.out.write_text(json.dumps(trace.chrome_trace(read), allow_nan=False), encoding="utf-8")
    count = f"{len(files)} record{'s' if len(files) > 1 else ''}"
    lines = [] if options.files else [f"{count} of the newest job: {files[0].parent}"]
    tables.show("\n".join([*lines, *(trace.findings(read) or ["no operation hung in these records"])]))
    return 0
