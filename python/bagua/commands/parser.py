"""Command line parser with one-line errors, checks of output files, and shell completion."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from bagua import extension, hints

__all__ = ["SHELLS", "Parser", "completion", "output_file"]

SHELLS = ("bash", "zsh", "fish")


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


def completion(shell: str, parsers: Sequence[argparse.ArgumentParser]) -> str:
    """Returns the script with which a shell of `SHELLS` completes the commands and options of these programs."""
    if shell == "fish":
        return "\n".join(line for parser in parsers for line in _fish(parser))
    start = ["autoload -U +X bashcompinit && bashcompinit"] if shell == "zsh" else []
    return "\n".join([*start, *(_bash(parser) for parser in parsers)])


# Completion of one program: each case maps the words typed so far to the words that may follow.
_BASH = """_{prog}() {{
    local words
    case "${{COMP_WORDS[*]:1:COMP_CWORD-1}}" in
{cases}
    esac
    COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _{prog} {prog}"""


def _bash(parser: argparse.ArgumentParser) -> str:
    cases = []
    for path, each in _levels(parser):
        words = [word for action in _actions(each) for word in (*_options(action), *_choices(action))]
        cases.append(f'        "{" ".join(path)}"*) words="{" ".join(words)}" ;;')
    # Longest first, because the first matching case is used.
    return _BASH.format(prog=parser.prog, cases="\n".join(reversed(cases)))


def _fish(parser: argparse.ArgumentParser) -> Iterator[str]:
    for path, each in _levels(parser):
        below = [word for action in _actions(each) for word in _choices(action)]
        seen = [f"__fish_seen_subcommand_from {word}" for word in path]
        if path and below:
            seen.append(f"not __fish_seen_subcommand_from {' '.join(below)}")
        condition = "; and ".join(seen) or "__fish_use_subcommand"
        start = f"complete -c {parser.prog} -n {shlex.quote(condition)}"
        for action in _actions(each):
            words = [f"-{'s' if len(word) == 2 else 'l'} {word.lstrip('-')}" for word in _options(action)]
            if words:
                yield f"{start} {' '.join(words)} -d {shlex.quote(action.help or '')}"
            for word, help_ in _choices(action).items():
                yield f"{start} -f -a {word} -d {shlex.quote(help_)}"


def _levels(
    parser: argparse.ArgumentParser, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """Yields a parser and the parsers of its commands, each with the words that lead to it."""
    yield path, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, below in action.choices.items():
                yield from _levels(below, (*path, word))


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if action.help != argparse.SUPPRESS]


def _options(action: argparse.Action) -> list[str]:
    """Returns the flags of an argument. Of two that differ in dashes and underscores, returns the one with dashes."""
    flags = action.option_strings
    return [flag for flag in flags if "_" not in flag or flag.replace("_", "-") not in flags]


def _choices(action: argparse.Action) -> dict[str, str]:
    """Returns the words that a positional argument may be, with their help."""
    if isinstance(action, argparse._SubParsersAction):
        helps: Any = {each.dest: each.help for each in action._choices_actions}
        return {word: helps.get(word) or "" for word in action.choices}
    return {} if action.option_strings else {str(word): "" for word in action.choices or ()}
