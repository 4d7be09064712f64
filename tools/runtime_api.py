"""Prints what the public names of the package are when it is imported, as JSON: kind, signature and words of each.

    python -m tools.runtime_api

The documentation site is made from the sources. What a source does not say, because a function is made by another one
at import, is taken from here: tools/griffe_runtime.py asks for it. A module that cannot be imported, as one whose
package is not installed, is left out, and its reason is printed to stderr.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import json
import sys
from collections.abc import Iterator
from typing import Any

from tools.public_names import public_modules


def entries() -> Iterator[tuple[str, dict[str, Any]]]:
    """Each public name that is a function or class, and each method of a class, with its description."""
    for name, names in public_modules().items():
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            print(f"{name}: not imported: {error}", file=sys.stderr)
            continue
        for public in names:
            value = getattr(module, public)
            yield f"{name}.{public}", described(value)
            if inspect.isclass(value):
                for method, member in methods(value):
                    yield f"{name}.{public}.{method}", described(member)


def methods(kind: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties of a class, those that it inherits from this package included."""
    ours = [base for base in kind.__mro__ if base.__module__.partition(".")[0] == "bagua"]
    for name, member in inspect.getmembers_static(kind):
        # Not what this package adds to a class of torch: that is documented with the package's own.
        if not any(name in vars(base) for base in ours):
            continue
        function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        made_by = function.fget if isinstance(function, property) else function
        of_this_package = (getattr(made_by, "__module__", None) or "").partition(".")[0] == "bagua"
        if not name.startswith("_") and of_this_package and (isinstance(member, property) or callable(function)):
            yield name, function


def described(value: Any) -> dict[str, Any]:
    """The kind of the value, its parameters, and its docstring, which may be that of the method that it overrides."""
    words = inspect.getdoc(value)
    if isinstance(value, property):
        return {"kind": "property", "words": words}
    if inspect.isclass(value):
        return {"kind": "class", "words": words}
    if inspect.ismodule(value) or not callable(value):
        return {"kind": "other", "words": None}
    return {"kind": "function", "words": words, **signature(value)}


def signature(function: Any) -> dict[str, Any]:
    """Parameters and result, with their types as the source writes them."""
    try:
        found = inspect.signature(function)
    except ValueError:
        return {"parameters": None, "returns": None}
    parameters = [
        {
            "name": parameter.name,
            "kind": parameter.kind.description,
            "type": written(parameter.annotation),
            "default": None if parameter.default is parameter.empty else shown(parameter.default),
        }
        for parameter in found.parameters.values()
    ]
    return {"parameters": parameters, "returns": written(found.return_annotation)}


def written(annotation: Any) -> str | None:
    """A type as a source has it; None without one."""
    if annotation is inspect.Parameter.empty:
        return None
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def shown(default: Any) -> str:
    """A default as a reader would write it; `...` for an object without a short form."""
    if isinstance(default, enum.Enum):
        return str(default)
    if inspect.isclass(default):
        return default.__qualname__
    text = repr(default)
    return text if " at 0x" not in text else "..."


if __name__ == "__main__":
    json.dump(dict(entries()), sys.stdout, indent=1)
