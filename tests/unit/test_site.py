"""The documentation site: what its check finds, and that the parts have pages with examples. `make docs` builds it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools import check_pages
from tools.blocks import python_blocks
from tools.browser import Browser, chromium
from tools.check_site import Page, is_foreign, problems
from tools.public_names import PUBLIC, public_modules
from tools.runtime_api import described

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "html",
    [
        '<script src="https://cdn.example/x.js"></script>',
        '<link rel="stylesheet" href="//fonts.example/x.css">',
        '<img src="HTTPS://host.example/x.png">',
        '<style>@import "https://host.example/x.css";</style>',
        "<style>@font-face {src: url(https://host.example/x.woff2)}</style>",
        "<p style=\"background: url('http://host.example/x.png')\">x</p>",
    ],
)
def test_a_page_that_fetches_from_another_host_is_found(html: str, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(html)
    (found,) = problems(tmp_path, {})
    assert found.startswith("page.html: fetches")


def test_a_style_sheet_that_fetches_from_another_host_is_found(tmp_path: Path) -> None:
    (tmp_path / "main.css").write_text("body {color: red} @font-face {src: url('https://host.example/x.woff2')}")
    assert list(problems(tmp_path, {})) == ["main.css: fetches https://host.example/x.woff2"]


def test_links_that_a_reader_follows_and_files_of_the_site_are_no_problem(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(
        '<a href="https://host.example/">there</a><script src="../x.js"></script><link href="x.css"><img src="data:,">'
    )
    assert list(problems(tmp_path, {})) == []
    assert not is_foreign("javascripts/x.js")


def test_a_public_name_without_an_entry_is_found(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text('<h1 id="bagua">bagua</h1><h2 id="bagua.init">init</h2>')
    assert Page((tmp_path / "page.html").read_text()).anchors == {"bagua", "bagua.init"}
    assert list(problems(tmp_path, {"bagua": ["init", "stats"]})) == ["bagua.stats: no entry in the reference"]


def test_a_member_of_a_class_without_an_entry_is_found(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text('<h1 id="bagua">bagua</h1>')
    assert list(problems(tmp_path, {}, ["bagua.Group.rank"])) == ["bagua.Group.rank: no entry in the reference"]


ENTRY = """
<div class="doc doc-object doc-class"><h2 id="bagua.Group" class="doc doc-heading">bagua.Group</h2>
<div class="doc-signature highlight"><pre>Group(core)</pre></div>
<div class="doc doc-contents first">{words}<div class="doc doc-children">
<div class="doc doc-object doc-function"><h3 id="bagua.Group.size" class="doc doc-heading">size</h3>
<div class="doc-signature highlight"><pre>{signature}</pre></div>
<div class="doc doc-contents"><p>How many ranks.</p></div></div>
</div></div></div>
"""


@pytest.mark.parametrize(
    ("words", "signature", "expected"),
    [
        ("<p>Ranks.</p>", "size() -> int", []),
        ("", "size() -> int", ["bagua.Group: a class without words"]),
        ("<p>Ranks.</p>", "size", ["bagua.Group.size: a function without a signature"]),
    ],
)
def test_an_entry_without_words_or_signature_is_found(
    words: str, signature: str, expected: list[str], tmp_path: Path
) -> None:
    (tmp_path / "page.html").write_text(ENTRY.format(words=words, signature=signature))
    assert list(problems(tmp_path, {"bagua.Group": ["size"]})) == expected


def test_a_link_to_a_file_or_an_anchor_that_does_not_exist_is_found(tmp_path: Path) -> None:
    (tmp_path / "other.html").write_text('<h1 id="there">x</h1>')
    good = '<a href="other.html#there">a</a><a href="#here">b</a><a href="mailto:x">c</a><h1 id="here">x</h1>'
    (tmp_path / "page.html").write_text(good)
    assert list(problems(tmp_path, {})) == []
    (tmp_path / "page.html").write_text('<a href="none.html">a</a><a href="other.html#no">b</a>')
    assert list(problems(tmp_path, {})) == [
        "page.html: leads to none.html, which does not exist",
        "page.html: leads to other.html#no, which does not exist",
    ]


def test_a_function_that_is_made_at_import_has_its_signature_and_words() -> None:
    def made(x: int, *, op: str = "sum") -> None:
        """What it does."""

    known = described(made)
    assert (known["kind"], known["words"], known["returns"]) == ("function", "What it does.", "None")
    assert [(each["name"], each["type"], each["default"]) for each in known["parameters"]] == [
        ("x", "int", None),
        ("op", "str", "'sum'"),
    ]


def test_without_chromium_the_check_of_the_pages_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["check_pages", str(tmp_path)])
    assert check_pages.main() == 0
    assert capsys.readouterr().out == "skipped: no chromium\n"


@pytest.mark.slow
def test_a_page_that_is_wider_than_the_window_or_ignores_dark_mode_is_found(tmp_path: Path) -> None:
    program = chromium()
    if program is None:
        pytest.skip("chromium is not installed")
    style = "body {background: white} @media (prefers-color-scheme: dark) {body {background: black}}"
    (tmp_path / "good.html").write_text(f"<style>{style}</style><p>x</p>")
    (tmp_path / "bright.html").write_text("<style>body {background: white}</style><p>x</p>")
    (tmp_path / "wide.html").write_text(f"<style>{style}</style><div style='width: 800px'>wide</div>")
    with Browser(program) as browser:
        found = list(check_pages.looks(tmp_path, browser))
    assert found[0] == "bright.html: not dark where the reader prefers dark"
    assert [text.partition(": wider")[0] for text in found[1:]] == [
        "wide.html: at 390 pixels, light",
        "wide.html: at 390 pixels, dark",
    ]


#: A browser that answers at once, and has a page only when it is asked for its pages again.
LATE_BROWSER = """#!{python} -IS
import json, os
rest, asked = b"", 0
while more := os.read(3, 65536):
    *commands, rest = (rest + more).split(b"\\0")
    for command in map(json.loads, commands):
        asked += command["method"] == "Target.getTargets"
        pages = [{{"type": "page", "targetId": "7"}}] if asked > 1 else []
        result = {{"targetInfos": pages, "sessionId": "of the page"}}
        os.write(4, json.dumps({{"id": command["id"], "result": result}}).encode() + b"\\0")
"""


def test_the_first_page_of_a_browser_may_come_after_its_first_answer(tmp_path: Path) -> None:
    program = tmp_path / "browser"
    program.write_text(LATE_BROWSER.format(python=sys.executable))
    program.chmod(0o755)
    with Browser(str(program)) as browser:
        assert browser.call("Page.enable")["sessionId"] == "of the page"


def test_every_module_with_an_all_is_public_or_internal() -> None:
    found = public_modules()
    assert set(found) == {module for modules in PUBLIC.values() for module in modules}
    assert "all_reduce" in found["bagua"]
    assert [module for module, names in found.items() if not names] == []


@pytest.mark.parametrize(
    "page",
    [
        "how-to/from_horovod.md",
        "how-to/lightning.md",
        "reference/data_parallel.md",
        "reference/launchers.md",
        "reference/metrics.md",
        "reference/torch_distributed.md",
    ],
)
def test_the_page_of_each_part_has_an_example_that_a_test_runs(page: str) -> None:
    assert any("runnable" in marks for _, marks, _ in python_blocks(ROOT / "docs" / page))
