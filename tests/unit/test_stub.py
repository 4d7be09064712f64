"""The surface: what is exported exists, the stub knows the extension, and torch is not imported."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import bagua
from bagua import _bagua, default_group

ROOT = Path(__file__).resolve().parents[2]
VERBS = tuple(default_group.__all__)


def run(code: str) -> str:
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert shown.returncode == 0, shown.stderr
    return shown.stdout


def test_importing_and_using_bagua_does_not_import_torch() -> None:
    code = (
        "import sys, bagua, numpy as np\n"
        "bagua.init(0, 1)\n"
        "bagua.all_reduce(np.ones(3))\n"
        "bagua.shutdown()\n"
        "print('torch' in sys.modules)"
    )
    assert run(code) == "False\n"


def test_the_version_is_the_workspaces() -> None:
    version = re.search(r'^version = "(.+)"', (ROOT / "Cargo.toml").read_text(), re.M)
    assert version is not None
    assert bagua.__version__ == version[1]


def test_the_stub_has_exactly_the_names_of_the_extension() -> None:
    stub = ast.parse((ROOT / "python/bagua/_bagua.pyi").read_text())
    known = {node.name: node for node in stub.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    real = {name for name in dir(_bagua) if not name.startswith("_")}
    assert set(known) == real
    for name, node in known.items():
        if isinstance(node, ast.ClassDef):
            listed = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
            there = {item for item in vars(getattr(_bagua, name)) if not item.startswith("_")}
            assert {item for item in listed if not item.startswith("__")} == there, name


def test_everything_of_the_extension_is_documented() -> None:
    for name in (name for name in dir(_bagua) if not name.startswith("_")):
        thing = getattr(_bagua, name)
        assert thing.__doc__, name
        for item, member in vars(thing).items() if inspect.isclass(thing) else ():
            assert item.startswith("_") or member.__doc__, f"{name}.{item}"


@pytest.mark.parametrize("verb", VERBS)
def test_verbs_are_functions_and_methods_with_one_signature(verb: str) -> None:
    function, method = getattr(bagua, verb), getattr(bagua.Group, verb)
    assert inspect.isfunction(function)
    assert inspect.getdoc(function) == inspect.getdoc(method)
    assert function.__doc__
    of_method = list(inspect.signature(method).parameters.values())[1:]
    assert list(inspect.signature(function).parameters.values()) == of_method
    # The verbs on objects are synchronous.
    for option in ("timeout",) if verb.endswith("_object") else ("timeout", "async_op"):
        assert inspect.signature(function).parameters[option].kind is inspect.Parameter.KEYWORD_ONLY


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_before_init_says_what_to_call(verb: str) -> None:
    function = getattr(bagua, verb)
    required = [each for each in inspect.signature(function).parameters.values() if each.default is each.empty]
    with pytest.raises(bagua.BaguaError, match=r"bagua.init\(\)"):
        function(*[bytearray(1) for _ in required])


def test_rank_and_world_size_are_those_of_the_default_group() -> None:
    for function in (bagua.rank, bagua.world_size):
        with pytest.raises(bagua.BaguaError, match=r"bagua.init\(\)"):
            function()
    group = bagua.init(0, 1)
    assert (bagua.rank(), bagua.world_size()) == (group.rank, group.size) == (0, 1)
    bagua.shutdown()


def test_what_is_exported_exists() -> None:
    for name in bagua.__all__:
        assert getattr(bagua, name) is not None
