"""What readers and type checkers find of the verbs: their texts, and the reductions that they take."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

from bagua import collectives
from bagua.extension import OPS

PACKAGE = Path(collectives.__file__).parent


def test_the_reductions_that_type_checkers_know_are_those_of_the_core() -> None:
    assert set(collectives.Op.__args__[0].__args__) == set(OPS)


def test_the_methods_of_a_communicator_have_the_texts_of_the_functions() -> None:
    pytest.importorskip("torch", reason="torch is not installed: make setup")
    from bagua.torch_api import communication, default_collectives

    for name in default_collectives.__all__:
        function, method = getattr(default_collectives, name), getattr(communication.Communicator, name)
        assert inspect.getdoc(function) == inspect.getdoc(method) is not None


@pytest.mark.parametrize(
    "file", ["collectives.py", "messages.py", "object_collectives.py", "torch_api/default_collectives.py", "errors.py"]
)
def test_a_reader_of_the_sources_finds_a_text_for_every_public_name(file: str) -> None:
    """As IDEs do, which do not import the package. The functions of `bagua` have the texts of the first three."""
    undocumented = []
    for scope in ast.walk(ast.parse((PACKAGE / file).read_text())):
        if not isinstance(scope, ast.Module | ast.ClassDef):
            continue
        for node, after in zip(scope.body, [*scope.body[1:], None], strict=True):
            if isinstance(node, ast.FunctionDef) and not (node.decorator_list or node.name.startswith("_")):
                undocumented += [] if ast.get_docstring(node) else [node.name]
            if isinstance(scope, ast.ClassDef) and isinstance(node, ast.AnnAssign):
                has_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                undocumented += [] if has_text else [ast.unparse(node)]
    assert undocumented == []
