"""Builds and checks everything that a release publishes, into dist/, and prints a table.

usage: tools/release.py [STEP ...]

A dry run, unless RELEASE=yes is in the environment: then, when nothing is wrong and every wheel was built, the wheels
and the sdist go to PyPI (uv publish) and the crates to crates.io (cargo publish), with the credentials of uv and of
cargo. RELEASE=check publishes nothing, and fails where RELEASE=yes would not publish. The steps, all by default:
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools import crates, description, wheel

ROOT = wheel.ROOT
DIST = wheel.DIST
SUMS = DIST / "SHA256SUMS"

#: Every Python that a wheel is tried with, where it is to be had.
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")

#: Where a version is written by hand, beside Cargo.toml: the file, and what matches it.
VERSIONS = {
    "CHANGELOG.md": r"^## (\d+\.\d+\.\d+)",
    "docs/reference/versions.md": r"^This page describes Bagua (\d+\.\d+\.\d+)",
}


class Row(NamedTuple):
    """A line of the table."""

    what: str
    tag: str = ""
    size: str = ""
    audit: str = ""
    smoke: str = ""
    seconds: float | None = None


class Release:
    """What the steps have found."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        #: What is wrong.
        self.problems: list[str] = []
        #: Wheels that this machine cannot build, and what else is not ready: nothing is published so.
        self.lacking: list[str] = []
        #: What this machine could not try.
        self.not_tried: list[str] = []


def metadata() -> list[dict[str, Any]]:
    """The packages of the workspace, as cargo describes them."""
    command = ["cargo", "metadata", "--locked", "--no-deps", "--format-version", "1"]
    shown = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    packages: list[dict[str, Any]] = json.loads(shown)["packages"]
    return packages


def version() -> str:
    """That of the extension, which is bagua.__version__ and the wheel's."""
    return str(next(one["version"] for one in metadata() if one["name"] == crates.EXTENSION))


def libraries(packages: Iterable[dict[str, Any]]) -> list[str]:
    """The crates that are published, each after those that it uses."""
    public = {one["name"]: one for one in packages if one["publish"] != []}
    order: list[str] = []

    def add(name: str) -> None:
        for needed in public[name]["dependencies"]:
            if needed["name"] in public and needed["kind"] is None:
                add(needed["name"])
        if name not in order:
            order.append(name)

    for name in sorted(public):
        add(name)
    return order


def disagreements(packages: Iterable[dict[str, Any]], texts: dict[str, str]) -> list[str]:
    """Where a version is not that of the extension. `texts` are the contents of the files of VERSIONS."""
    packages = list(packages)
    wanted = next(one["version"] for one in packages if one["name"] == crates.EXTENSION)
    names = {one["name"] for one in packages}
    problems = []
    for one in packages:
        if one["version"] != wanted:
            problems.append(f"{one['name']} has version {one['version']}, not {wanted}")
        problems += [
            f"{one['name']} asks for {needed['name']} {needed['req']}, not ^{wanted}"
            for needed in one["dependencies"]
            if needed["name"] in names and needed["req"] != f"^{wanted}"
        ]
    for file, pattern in VERSIONS.items():
        found = re.search(pattern, texts.get(file, ""), re.MULTILINE)
        if found is None or found[1] != wanted:
            problems.append(f"{file} names version {found[1] if found else 'none'} first, not {wanted}")
    return problems


def step_versions(release: Release) -> None:
    """The version of every crate, of the CHANGELOG and of the documentation is that of the extension."""
    texts = {file: (ROOT / file).read_text(encoding="utf-8") for file in VERSIONS if (ROOT / file).exists()}
    packages = metadata()
    problems = disagreements(packages, texts)
    release.problems += problems
    release.rows.append(Row("versions", version(), audit=verdict(problems)))


def step_licences(release: Release) -> None:
    """LICENSE-THIRD-PARTY.txt has the licence of every linked crate."""
    problems = crates.check()
    release.problems += problems
    release.rows.append(Row("licences", f"{len(crates.of_others(crates.linked()))} crates", audit=verdict(problems)))


def step_wheels(release: Release) -> None:
    """The wheel of each target that this machine can build, audited, and run with each Python that it has."""
    DIST.mkdir(exist_ok=True)
    found = {minor: where for minor in PYTHONS if (where := python(minor))}
    for minor in PYTHONS:
        if minor not in found:
            release.not_tried.append(
                f"no wheel was run with Python {minor}, which is not here: uv python install {minor}"
            )
    release.not_tried.append("no wheel for free-threaded Python: it loads no extension for the stable ABI before 3.15")
    for target in wheel.TARGETS:
        if reason := wheel.missing(target):
            release.rows.append(Row(target.triple, audit=f"not built: {reason}"))
            release.lacking.append(f"no wheel for {target.triple}: {reason}")
            continue
        begin = time.monotonic()
        try:
            path = wheel.build(target)
        except subprocess.CalledProcessError as error:
            release.problems.append(f"{target.triple}: maturin exited with {error.returncode}")
            release.rows.append(Row(target.triple, audit="failed", seconds=time.monotonic() - begin))
            continue
        seconds = time.monotonic() - begin
        problems = wheel.audit(path)
        sbom(path)
        smoked = "not run here"
        if target == wheel.here():
            failed = {minor: wheel.smoke_test(path, where) for minor, where in found.items()}
            release.problems += [f"Python {minor}: {text}" for minor, texts in failed.items() for text in texts]
            smoked = ", ".join(minor if not texts else f"{minor} FAILED" for minor, texts in failed.items())
        else:
            release.not_tried.append(
                f"the wheel for {target.triple} was not run: this machine is {wheel.here().triple}"
            )
        release.problems += problems
        tag = f"cp310-abi3-{target.platform}_{target.machine}"
        release.rows.append(
            Row(target.triple, tag, wheel.mebibytes(path.stat().st_size), verdict(problems), smoked, seconds)
        )


def step_sdist(release: Release) -> None:
    """The sdist, built into a wheel in an empty environment, and run from there."""
    DIST.mkdir(exist_ok=True)
    begin = time.monotonic()
    maturin = Path(sys.executable).parent / "maturin"
    subprocess.run([maturin, "sdist", "--out", DIST], cwd=ROOT, check=True)
    path = sdist()
    description.complete(path)
    problems = contents(path)
    # The crates of others need not be compiled anew where `make setup` has compiled them.
    os.environ["CARGO_TARGET_DIR"] = str(ROOT / "target")
    failed = wheel.smoke_test(path)
    del os.environ["CARGO_TARGET_DIR"]
    release.problems += [*problems, *(f"sdist: {text}" for text in failed)]
    seconds = time.monotonic() - begin
    release.rows.append(
        Row("sdist", path.name, wheel.mebibytes(path.stat().st_size), verdict(problems), verdict(failed), seconds)
    )


def sdist() -> Path:
    """Where maturin writes that of this version."""
    return DIST / f"bagua_rs-{version()}.tar.gz"


def contents(path: Path) -> list[str]:
    """What an sdist lacks, or has too much."""
    folder = path.name.removesuffix(".tar.gz")
    with tarfile.open(path) as archive:
        names = {name.removeprefix(f"{folder}/") for name in archive.getnames()}
    wanted: tuple[str, ...] = (
        "Cargo.lock",
        "Cargo.toml",
        "LICENSE",
        crates.LICENCES.name,
        "PKG-INFO",
        "pyproject.toml",
        "README.md",
    )
    wanted += ("python/bagua/__init__.py", "rust/bagua-py/src/lib.rs", "rust/bagua-kernels/src/lib.rs")
    problems = [f"{path.name} lacks {name}" for name in wanted if name not in names]
    built = sorted(name for name in names if name.endswith((".so", ".pyc")) or name.startswith("target/"))
    return [*problems, *(f"{path.name} has {name}" for name in built)]


def step_links(release: Release) -> None:
    """The links of wheels and of the sdist are absolute; crates.io takes the repository from each crate."""
    files = [path for path in (*sorted(DIST.glob("bagua_rs-*.whl")), sdist()) if path.exists()]
    found = {path.name: description.of(path) for path in files}
    repository = next((one.repository for one in found.values()), "")
    problems = [] if files else ["links: neither a wheel nor an sdist is in dist/"]
    for one in metadata() if files else ():
        known = (one["repository"] or "").removesuffix("/").removesuffix(".git")
        if one["publish"] != [] and known != repository:
            problems.append(f"{one['name']} has the repository {known!r}, and project.urls {repository!r}")
    if files and not repository:
        reason = "not absolute, because project.urls has no repository"
        release.lacking.append(f"links: {reason}")
        release.rows.append(Row("links", audit=reason))
    else:
        problems += [
            f"{name}: its description leads to {target}, which is relative"
            for name, one in found.items()
            for target in one.relative()
        ]
        release.rows.append(Row("links", audit=verdict(problems)))
    release.problems += problems


def step_crates(release: Release) -> None:
    """Every library crate, packaged and compiled from its package, in the order in which they are published."""
    begin = time.monotonic()
    names = libraries(metadata())
    forget_unpacked(names)
    # Those of the workspace that are not `publish = false`, each after those that it uses.
    command = ["cargo", "publish", "--workspace", "--dry-run", "--locked", "--allow-dirty"]
    problems = []
    if status := subprocess.run(command, cwd=ROOT, check=False).returncode:
        problems.append(f"cargo publish --dry-run exited with {status}")
    problems += [problem for one in metadata() if one["name"] in names for problem in unpresentable(one)]
    # cargo keeps the packages of one workspace in a registry of its own, until they are published.
    packed = [next((ROOT / "target" / "package").rglob(f"{name}-{version()}.crate"), None) for name in names]
    size = wheel.mebibytes(sum(path.stat().st_size for path in packed if path))
    release.problems += problems
    print(f"in this order: {', '.join(names)}")
    release.rows.append(Row("crates", f"{len(names)} crates", size, verdict(problems), "", time.monotonic() - begin))


def forget_unpacked(names: Iterable[str]) -> None:
    """Removes what cargo has kept of these crates from an earlier dry run: it unpacks no package of a version again.

    It compiles those that a crate uses from there, whatever has changed in them since.
    """
    home = Path(os.environ.get("CARGO_HOME", Path.home() / ".cargo"))
    # A registry that a dry run makes has no host, by whose name the folder of another one begins.
    for folder in (path for name in names for path in home.glob(f"registry/src/-*/{name}-{version()}")):
        shutil.rmtree(folder)


def unpresentable(package: dict[str, Any]) -> list[str]:
    """What crates.io shows of a crate and this one lacks."""
    name, readme = package["name"], Path(package["manifest_path"]).with_name("README.md")
    problems = [f"{name} has no {what}" for what in ("description", "license") if not package[what]]
    if package["readme"] != readme.name or not readme.is_file():
        problems.append(f"{name} has no README.md of its own")
    elif not readme.read_text(encoding="utf-8").startswith(f"# {name}\n"):
        problems.append(f"the README.md of {name} does not begin with its name")
    return problems


def step_docs(release: Release) -> None:
    """The documentation site, checked, as one archive."""
    begin = time.monotonic()
    DIST.mkdir(exist_ok=True)
    if status := subprocess.run(["make", "docs"], cwd=ROOT, check=False).returncode:
        release.problems.append(f"make docs exited with {status}")
        release.rows.append(Row("docs", audit="failed", seconds=time.monotonic() - begin))
        return
    path = DIST / f"bagua-{version()}-docs.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(ROOT / "site", arcname=f"bagua-{version()}-docs")
    release.rows.append(
        Row("docs", path.name, wheel.mebibytes(path.stat().st_size), "ok", "", time.monotonic() - begin)
    )


def step_checksums(release: Release) -> None:
    """The SHA-256 of everything in dist/."""
    files = sorted(path for path in DIST.glob("*") if path != SUMS)
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    SUMS.write_text("".join(lines), encoding="utf-8")
    release.rows.append(Row("checksums", SUMS.name, f"{len(files)} files", "ok"))


STEPS: dict[str, Callable[[Release], None]] = {
    "versions": step_versions,
    "licences": step_licences,
    "wheels": step_wheels,
    "sdist": step_sdist,
    "links": step_links,
    "crates": step_crates,
    "docs": step_docs,
    "checksums": step_checksums,
}


def python(minor: str) -> str:
    """The interpreter of a version of Python on this machine, of uv, the system or pyenv; "" without one."""
    uv = Path(sys.executable).parent / "uv"
    command: list[str | Path] = [uv, "python", "find", "--no-python-downloads", "--system", minor]
    found = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    if found.returncode == 0:
        return found.stdout.strip()
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    return next((str(path) for path in sorted(root.glob(f"versions/{minor}.*/bin/python"))), "")


def sbom(path: Path) -> None:
    """Copies the SBOM out of a wheel, to be published beside it."""
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if re.search(r"\.dist-info/sboms/.*\.json$", name):
                (DIST / f"{path.stem}.cyclonedx.json").write_bytes(archive.read(name))


def verdict(problems: list[str]) -> str:
    """What the table says of a check."""
    return f"{len(problems)} wrong" if problems else "ok"


def table(rows: list[Row]) -> str:
    """The rows in columns."""
    lines = [("what", "tag or name", "size", "audit", "smoke", "time")]
    lines += [(*row[:5], "" if row.seconds is None else f"{row.seconds:.0f} s") for row in rows]
    # A reason in the column of the audit may be long: the last columns are empty then.
    widths = [max(len(line[at]) for line in lines if at != 3 or not line[3].startswith("not ")) for at in range(6)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def obstacles(release: Release) -> list[str]:
    """Why what is in dist/ is not to be published."""
    tag = f"v{version()}"
    git = subprocess.run(["git", "tag", "--points-at", "HEAD"], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    changes = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    reasons = [*release.problems, *release.lacking]
    if tag not in git.stdout.split():
        reasons.append(f"this commit has no tag {tag}")
    if changes.stdout:
        reasons.append("there are changes that are not committed")
    if re.search(rf"^## {re.escape(version())}.*not released", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE):
        reasons.append(f"CHANGELOG.md says that {version()} is not released")
    return [f"not published: {reason}" for reason in reasons]


def publish() -> list[str]:
    """Publishes what is in dist/; what failed."""
    uv = Path(sys.executable).parent / "uv"
    files = [*DIST.glob("bagua_rs-*.whl"), sdist()]
    problems = []
    commands = [[str(uv), "publish", *map(str, files)], ["cargo", "publish", "--workspace", "--locked"]]
    for command in commands:
        if status := subprocess.run(command, cwd=ROOT, check=False).returncode:
            problems.append(f"{command[0]} exited with {status}")
    return problems


def main(arguments: list[str]) -> int:
    """Command line."""
    unknown = [name for name in arguments if name not in STEPS]
    if unknown:
        about = [f"  {name:<10} {(step.__doc__ or '').strip()}" for name, step in STEPS.items()]
        print((__doc__ or "").rstrip(), "", *about, sep="\n", file=sys.stderr)
        return 2
    release = Release()
    if not arguments and DIST.exists():
        shutil.rmtree(DIST)
        # Those of `make wheel`, which would otherwise find its wheel built.
        for stamp in (ROOT / ".venv").glob(".wheel*"):
            stamp.unlink()
    for name, step in STEPS.items():
        if name in arguments or not arguments:
            print(f"== release: {name}", flush=True)
            try:
                step(release)
            except (OSError, subprocess.CalledProcessError) as error:
                # The other steps may find more.
                release.problems.append(f"{name}: {error}")
                release.rows.append(Row(name, audit="failed"))
    print(f"\n{table(release.rows)}\n")
    for text in [*release.lacking, *release.not_tried]:
        print(f"left out: {text}")
    if (asked := os.environ.get("RELEASE")) in ("check", "yes"):
        reasons = obstacles(release)
        release.problems += reasons or (publish() if asked == "yes" else [])
    elif not release.problems and not arguments:
        print("a dry run: nothing was published")
    for text in release.problems:
        print(f"wrong: {text}", file=sys.stderr)
    return 1 if release.problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
