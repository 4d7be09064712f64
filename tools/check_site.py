"""Checks the built documentation site: no page asks another host for anything, and every public name has an entry.

usage: python -m tools.check_site DIRECTORY
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

from tools.public_names import public_modules

# Attributes by which a page has the browser fetch something. A link that the reader follows (a href) is none.
_FETCHED = {"src", "srcset", "poster", "data", "action"}
_STYLE = re.compile(r"url\(\s*['\"]?([^'\")]+)|@import\s+['\"]([^'\"]+)")


class Page(HTMLParser):
    """What a page fetches, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        #: Addresses of scripts, styles, fonts, images and frames.
        self.fetched: list[str] = []
        #: The ids that a link can lead to.
        self.anchors: set[str] = set()
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
            if name == "style":
                self.fetched += addresses(value)

    def handle_data(self, data: str) -> None:
        """Collects from a style sheet inside the page."""
        if self.cdata_elem == "style":
            self.fetched += addresses(data)


def addresses(style: str) -> list[str]:
    """What a style sheet fetches."""
    return [url or other for url, other in _STYLE.findall(style)]


def is_foreign(address: str) -> bool:
    """Whether it names a host, as in `https://host/x` or `//host/x`."""
    return re.match(r"([a-z][a-z0-9+.-]*:)?//", address.strip(), re.IGNORECASE) is not None


def problems(site: Path, modules: dict[str, list[str]]) -> Iterator[str]:
    """What is wrong with the site."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        yield from (f"{path.relative_to(site)}: fetches {it}" for it in page.fetched if is_foreign(it))
    for path in sorted(site.rglob("*.css")):
        for it in addresses(path.read_text(encoding="utf-8")):
            if is_foreign(it):
                yield f"{path.relative_to(site)}: fetches {it}"
    anchors = set().union(*(page.anchors for page in pages.values()))
    for module, names in modules.items():
        for name in [module, *(f"{module}.{name}" for name in names)]:
            if name not in anchors:
                yield f"{name}: no entry in the reference"


def main() -> int:
    """Prints what is wrong; the exit code is 1 where something is."""
    found = list(problems(Path(sys.argv[1]), public_modules()))
    print("\n".join(found) or "site: ok")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
