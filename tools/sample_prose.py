"""Prints random comments, docstrings, error texts and sentences of the documentation, for a reader without the code.

usage: python3 tools/sample_prose.py COUNT SEED
"""

from __future__ import annotations

import ast
import random
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
Found = tuple[str, int, str]


def of_rust(path: Path) -> Iterator[Found]:
    """Yields each block of comment lines, and each string with a space in a line that makes an error."""
    block: list[str] = []
    for number, line in enumerate([*path.read_text(encoding="utf-8").splitlines(), ""], 1):
        comment = re.match(r"\s*//[/!]? ?(.*)", line)
        if comment:
            block.append(comment[1])
        elif block:
            yield "comment", number - len(block), " ".join(block)
            block = []
        if "rror" in line:
            yield from (("error", number, text) for text in re.findall(r'"([^"\n]* [^"\n]*)"', line))


def of_python(path: Path) -> Iterator[Found]:
    """Yields each docstring, each block of comment lines, and each string of a `raise`."""
    source = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
            yield "docstring", getattr(node, "lineno", 1), text
        if isinstance(node, ast.Raise):
            words = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
            yield "error", node.lineno, " ".join(str(word) for word in words if isinstance(word, str))
    block: list[str] = []
    last = 0
    for token in tokenize.generate_tokens(iter([*source.splitlines(keepends=True)]).__next__):
        if token.type == tokenize.COMMENT:
            if block and token.start[0] != last + 1:
                yield "comment", last, " ".join(block)
                block = []
            block.append(token.string.lstrip("#: "))
            last = token.start[0]


def of_document(path: Path) -> Iterator[Found]:
    """Yields each sentence outside of code blocks and tables."""
    text = re.sub(r"(?ms)^```.*?^```", lambda code: "\n" * code[0].count("\n"), path.read_text(encoding="utf-8"))
    for paragraph in re.finditer(r"(?m)^(?![|#<\s])(?:.+\n)+", text):
        line = text.count("\n", 0, paragraph.start()) + 1
        for sentence in re.split(r"(?<=[.:?]) (?=[A-Z`])", " ".join(paragraph[0].split())):
            yield "document", line, sentence


def main() -> None:
    """Prints the sample."""
    count, seed = map(int, sys.argv[1:])
    kinds = ((of_rust, "rust/*/src/**/*.rs"), (of_python, "python/**/*.py"), (of_document, "docs/**/*.md"))
    found = [
        (f"{path.relative_to(ROOT)}:{line}", kind, text)
        for read, pattern in kinds
        for path in sorted(ROOT.glob(pattern))
        for kind, line, text in read(path)
        if len(text.split()) > 3
    ]
    for place, kind, text in random.Random(seed).sample(found, count):
        print(f"{place} {kind}\n    {text}\n")


if __name__ == "__main__":
    main()
