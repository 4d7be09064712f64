"""The layer check passes on this tree and fails on each kind of wrong import."""

from __future__ import annotations

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
        f"{CORE}/engine.rs": "fn f() { std::thread::spawn(g); }",
        f"{CORE}/bucket.rs": 'const TEXT: &str = "Mutex"; // a Mutex here would be wrong',
        "rust/bagua-net/src/wait.rs": "#[cfg(test)]\nmod tests {\n    fn f() { std::thread::spawn(g); }\n}",
        "rust/bagua-net/src/platform/linux.rs": "use rustix::event::eventfd;",
        "rust/bagua-py/src/lib.rs": "use pyo3::prelude::*;",
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


@pytest.mark.slow
def test_the_tree_obeys_the_rules() -> None:
    result = check(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_small_house_that_obeys_every_rule_passes(tree: Path) -> None:
    result = check(tree)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("file", "line", "rule"),
    [
        ("rust/bagua-py/src/lib.rs", "static STATE: std::sync::Mutex<u8> = Mutex::new(0);", "is a PerProcess"),
        (f"{CORE}/bucket.rs", "use std::sync::Mutex;", "no lock in 'bucket'"),
        (f"{CORE}/schedule.rs", "use std::time::Instant;", "no clock in 'schedule'"),
        ("rust/bagua-net/src/health.rs", "fn f() { std::thread::spawn(g); }", "only engine and group start"),
        ("rust/bagua-net/src/health.rs", "use rustix::event::eventfd;", "only platform of bagua-net"),
        ("rust/bagua-py/src/lib.rs", '#[cfg(target_os = "linux")]', "only platform of bagua-net"),
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


def test_torch_inside_a_function_is_allowed_anywhere(tree: Path) -> None:
    path = tree / "python" / "bagua" / "group.py"
    path.write_text("def f() -> None:\n    import torch\n")
    assert check(tree).returncode == 0


def test_a_tree_without_the_core_is_refused(tmp_path: Path) -> None:
    assert check(tmp_path).returncode == 2
