"""Finds figures of speech in names, comments, error texts and documents, each with what to write instead.

    python tools/check_words.py [FILE OR FOLDER ...]

A reader who knows NCCL and MPI understands a sentence at first reading when it has a subject, an active verb and the
field's noun. The words below take the place of one of these. Prints ``file:line: word: what to write instead`` for each
that is not used literally, and exits with 1 when there is one.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

#: Files that are read in folders.
SUFFIXES = {".cu", ".cuh", ".md", ".py", ".pyi", ".rs"}

#: This file and its test, which name the words.
OWN = ("tools/check_words.py", "tests/unit/test_check_words.py")


class Word(NamedTuple):
    """A word that is out."""

    #: Matches its forms. In snake_case names too, because an underscore counts as a space.
    forms: str
    #: What to write.
    instead: str
    #: Matches where it is literal, or a name that users or the extension have.
    literal: str = ""


WORDS = (
    Word("(?:no|some|any)body(?:'s)?", "say which rank, thread or process"),
    Word("newcomers?", "a joining rank"),
    Word("wish(?:es|ed)?", "the value, option or argument"),
    Word("tells?|told|telling", "report, send, name, distinguish", r"\.tell\("),
    Word("hears?|heard|hearing", "get, raise, be reported to, detect", "hears_forward_and_backward"),
    Word("doors?", "join server; front end", r"""["'`]door\b"""),
    Word(
        "guests?|visit(?:s|ed|ors?)?|welcomed?",
        "joining rank, connection, reply",
        r"\bvisit_(?:[A-Z]\w+|seq)|NodeVisitor|\bde::Visitor\b",
    ),
    Word("lends?|lent|lending", "export memory, register a buffer"),
    Word("stands?|stood|standing", "is, exists, is open, means", r"\bstand-ins?\b"),
    Word("speaks?|spoken?|speaking", "support, describe, send"),
    Word("at home", "say in which file, host or process"),
    Word("(?:lives?|lived|living)(?= (?:in|at|on|inside|beside|under|here|there))", "is in, runs", r"\bmay live on\b"),
    Word("life", "lifetime, or from when to when"),
    Word("no word|words? from", "timed out waiting for rank(s) …"),
    Word(
        "ways?",
        "route, direction, collective, function, method",
        r"""["']way["']|\w-way\b|\bin (?:a|the|this|that|the same|such a|another|any|some|each|no|one) way\b|"""
        r"""\b(?:either|both|each|all the|half) ways?\b|\bthe way (?:that|in which)\b|\byour way in\b|"""
        r"""\b(?:no|one|two|three|four|only|other|many|several|a) ways? (?:to|of)\b""",
    ),
    # As the name of a type.
    Word(
        "(?:(?<=class )|(?<=enum )|(?<=struct )|(?<=trait )) ?(?:Book|Place|Part|Stage|Shared|State)(?=[(:;<]| \\{)",
        "say what it holds",
    ),
)


class Use(NamedTuple):
    """A word that is out, in a text."""

    line: int
    word: str
    instead: str


_FORMS = [re.compile(rf"(?<![A-Za-z])(?:{word.forms})(?![A-Za-z])", re.IGNORECASE) for word in WORDS]
_LITERAL = [re.compile(word.literal) if word.literal else None for word in WORDS]


def uses(text: str) -> Iterator[Use]:
    """Every use of a word that is out."""
    for number, line in enumerate(text.splitlines(), 1):
        readable = line.replace("_", " ")
        for word, forms, literal in zip(WORDS, _FORMS, _LITERAL, strict=True):
            spans = [found.span() for found in literal.finditer(line)] if literal else []
            for found in forms.finditer(readable):
                if not any(start <= found.start() and found.end() <= end for start, end in spans):
                    yield Use(number, line[found.start() : found.end()], word.instead)


def files(root: Path, names: Sequence[str]) -> Iterator[Path]:
    """The files that are named, and those in the folders that are."""
    for name in names:
        path = root / name
        if path.is_file():
            yield path
            continue
        for file in sorted(path.rglob("*")):
            if file.suffix in SUFFIXES and file.relative_to(root).as_posix() not in OWN:
                yield file


def main(names: Sequence[str]) -> int:
    """Prints what was found."""
    root = Path(__file__).resolve().parent.parent
    found = [
        f"{file.relative_to(root)}:{use.line}: {use.word}: {use.instead}"
        for file in files(root, names)
        for use in uses(file.read_text(encoding="utf-8"))
    ]
    print("\n".join(found) if found else "words: ok")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
