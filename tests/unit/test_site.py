"""The documentation site: what its check finds, and that the parts have pages with examples. `make docs` builds it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.blocks import python_blocks
from tools.check_site import Page, is_foreign, problems
from tools.public_names import PUBLIC, public_modules

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
