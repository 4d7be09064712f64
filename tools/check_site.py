"""Checks the built documentation site.

No page asks another host for anything, no link within the site is dead, and every public name has an entry with words,
every function and method with its signature too.

usage: python -m tools.check_site DIRECTORY
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from os.path import normpath
from pathlib import Path
from urllib.parse import unquote

from tools.public_names import public_modules
from tools.runtime_api import entries

# Attributes by which a page has the browser fetch something. A link that the reader follows (a href) is none.
_FETCHED = {"src", "srcset", "poster", "data", "action"}
_STYLE = re.compile(r"url\(\s*['\"]?([^'\")]+)|@import\s+['\"]([^'\"]+)")


class Entry:
    """What the page of a module says of one name."""

    def __init__(self, kind: str) -> None:
        #: "module", "class", "function" or "attribute".
        self.kind = kind
        #: The dotted name; "" until its heading has been read.
        self.name = ""
        #: Its parameters and result, as shown.
        self.signature = ""
        #: Its docstring, without those of its members.
        self.words = ""

    def problem(self) -> str | None:
        """What it lacks."""
        if self.kind == "function" and "(" not in self.signature:
            return f"{self.name}: a function without a signature"
        if not self.words.strip():
            return f"{self.name}: {'an' if self.kind == 'attribute' else 'a'} {self.kind} without words"
        return None


class Page(HTMLParser):
    """What a page fetches, its anchors, its links, and its entries."""

    def __init__(self, text: str) -> None:
        super().__init__()
        #: Addresses of scripts, styles, fonts, images and frames.
        self.fetched: list[str] = []
        #: The ids that a link can lead to.
        self.anchors: set[str] = set()
        #: Where the links of the page lead.
        self.links: list[str] = []
        #: The names that it documents.
        self.entries: list[Entry] = []
        # The open `div`s: what each begins ("signature", "contents", "children" or ""), and the entry that it is in.
        self._open: list[tuple[str, Entry | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collects from one element."""
        for name, value in attrs:
            if value is None:
                continue
            if name == "id":
                self.anchors.add(value)
            if name in _FETCHED or (name == "href" and tag == "link"):
                self.fetched.append(value)
            if name == "href" and tag == "a":
                self.links.append(value)
            if name == "style":
                self.fetched += addresses(value)

        self._enter(tag, dict(attrs))

    def _enter(self, tag: str, attributes: dict[str, str | None]) -> None:
        """Follows the elements by which mkdocstrings divides a page."""
        of = self._open[-1][1] if self._open else None
        classes = (attributes.get("class") or "").split()
        if tag == "div":
            if "doc-object" in classes:
                kind = next(name.removeprefix("doc-") for name in classes if name not in ("doc", "doc-object"))
                of = Entry(kind)
                self.entries.append(of)
            role = next((name for name in ("signature", "contents", "children") if f"doc-{name}" in classes), "")
            self._open.append((role, of))
        elif tag in {"h1", "h2", "h3", "h4", "h5", "h6"} and of is not None and "doc-heading" in classes:
            of.name = of.name or (attributes.get("id") or "")

    def handle_endtag(self, tag: str) -> None:
        """Leaves a `div`."""
        if tag == "div" and self._open:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        """Collects from a style sheet inside the page, and the text of an entry."""
        if self.cdata_elem == "style":
            self.fetched += addresses(data)
        roles = [role for role, of in self._open if of is not None and of is self._open[-1][1]]
        if "signature" in roles:
            self._open[-1][1].signature += data  # type: ignore[union-attr]
        elif "contents" in roles and "children" not in roles:
            self._open[-1][1].words += data  # type: ignore[union-attr]


def addresses(style: str) -> list[str]:
    """What a style sheet fetches."""
    return [url or other for url, other in _STYLE.findall(style)]


def is_foreign(address: str) -> bool:
    """Whether it names a host, as in `https://host/x` or `//host/x`."""
    return re.match(r"([a-z][a-z0-9+.-]*:)?//", address.strip(), re.IGNORECASE) is not None


def problems(site: Path, modules: dict[str, list[str]], members: Iterable[str] = ()) -> Iterator[str]:
    """What is wrong with the site: it has an entry for each module, each of its names, and each of the members."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        yield from (f"{path.relative_to(site)}: fetches {it}" for it in page.fetched if is_foreign(it))
        # The page for addresses that do not exist is shown at any of them, so its links begin at the root.
        for link in page.links if path.name != "404.html" else ():
            if (dead := dead_link(site, path, link, pages)) is not None:
                yield f"{path.relative_to(site)}: leads to {dead}, which does not exist"
        yield from filter(None, (entry.problem() for entry in page.entries))
    for path in sorted(site.rglob("*.css")):
        for it in addresses(path.read_text(encoding="utf-8")):
            if is_foreign(it):
                yield f"{path.relative_to(site)}: fetches {it}"
    anchors = set().union(*(page.anchors for page in pages.values()))
    for module, names in modules.items():
        for name in [module, *(f"{module}.{name}" for name in names)]:
            if name not in anchors:
                yield f"{name}: no entry in the reference"
    yield from (f"{name}: no entry in the reference" for name in members if name not in anchors)


def dead_link(site: Path, path: Path, link: str, pages: dict[Path, Page]) -> str | None:
    """The link, if it leads to a file or an anchor that the site does not have."""
    if re.match(r"[a-z][a-z0-9+.-]*:", link, re.IGNORECASE) or is_foreign(link):
        return None
    file, _, anchor = unquote(link).partition("#")
    there = Path(normpath(path.parent / file)) if file else path
    if there.is_dir():
        there /= "index.html"
    if not there.is_file() or not there.is_relative_to(site):
        return link
    return link if anchor and there in pages and anchor not in pages[there].anchors else None


def main() -> int:
    """Prints what is wrong; the exit code is 1 where something is."""
    # A property without words is none of ours: made in a loop, as an answer to newer releases of torch.
    members = [name for name, known in entries() if known["kind"] in {"function", "class"} or known["words"]]
    found = list(problems(Path(sys.argv[1]).resolve(), public_modules(), members))
    print("\n".join(found) or "site: ok")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
