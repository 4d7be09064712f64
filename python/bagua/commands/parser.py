"""Command line parser with one-line errors, and checks of output files."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from bagua import extension, hints

__all__ = ["Parser", "output_file"]


class Parser(argparse.ArgumentParser):
    """An ArgumentParser with `-V`, whose errors are one line that points to `--help`."""

    def add_version(self) -> None:
        self.add_argument("-V", "--version", action="version", version=f"{self.prog} {extension.version()}")

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Returns the options. Exits with code 2 for errors, and with the help on stderr if there are no arguments."""
        if not arguments:
            self.exit(2, self.format_help())
        return self.parse_args(arguments)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        near = hints.nearest(str(value), map(str, action.choices or ()))
        if near is not None and value not in (action.choices or ()):
            raise argparse.ArgumentError(action, f"invalid choice: {str(value)!r}; did you mean {near!r}?")
        super()._check_value(action, value)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def output_file(text: str) -> Path:
    """Returns the path of a file to write, for argparse. Checks it early, before the command does its work."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a directory: name a file in it")
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no directory {str(path.absolute().parent)!r}")
    return path
