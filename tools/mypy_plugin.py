"""A plugin for mypy: what `torch.nn.Module` finds by `__getattr__` has any type, outside the package.

torch declares `Tensor | Module`, so every call of a method that Bagua or a module adds at run time (`with_bagua`, an
algorithm's `stats`) would be an error in each test and example that uses one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mypy.plugin import AttributeContext, Plugin
from mypy.types import AnyType, Type, TypeOfAny

_MODULE = "torch.nn.modules.module.Module."
_PACKAGE = Path(__file__).resolve().parents[1] / "python"


def _found(context: AttributeContext) -> Type:
    if Path(context.api.path).resolve().is_relative_to(_PACKAGE):
        return context.default_attr_type
    return AnyType(TypeOfAny.special_form)


class _Plugin(Plugin):
    def get_attribute_hook(self, fullname: str) -> Callable[[AttributeContext], Type] | None:
        return _found if fullname.startswith(_MODULE) and fullname.count(".") == _MODULE.count(".") else None


def plugin(version: str) -> type[Plugin]:
    """The entry point that mypy calls."""
    return _Plugin
