"""An extension of griffe, which reads the sources for the documentation site: finds docstrings that are elsewhere.

A verb of the default group has the signature and docstring of the method of `Group`. A collective of `Communicator` has
the docstring of the function of the same name. Other methods inherit the docstring of the method they override.
A comment that begins with `#:` describes the attribute below it. Without `__all__`, `import x as x` makes x public.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe


class Docstrings(griffe.Extension):  # type: ignore[misc]  # griffe is in the site's environment alone
    """Completes the package `bagua` after griffe has read it and resolved its imports."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Adds the docstrings."""
        if pkg.name != "bagua":
            return
        for name in pkg["default_group"].exports:
            pkg["default_group"].set_member(name, verb(pkg["group.Group"].all_members[name]))
        communicator = pkg["torch_api.process_group.collectives.Collectives"]
        for name in pkg["torch_api.default_collectives"].exports:
            communicator[name].docstring = pkg["torch_api.default_collectives"][name].docstring
        complete(pkg)


def verb(method: griffe.Function) -> griffe.Function:
    """Returns a method as a function without `self`."""
    parameters = griffe.Parameters(*(one for one in method.parameters if one.name != "self"))
    made = griffe.Function(method.name, parameters=parameters, returns=method.returns)
    made.docstring = method.docstring
    return made


def complete(parent: Any) -> None:
    """Adds the docstrings that the members of a module or class lack."""
    reimported = re.findall(r"\b(\w+) as \1\b", parent.source) if parent.is_module and not parent.exports else []
    for member in parent.members.values():
        if member.is_alias:
            if member.name in reimported:
                member.public = True
            continue
        if member.is_module or member.is_class:
            complete(member)
        elif member.docstring is None and member.is_attribute and member.lineno:
            if text := comment_above(member.filepath, member.lineno):
                member.docstring = griffe.Docstring(text, parent=member)
        elif member.docstring is None and parent.is_class:
            overridden = [base.members[member.name] for base in parent.mro() if member.name in base.members]
            member.docstring = next((one.docstring for one in overridden if one.docstring), None)


def comment_above(path: Path, line: int) -> str:
    """Returns the text of the lines `#: ...` right above a line."""
    text: list[str] = []
    for above in reversed(path.read_text(encoding="utf-8").splitlines()[: line - 1]):
        if not above.strip().startswith("#:"):
            break
        text.insert(0, above.strip().removeprefix("#:").strip())
    return " ".join(text)
