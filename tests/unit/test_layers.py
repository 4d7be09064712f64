"""The layer check passes on this tree and fails on each kind of wrong import."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE = "rust/bagua-core/src"


def check(root: Path) -> subprocess.CompletedProcess[str]:
    """Runs the script on a tree."""
    command = [sys.executable, str(ROOT / "tools" / "check_layers.py"), "--root", str(root)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small house that obeys every rule."""
    files = {
        f"{CORE}/lib.rs": "pub mod bucket;",
        f"{CORE}/engine/mod.rs": "use crate::group::Group; use crate::bucket::{Bucket, Tensor};",
        f"{CORE}/op/mod.rs": "use crate::{group::Lane, error::{Error, Result}};",
        f"{CORE}/schedule.rs": "use crate::error::Result;",
        f"{CORE}/bucket.rs": "use crate::op::Op; // a Mutex here, use crate::engine::Engine, would be wrong",
        f"{CORE}/collective/net/mesh.rs": "use super::Collective; use crate::transport::Mesh;",
        f"{CORE}/group/mod.rs": 'use crate::collective::Collective; const TEXT: &str = "unsafe println!(1)";',
        f"{CORE}/codec/mod.rs": "use crate::types::DType;",
        f"{CORE}/transport/mod.rs": "use crate::error::Error;\n#[cfg(test)]\nmod tests { use crate::group::Group; }",
        f"{CORE}/memory/region.rs": "unsafe impl Send for Region {}",
        f"{CORE}/types.rs": "use crate::error::Error;",
        "rust/bagua-py/src/lib.rs": "use pyo3::prelude::*;",
        "rust/bagua-py/Cargo.toml": "[dependencies]\npyo3.workspace = true\n",
        "rust/bagua-core/Cargo.toml": "[dependencies]\nhalf.workspace = true\n",
        "python/bagua/engine.py": "from bagua import _bagua\n",
        "python/bagua/config.py": "import os\nRANK = os.environ.get('RANK')\n",
        "python/bagua/group.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n",
        "python/bagua/lifecycle.py": "import os\nos.register_at_fork(after_in_child=list)\n",
        "python/bagua/torch_api/__init__.py": "from . import bucket, env\n",
        "python/bagua/torch_api/bucket.py": "from .env import get_rank\nfrom bagua import config, group\n",
        "python/bagua/torch_api/env.py": "import torch\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return tmp_path


def test_the_tree_obeys_the_rules() -> None:
    result = check(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_small_house_that_obeys_every_rule_passes(tree: Path) -> None:
    result = check(tree)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
def test_a_wrong_import_in_a_copy_of_the_real_tree_is_found(tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / "rust", tmp_path / "rust", ignore=ignored)
    if (ROOT / "python").is_dir():
        shutil.copytree(ROOT / "python", tmp_path / "python", ignore=ignored)
    file = tmp_path / CORE / "schedule.rs"
    file.write_text("use crate::engine::Engine;\n" + file.read_text())
    result = check(tmp_path)
    assert result.returncode == 1
    assert f"{CORE}/schedule.rs:1: 'schedule' (row 2) imports upwards from 'engine'" in result.stdout


@pytest.mark.parametrize(
    ("file", "line", "rule"),
    [
        (f"{CORE}/schedule.rs", "use crate::engine::Engine;", "upwards from 'engine'"),
        ("rust/bagua-py/src/lib.rs", "static STATE: std::sync::Mutex<u8> = Mutex::new(0);", "is a PerProcess"),
        (f"{CORE}/schedule.rs", "use crate::{error::Error, op::{Op, NoOp}};", "upwards from 'op'"),
        (f"{CORE}/collective/net/mesh.rs", "fn f(g: &crate::group::Group) {}", "upwards from 'group'"),
        (f"{CORE}/collective/net/mesh.rs", "use super::super::super::engine::Engine;", "upwards from 'engine'"),
        (f"{CORE}/schedule.rs", "use super::engine::Engine;", "upwards from 'engine'"),
        (f"{CORE}/codec/mod.rs", "use crate::transport::Mesh;", "upwards from 'transport'"),
        (f"{CORE}/transport/mod.rs", "use crate::reduce::combine;", "sideways from 'reduce'"),
        (f"{CORE}/transport/mod.rs", "use crate::codec::Codec;", "'transport' (row 4) imports from 'codec'"),
        (f"{CORE}/types.rs", "use crate::memory::Region;", "upwards from 'memory'"),
        (f"{CORE}/attic.rs", "", "'attic' has no row"),
        (f"{CORE}/types.rs", "use pyo3::Python;", "only rust/bagua-py names pyo3"),
        (f"{CORE}/types.rs", "use cudarc::driver;", "only rust/bagua-cuda names cudarc"),
        ("rust/bagua-py/src/lib.rs", "use cudarc::driver;", "only rust/bagua-cuda names cudarc"),
        ("rust/bagua-core/Cargo.toml", "pyo3.workspace = true", "only rust/bagua-py names pyo3"),
        (f"{CORE}/types.rs", 'fn f() { std::env::var("RANK"); }', "core reads no environment"),
        (f"{CORE}/types.rs", "use std::{env, fs};", "core reads no environment"),
        (f"{CORE}/types.rs", 'fn f() { println!("x"); }', "core never prints"),
        (f"{CORE}/types.rs", "fn f() { unimplemented!() }", "no stubs"),
        (f"{CORE}/types.rs", "fn f() { unsafe { g() } }", "`unsafe` outside"),
        (f"{CORE}/group/mod.rs", "#![allow(unsafe_code)]", "`unsafe` outside"),
        (f"{CORE}/bucket.rs", "use std::sync::Mutex;", "no lock in 'bucket'"),
        (f"{CORE}/schedule.rs", "use std::time::Instant;", "no clock in 'schedule'"),
        (f"{CORE}/transport/mod.rs", "fn f() { std::thread::spawn(g); }", "only engine and group start"),
        ("python/bagua/group.py", "from bagua import _bagua", "only python/bagua/engine.py imports the extension"),
        ("python/bagua/group.py", "from ._bagua import Engine", "only python/bagua/engine.py imports the extension"),
        ("python/bagua/group.py", "def f():\n    import bagua._bagua", "only python/bagua/engine.py imports"),
        ("python/bagua/group.py", "import os\nos.environ['X'] = '1'", "only python/bagua/config.py reads"),
        ("python/bagua/torch_api/env.py", "from os import getenv", "only python/bagua/config.py reads"),
        ("python/bagua/group.py", "import torch.distributed", "torch is not imported at module level here"),
        ("python/bagua/group.py", "try:\n    from torch import nn\nexcept ImportError: ...", "torch is not imported"),
        (
            "python/bagua/group.py",
            "def f():\n    global STATE\n    STATE = 1",
            "only python/bagua/lifecycle.py uses `global`",
        ),
        ("python/bagua/group.py", "import os\nos.register_at_fork(before=list)", "only python/bagua/lifecycle.py uses"),
        ("python/bagua/group.py", "import atexit\natexit.register(list)", "only python/bagua/lifecycle.py uses"),
    ],
)
def test_each_kind_of_violation_is_found_with_its_file(tree: Path, file: str, line: str, rule: str) -> None:
    path = tree / file
    before = path.read_text() if path.exists() else ""
    path.write_text(before + line + "\n")
    result = check(tree)
    assert result.returncode == 1, result.stdout + result.stderr
    found = [text for text in result.stdout.splitlines() if text.startswith(f"{file}:") and rule in text]
    assert found, result.stdout


ENV, BUCKET = "python/bagua/torch_api/env.py", "python/bagua/torch_api/bucket.py"


@pytest.mark.parametrize(
    ("file", "line"),
    [
        (ENV, "from .bucket import Bucket"),
        (ENV, "from . import bucket"),
        (ENV, "import bagua.torch_api.bucket"),
        (ENV, "def f():\n    from bagua.torch_api import bucket"),
        (ENV, "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .bucket import Bucket"),
        (ENV, "import importlib\nbucket = importlib.import_module('bagua.torch_api.bucket')"),
        # A name that is no module comes from the package itself, whose __init__ imports env.
        (ENV, "from bagua.torch_api import get_rank"),
        # Python initialises the package, which imports bucket, which imports group.
        ("python/bagua/group.py", "import bagua.torch_api.env"),
    ],
)
def test_a_circle_of_imports_is_found_wherever_the_import_is(tree: Path, file: str, line: str) -> None:
    path = tree / file
    path.write_text(path.read_text() + line + "\n")
    result = check(tree)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "circle of imports: bagua." in result.stdout


def test_a_circle_of_three_modules_is_reported_once_with_its_modules_in_order(tree: Path) -> None:
    for first, second in ("ab", "bc", "ca"):
        (tree / f"python/bagua/{first}.py").write_text(f"import os\nfrom bagua.{second} import name\n")
    result = check(tree)
    assert result.stdout.splitlines()[0] == (
        "python/bagua/a.py:2: circle of imports: bagua.a -> bagua.b -> bagua.c -> bagua.a"
    )
    assert result.stdout.count("circle") == 1


def test_two_imports_in_one_direction_are_no_circle(tree: Path) -> None:
    path = tree / BUCKET
    path.write_text(path.read_text() + "def f():\n    from . import env\n    from .env import get_local_rank\n")
    result = check(tree)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("files", "circle"),
    [
        ({"a.rs": "use crate::b::B;", "b.rs": "use super::a::A;"}, "a.rs -> b.rs -> a.rs"),
        ({"a.rs": "fn f() { crate::b::g() }", "b.rs": "fn g() { super::a::f() }"}, "a.rs -> b.rs -> a.rs"),
        (
            {
                "a.rs": "use crate::{b::{self, C}, D};",
                "b.rs": "use crate::c::f as g;",
                "c.rs": "fn f(x: crate::a::A) {}",
            },
            "a.rs -> b.rs -> c.rs -> a.rs",
        ),
        # A child imports what its parent defines, and the parent works with the child.
        (
            {"room/mod.rs": "mod child; use child::Child; pub struct Limit;", "room/child.rs": "use super::Limit;"},
            "room/child.rs -> room/mod.rs -> room/child.rs",
        ),
        (
            {"room/mod.rs": "mod child; const MOST: u8 = child::LEAST;", "room/child.rs": "use super::MOST;"},
            "room/child.rs -> room/mod.rs -> room/child.rs",
        ),
        # Through a re-export, a private import and a glob, to where the name is defined.
        (
            {
                "room/mod.rs": "mod a; mod b; pub use a::A; pub(crate) use b::*;",
                "room/a.rs": "use super::B; pub struct A;",
                "room/b.rs": "use crate::room::A; pub struct B;",
            },
            "room/a.rs -> room/b.rs -> room/a.rs",
        ),
        # In a module inside a file, `super` is the file's own module.
        (
            {"a.rs": "mod fast { use super::super::b::B; }", "b.rs": "use crate::a::fast::F;"},
            "a.rs -> b.rs -> a.rs",
        ),
        ({"main.rs": "mod a; use a::A; const N: u8 = 1;", "a.rs": "use crate::N;"}, "a.rs -> main.rs -> a.rs"),
    ],
)
def test_a_circle_of_imports_among_the_files_of_a_crate_is_found(
    tree: Path, files: dict[str, str], circle: str
) -> None:
    src = tree / "rust/bagua-cuda/src"
    for name, text in files.items():
        (src / name).parent.mkdir(parents=True, exist_ok=True)
        (src / name).write_text(text + "\n")
    result = check(tree)
    assert result.returncode == 1, result.stdout + result.stderr
    first = circle.split(" ")[0]
    assert f"rust/bagua-cuda/src/{first}:1: circle of imports: {circle}\n" in result.stdout


def test_reexports_tests_and_imports_from_other_crates_make_no_circle(tree: Path) -> None:
    files = {
        "lib.rs": "mod room; mod other; pub use room::{A, B};",
        "room/mod.rs": "mod a; mod b; pub use a::A; pub(super) use self::b::B; pub struct Limit;"
        "#[cfg(test)] mod tests_of_a;",
        "room/a.rs": "use super::{B, Limit}; pub(in super::super) struct A;"
        "#[cfg(test)] mod tests { use crate::other::O; }",
        "room/b.rs": "use super::Limit; use std::sync::Arc; // use super::A;\npub struct B;",
        "room/tests_of_a.rs": "use super::A;",
        "other.rs": "use crate::room::A; use bagua_core::other::A as Another; pub struct O;",
    }
    src = tree / "rust/bagua-cuda/src"
    (src / "room").mkdir(parents=True)
    for name, text in files.items():
        (src / name).write_text(text + "\n")
    result = check(tree)
    assert result.returncode == 0, result.stdout + result.stderr


def test_torch_inside_a_function_is_allowed_anywhere(tree: Path) -> None:
    path = tree / "python" / "bagua" / "group.py"
    path.write_text("def f() -> None:\n    import torch\n")
    assert check(tree).returncode == 0


def test_a_tree_without_the_core_is_refused(tmp_path: Path) -> None:
    assert check(tmp_path).returncode == 2
