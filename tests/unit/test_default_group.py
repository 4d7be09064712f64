"""`bagua/default_group.py` is made from the methods of `Group`: `python -m tests.unit.test_default_group` writes it."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bagua import collectives, default_group, messages
from bagua.engine import OPS

FILE = Path(default_group.__file__)

HEAD = '''"""The verbs as functions on the default group: each is the method of `Group` of the same name.

Made from the methods by tests/unit/test_default_group.py, so that readers of the sources find signatures and texts.
"""
'''

IMPORTS = """
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

from bagua import group
from bagua.arrays import Array, ArrayT, ResultT
from bagua.collectives import Op
from bagua.handle import Handle
from bagua.messages import Options

if TYPE_CHECKING:
    from typing_extensions import Unpack
"""

DEFAULT = """
# Of any type, because no overload of a verb takes a bool.
_default: Callable[[], Any] = partial(group.default, required=True)
"""


def methods() -> Iterator[ast.FunctionDef]:
    """The verbs of `Group`, the overloads of each before it."""
    for module, name in ((collectives, "Collectives"), (messages, "Messages")):
        (found,) = [
            node
            for node in ast.parse(inspect.getsource(module)).body
            if isinstance(node, ast.ClassDef) and node.name == name
        ]
        for node in found.body:
            if isinstance(node, ast.FunctionDef) and node.name in default_group.__all__:
                yield node


def made() -> str:
    """What the module says but for its layout."""
    functions = []
    for node in methods():
        arguments = node.args
        del arguments.args[0]
        if not node.decorator_list:
            given = [argument.arg for argument in arguments.args]
            given += [f"{argument.arg}={argument.arg}" for argument in arguments.kwonlyargs]
            call = f"return _default().{node.name}({', '.join(given)})"
            node.body = [node.body[0], *ast.parse(call).body]
        functions.append(ast.unparse(node))
    return "\n".join([HEAD, IMPORTS, f"__all__ = {default_group.__all__!r}", DEFAULT, *functions])


def meaning(source: str) -> str:
    """The tree of a source, without the indentation of its docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
            node.body[0] = ast.Expr(ast.Constant(text))
    return ast.dump(tree)


def test_the_functions_are_the_methods_of_a_group() -> None:
    assert meaning(FILE.read_text()) == meaning(made()), (
        "run: python -m tests.unit.test_default_group && ruff format python"
    )


def test_the_reductions_that_type_checkers_know_are_those_of_the_core() -> None:
    assert set(collectives.Op.__args__[0].__args__) == set(OPS)


def test_the_functions_of_torch_have_the_texts_of_the_methods() -> None:
    pytest.importorskip("torch", reason="torch is not installed: make setup")
    from bagua.torch_api import communication, default_collectives

    for name in default_collectives.__all__:
        function, method = getattr(default_collectives, name), getattr(communication.Communicator, name)
        assert inspect.getdoc(function) == inspect.getdoc(method)


@pytest.mark.parametrize("file", ["default_group.py", "torch_api/default_collectives.py", "errors.py"])
def test_a_reader_of_the_sources_finds_a_text_for_every_public_name(file: str) -> None:
    """As IDEs and the generator of the reference do, which do not import the package."""
    undocumented = []
    for scope in ast.walk(ast.parse((FILE.parent / file).read_text())):
        if not isinstance(scope, ast.Module | ast.ClassDef):
            continue
        for node, after in zip(scope.body, [*scope.body[1:], None], strict=True):
            if isinstance(node, ast.FunctionDef) and not (node.decorator_list or node.name.startswith("_")):
                undocumented += [] if ast.get_docstring(node) else [node.name]
            if isinstance(scope, ast.ClassDef) and isinstance(node, ast.AnnAssign):
                has_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                undocumented += [] if has_text else [ast.unparse(node)]
    assert undocumented == []


if __name__ == "__main__":
    FILE.write_text(made())
    sys.exit(0)
