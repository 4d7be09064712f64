"""Looks at the built documentation site in a headless Chromium, from file://, as a reader does without a server.

Every page at 1280 and 390 pixels, light and dark, is no wider than the window, and the search finds what people look
for. Without Chromium it prints "skipped: no chromium" and the exit code is 0.

usage: python -m tools.check_pages DIRECTORY [--pictures DIRECTORY]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from tools.browser import Browser, chromium

WIDTHS = {1280: 900, 390: 844}
SCHEMES = ("light", "dark")
#: What the search must find.
SEARCHED = ("timeout", "hang", "bf16")
#: What --pictures takes pictures of.
PICTURED = ("index.html", "how-to/choose_an_algorithm.html", "api/bagua.html")

#: How many pixels the page is wider than the window, and what is widest.
_OVERFLOW = """(() => {
  const over = document.documentElement.scrollWidth - innerWidth
  if (over <= 0) return null
  const scrolls = e => { for (; e && e !== document.body; e = e.parentElement)
    if (['auto', 'scroll', 'hidden', 'clip'].includes(getComputedStyle(e).overflowX)) return true
    return false }
  const wide = [...document.body.querySelectorAll('*')]
    .filter(e => e.getBoundingClientRect().right > innerWidth + 1 && !scrolls(e))
  const last = wide[wide.length - 1]
  return `${over} pixels: ${last ? last.tagName + ' ' + last.textContent.trim().slice(0, 60) : '?'}`
})()"""

#: The brightness of the page's background, 0 to 255.
_BRIGHTNESS = """(() => {
  const parts = getComputedStyle(document.body).backgroundColor.match(/[\\d.]+/g).map(Number)
  return (parts[0] + parts[1] + parts[2]) / 3
})()"""

_RESULTS = "document.querySelectorAll('[data-md-component=search-result] .md-search-result__item').length"


def looks(site: Path, browser: Browser) -> Iterator[str]:
    """The pages that are too wide, or not as bright as the reader prefers."""
    pages = [path for path in sorted(site.rglob("*.html")) if path.name != "404.html"]
    for path in pages:
        name = path.relative_to(site)
        for scheme in SCHEMES:
            browser.show(1280, WIDTHS[1280], scheme)
            browser.open(path.as_uri())
            if (browser.evaluate(_BRIGHTNESS) < 128) != (scheme == "dark"):
                yield f"{name}: not {scheme} where the reader prefers {scheme}"
            for width, height in WIDTHS.items():
                browser.show(width, height, scheme)
                if (over := browser.evaluate(_OVERFLOW)) is not None:
                    yield f"{name}: at {width} pixels, {scheme}: wider than the window by {over}"


def search(site: Path, browser: Browser) -> Iterator[str]:
    """The words that the search does not find."""
    for width, height in WIDTHS.items():
        for words in SEARCHED:
            browser.show(width, height, "light")
            browser.open((site / "index.html").as_uri())
            if not found(browser, words):
                yield f"the search does not find {words!r} at {width} pixels"


def found(browser: Browser, words: str) -> bool:
    """Whether the search field of the open page finds something."""
    browser.wait_for("document.querySelector('[data-md-component=search-query]') !== null")
    browser.evaluate(f"""(() => {{
      document.querySelector('#__search').click()
      const field = document.querySelector('[data-md-component=search-query]')
      field.focus()
      field.value = {json.dumps(words)}
      for (const kind of ['input', 'keyup', 'change']) field.dispatchEvent(new Event(kind, {{ bubbles: true }}))
    }})()""")
    try:
        browser.wait_for(f"{_RESULTS} > 0")
    except RuntimeError:
        return False
    return True


def pictures(site: Path, folder: Path, browser: Browser) -> None:
    """Takes pictures of some pages, to look at."""
    folder.mkdir(parents=True, exist_ok=True)
    for page in PICTURED:
        for width, height in WIDTHS.items():
            for scheme in SCHEMES:
                browser.show(width, height, scheme)
                browser.open((site / page).as_uri())
                browser.picture(folder / f"{page.removesuffix('.html').replace('/', '-')}-{width}-{scheme}.png")


def main() -> int:
    """Prints what is wrong; the exit code is 1 where something is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path)
    parser.add_argument("--pictures", type=Path, metavar="DIRECTORY", help="take pictures instead, into this folder")
    arguments = parser.parse_args()
    program = chromium()
    if program is None:
        print("skipped: no chromium")
        return 0
    with Browser(program, deadline_s=20.0) as browser:
        if arguments.pictures:
            pictures(arguments.site.resolve(), arguments.pictures, browser)
            return 0
        site = arguments.site.resolve()
        wrong = [*looks(site, browser), *search(site, browser)]
    print("\n".join(wrong) or "pages: ok")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
