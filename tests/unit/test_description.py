"""The links of the README in wheels and sdists, whose description package indexes show on pages of their own."""

from __future__ import annotations

import base64
import hashlib
import io
import re
import tarfile
import zipfile
from pathlib import Path

import pytest

from tools import description, release

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
REPOSITORY = "https://host.example/bagua"
#: How an index finds out where the project is.
URL = f"Project-URL: Repository, {REPOSITORY}/\n"


def metadata(url: str = URL, readme: str = README) -> str:
    return (
        f"Metadata-Version: 2.4\nName: bagua\nVersion: 0.1.0\n{url}Project-URL: Docs, https://docs.example\n\n{readme}"
    )


def wheel(folder: Path, text: str) -> Path:
    path = folder / "bagua_rs-0.1.0-cp310-abi3-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bagua/__init__.py", "x = 1\n")
        archive.writestr("bagua_rs-0.1.0.dist-info/METADATA", text)
        record = "bagua/__init__.py,sha256=0,6\nbagua_rs-0.1.0.dist-info/METADATA,sha256=0,1\nbagua_rs-0.1.0.dist-info/RECORD,,\n"
        archive.writestr("bagua_rs-0.1.0.dist-info/RECORD", record)
    return path


def sdist(folder: Path, text: str) -> Path:
    path = folder / "bagua_rs-0.1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, content in {"README.md": README, "PKG-INFO": text}.items():
            data = content.encode()
            entry = tarfile.TarInfo(f"bagua_rs-0.1.0/{name}")
            entry.size, entry.mode, entry.mtime = len(data), 0o644, 1_700_000_000
            archive.addfile(entry, io.BytesIO(data))
    return path


@pytest.mark.parametrize(
    ("link", "absolute"),
    [
        ("[a](docs/x.md)", f"[a]({REPOSITORY}/blob/v0.1.0/docs/x.md)"),
        ("[a](docs/x.md#two-words)", f"[a]({REPOSITORY}/blob/v0.1.0/docs/x.md#two-words)"),
        ("![a](docs/x.svg)", f"![a]({REPOSITORY}/raw/v0.1.0/docs/x.svg)"),
        ("[a\nb](x.md), [c](y.md)", f"[a\nb]({REPOSITORY}/blob/v0.1.0/x.md), [c]({REPOSITORY}/blob/v0.1.0/y.md)"),
        ("[a](https://other.example/x.md)", "[a](https://other.example/x.md)"),
        ("[a](#here), `f(x)`, [b](mailto:c)", "[a](#here), `f(x)`, [b](mailto:c)"),
    ],
)
def test_a_relative_link_leads_to_the_tag_of_the_version_in_the_repository(link: str, absolute: str) -> None:
    found = description.Description.parse(metadata(readme=link))
    assert found.absolute() == metadata(readme=absolute)


@pytest.mark.parametrize("url", ["", "Project-URL: Docs, https://other.example\n"])
def test_without_a_repository_the_links_stay_as_they_are(url: str) -> None:
    found = description.Description.parse(metadata(url))
    assert found.repository == ""
    assert found.absolute() == found.text


def test_every_link_of_the_readme_becomes_the_address_of_a_file_that_exists() -> None:
    found = description.Description.parse(
        description.Description.parse(metadata(f"Project-URL: repository, {REPOSITORY}.git\n")).absolute()
    )
    assert found.relative() == []
    leads = re.findall(rf"\]\({REPOSITORY}/(blob|raw)/v0\.1\.0/([^)#]+)", found.text)
    assert len(leads) == len(description.Description.parse(metadata()).relative()) > 10
    for kind, path in leads:
        assert (ROOT / path).is_file(), path
        assert (kind == "raw") == (Path(path).suffix == ".svg"), path


def test_in_a_wheel_the_description_changes_and_its_digest_with_it(tmp_path: Path) -> None:
    path = wheel(tmp_path, metadata())
    description.complete(path)
    assert description.of(path).relative() == []
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        text = archive.read("bagua_rs-0.1.0.dist-info/METADATA")
        digest = base64.urlsafe_b64encode(hashlib.sha256(text).digest()).rstrip(b"=").decode()
        assert archive.read("bagua_rs-0.1.0.dist-info/RECORD").decode().splitlines() == [
            "bagua/__init__.py,sha256=0,6",
            f"bagua_rs-0.1.0.dist-info/METADATA,sha256={digest},{len(text)}",
            "bagua_rs-0.1.0.dist-info/RECORD,,",
        ]
        assert archive.read("bagua/__init__.py") == b"x = 1\n"
    assert sorted(tmp_path.iterdir()) == [path]


def test_in_an_sdist_the_description_changes_and_the_files_stay(tmp_path: Path) -> None:
    path = sdist(tmp_path, metadata())
    description.complete(path)
    assert description.of(path).text == description.Description.parse(metadata()).absolute()
    with tarfile.open(path) as archive:
        assert archive.getnames() == ["bagua_rs-0.1.0/README.md", "bagua_rs-0.1.0/PKG-INFO"]
        readme = archive.extractfile("bagua_rs-0.1.0/README.md")
        assert readme is not None
        assert readme.read().decode() == README
        assert {(one.mode, one.mtime) for one in archive} == {(0o644, 1_700_000_000)}


def test_without_a_repository_a_wheel_is_not_touched(tmp_path: Path) -> None:
    path = wheel(tmp_path, metadata(url=""))
    before = path.read_bytes()
    description.complete(path)
    assert path.read_bytes() == before


def found_by_release(monkeypatch: pytest.MonkeyPatch, folder: Path, cargo: str | None) -> release.Release:
    """What the step `links` of a release finds in a folder, when cargo knows this repository."""
    packages = [{"name": "bagua-py", "version": "0.1.0", "publish": [], "repository": None}]
    packages += [{"name": "bagua-core", "version": "0.1.0", "publish": None, "repository": cargo}]
    monkeypatch.setattr(release, "DIST", folder)
    monkeypatch.setattr(release, "metadata", lambda: packages)
    found = release.Release()
    release.step_links(found)
    return found


def test_the_table_of_a_release_says_that_links_are_not_absolute_and_nothing_is_published_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wheel(tmp_path, metadata(url=""))
    found = found_by_release(monkeypatch, tmp_path, None)
    shown = release.table(found.rows).splitlines()[1]
    assert re.fullmatch(r"links +not absolute, because project\.urls has no repository", shown)
    assert found.problems == []
    assert found.lacking == ["links: not absolute, because project.urls has no repository"]


def test_a_release_whose_links_are_absolute_passes_and_one_relative_link_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = wheel(tmp_path, metadata())
    assert found_by_release(monkeypatch, tmp_path, REPOSITORY).problems == [
        f"{path.name}: its description leads to {target}, which is relative"
        for target in description.Description.parse(metadata()).relative()
    ]
    description.complete(path)
    description.complete(sdist(tmp_path, metadata()))
    found = found_by_release(monkeypatch, tmp_path, f"{REPOSITORY}.git")
    assert (found.problems, found.lacking) == ([], [])
    assert [row.audit for row in found.rows] == ["ok"]


def test_crates_whose_repository_is_another_and_an_empty_folder_are_problems(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert found_by_release(monkeypatch, tmp_path, None).problems == ["links: neither a wheel nor an sdist is in dist/"]
    description.complete(wheel(tmp_path, metadata()))
    assert found_by_release(monkeypatch, tmp_path, None).problems == [
        f"bagua-core has the repository '', and project.urls '{REPOSITORY}'"
    ]
