"""`make test` leaves out slow tests, and nothing of what Bagua offers.

Which modules it runs tests of is read from their markers. To collect them would take ten seconds, for what they import.
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: make setup")

import bagua
from bagua import config, engine, errors
from bagua.torch_api.algorithms import GlobalAlgorithmRegistry

TESTS = Path(__file__).resolve().parents[1]

#: A module of tests for each front end.
FRONT_ENDS = {
    "bagua": "distributed/test_neutral_verbs.py",
    "bagua.Engine": "distributed/test_neutral_engine.py",
    "bagua.torch_api": "distributed/test_torch_collectives.py",
    "with_bagua": "distributed/test_torch_training.py",
    "DistributedDataParallel": "distributed/test_ddp_wrapper.py",
    "the backend of torch.distributed": "distributed/test_c10d.py",
    "bagua.horovod": "distributed/test_horovod.py",
    "hvd.DistributedOptimizer": "distributed/test_horovod_optimizer.py",
    "Lightning": "distributed/test_lightning.py",
    "the table of trainings": "distributed/test_front_ends.py",
    "bagua.aggregation": "distributed/test_aggregation_all_reduce.py",
}


def quick_part(path: Path) -> str:
    """The source of a module without its slow tests; nothing if all of its tests are slow."""
    module = ast.parse(path.read_text())
    if any(ast.unparse(statement) == "pytestmark = pytest.mark.slow" for statement in module.body):
        return ""
    kept = [
        statement
        for statement in module.body
        if "pytest.mark.slow" not in map(ast.unparse, getattr(statement, "decorator_list", []))
    ]
    # A function, or what `each_case` made of the module's cases.
    names = [each.name if isinstance(each, ast.FunctionDef) else ast.unparse(each) for each in kept]
    has_tests = any(name.startswith("test") for name in names)
    return "\n".join(map(ast.unparse, kept)) if has_tests else ""


@functools.cache
def quick() -> dict[str, str]:
    """The sources by name. In a test, because every process of pytest imports this module: they take seconds."""
    folders = ("distributed/test_*.py", "cuda/test_*.py", "unit/*.py")
    return {
        str(path.relative_to(TESTS)): source
        for path in sorted(path for folder in folders for path in TESTS.glob(folder))
        if path != Path(__file__) and (source := quick_part(path))
    }


def codecs() -> list[str]:
    """The names that the product says it knows."""
    with pytest.raises(ValueError, match="known: ") as raised:
        bagua.Codec("unknown")
    return str(raised.value).partition("known: ")[2].split(", ")


def patterns() -> dict[str, str]:
    """How each thing is written that a test has to use, by its name."""
    found = {f"verb {name}": rf"\b({name.replace('/', '|')})\(" for name in engine.VERBS}
    # A user meets these two under other names.
    found |= {"verb compressed_all_reduce": r"compression=", "verb gossip": r"\bDecentralizedAlgorithm\("}
    for name, registered in GlobalAlgorithmRegistry.items():
        found[f"algorithm {name}"] = rf"\b{registered['algorithm'].__name__}\("
    found |= {f"codec {name}": f"'{name}'" for name in codecs()}
    found |= {f"error {name}": rf"\b{name}\b" for name in errors.__all__}
    found |= {f"device memory by {name}": f"'{name}'" for name in config.CUDA_COLLECTIVES}
    return found


@pytest.mark.parametrize(("thing", "pattern"), patterns().items(), ids=patterns())
def test_everything_that_bagua_offers_is_in_make_test(thing: str, pattern: str) -> None:
    assert any(re.search(pattern, source) for source in quick().values()), thing


@pytest.mark.parametrize("module", FRONT_ENDS.values(), ids=FRONT_ENDS)
def test_every_front_end_is_in_make_test(module: str) -> None:
    assert module in quick()


def test_what_the_quick_part_of_rust_leaves_out_exists() -> None:
    quick = (TESTS.parent / ".config/nextest.toml").read_text().partition("[profile.quick]")[2]
    rust = TESTS.parent / "rust"
    sources = "\n".join(path.read_text() for path in rust.rglob("*.rs"))
    tests, programs = (re.findall(rf"{kind}\((\w+)\)", quick) for kind in ("test", "binary"))
    assert tests
    assert programs
    assert [name for name in tests if f"fn {name}(" not in sources] == []
    assert [name for name in programs if not list(rust.glob(f"*/tests/{name}*"))] == []


def test_slow_modules_and_slow_tests_are_not_in_make_test() -> None:
    assert "distributed/test_digits.py" not in quick()
    assert "test_a_frozen_rank_is_left_behind" not in quick()["distributed/test_elastic.py"]
