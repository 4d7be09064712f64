"""Hooks of mkdocs: the pages of docs/ as they are, the files that they link to, and the reference.

docs/ is written for a reader of the repository: links lead to files outside docs/, and fences have marks for the tests.
Here both become what mkdocs understands. No page of the reference is committed: griffe reads the sources.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]

#: A link of Markdown that is relative and leads to a file: what is between its parentheses.
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)(?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?(?=\))")
_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):(<code>)")
_FENCE = re.compile(r"^(?P<fence>```\w+) (?:not run: (?P<reason>.*)|.*)$", re.MULTILINE)

#: Where files of the repository outside docs/ are in the site.
_ELSEWHERE = "repository"


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages of modules that the navigation has, and every file of the repository that a page links to."""
    for module in re.findall(r"'api/([\w.]+)\.md'", str(config.nav)):
        content = f"::: {module}\n    options:\n      heading_level: 1\n"
        files.append(File.generated(config, f"api/{module}.md", content=content))
    waiting = [*(ROOT / "docs").rglob("*.md")]
    done = set(waiting)
    while waiting:
        document = waiting.pop()
        for target in linked_files(document):
            if target in done:
                continue
            done.add(target)
            files.append(File.generated(config, _in_site(target), abs_src_path=str(target)))
            if target.suffix == ".md":
                waiting.append(target)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Makes links lead to where the files are in the site, and takes the tests' marks off the fences."""
    source = _in_repository(page.file.src_uri)
    # The search lists the pages of docs/ above the others.
    elsewhere = source is None or page.file.src_uri.startswith(_ELSEWHERE)
    page.meta.setdefault("search", {"boost": 0.2 if elsewhere else 3})
    if source is None:
        return markdown
    here = posixpath.dirname(page.file.src_uri)

    def lead(found: re.Match[str]) -> str:
        target = _in_site((source.parent / found["target"]).resolve())
        return posixpath.relpath(target, here or ".") + (found["anchor"] or "")

    return _FENCE.sub(_fence, _LINK.sub(lead, markdown))


def _fence(found: re.Match[str]) -> str:
    """The beginning of a block without the tests' marks, with a title where they do not run it."""
    title = f' title="Not run by the tests: {found["reason"]}"' if found["reason"] else ""
    return found["fence"] + title


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Takes the roles of Sphinx out of the docstrings: `:func:` before a name in code."""
    return html if _in_repository(page.file.src_uri) else _ROLE.sub(r"\1", html)


def linked_files(document: Path) -> Iterable[Path]:
    """The files of the repository outside docs/ that a document links to."""
    for found in _LINK.finditer(document.read_text(encoding="utf-8")):
        target = (document.parent / found["target"]).resolve()
        if target.is_file() and not target.is_relative_to(ROOT / "docs"):
            yield target


def _in_site(path: Path) -> str:
    """Returns the path of a repository file in the site."""
    inside = path.relative_to(ROOT).as_posix()
    return inside.removeprefix("docs/") if inside.startswith("docs/") else f"{_ELSEWHERE}/{inside}"


def _in_repository(uri: str) -> Path | None:
    """The file of the repository that a page is made of; None for the page of a module."""
    if uri.startswith("api/"):
        return None
    return ROOT / (uri.removeprefix(f"{_ELSEWHERE}/") if uri.startswith(_ELSEWHERE) else f"docs/{uri}")
