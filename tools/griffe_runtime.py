"""An extension of griffe, which reads the package's sources for the site: adds what only the imported package knows.

A function that another one makes at import has neither signature nor docstring in a source; a submodule hides a
function of its name; and words in comments (`#: ...`) belong to the attribute below. The imported package is asked by
tools/runtime_api.py, in an environment with torch: the Python in the variable SITE_PYTHON, by default .venv's.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).resolve().parents[1]
KINDS = {kind.description: griffe.ParameterKind(kind.description) for kind in inspect._ParameterKind}


@functools.cache
def runtime() -> dict[str, dict[str, Any]]:
    """What the imported package says of each public name."""
    python = os.environ.get("SITE_PYTHON", str(ROOT / ".venv" / "bin" / "python"))
    paths = os.pathsep.join([str(ROOT / "python"), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [python, "-m", "tools.runtime_api"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}; the package must be built: make setup")
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


class Runtime(griffe.Extension):  # type: ignore[misc]  # griffe is in the site's environment alone
    """Completes the package `bagua` once griffe has read it."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Adds to the package."""
        if pkg.name != "bagua":
            return
        # A method's class may have been replaced by then: names with fewer dots first.
        for dotted in sorted(runtime(), key=lambda name: name.count(".")):
            complete(pkg, dotted.split(".")[1:], runtime()[dotted])
        seen: set[str] = set()
        commented(pkg, seen)


def complete(pkg: griffe.Module, path: list[str], known: dict[str, Any]) -> None:
    """Adds signature and words to one name, or puts an object in the place of one that says less."""
    parent: Any = pkg
    for name in path[:-1]:
        parent = target(parent.all_members.get(name) if parent.is_class else parent.members.get(name))
        if parent is None:
            return
    name = path[-1]
    found = target(parent.members.get(name))
    if found is None and parent.is_class and name in parent.all_members:
        found = target(parent.all_members[name])
    match known["kind"]:
        case "function" if found is None or not found.is_function:
            lines = {"lineno": getattr(found, "lineno", None)} if found is not None else {}
            parent.set_member(name, function(name, parent, known, **lines))
        case "function" if found.docstring is None or not found.docstring.value:
            found.docstring = words(found, known)
            annotate(found, known)
        case "class" | "property" if found is not None and found.docstring is None:
            found.docstring = words(found, known)


def target(found: Any) -> Any:
    """What an alias leads to; None where that is outside the package."""
    if found is not None and found.is_alias:
        try:
            return found.final_target
        except (griffe.AliasResolutionError, griffe.CyclicAliasError):
            return None
    return found


def function(name: str, parent: Any, known: dict[str, Any], **where: Any) -> griffe.Function:
    """A function that no source has under its name."""
    parameters = griffe.Parameters(
        *(
            griffe.Parameter(each["name"], annotation=each["type"], kind=KINDS[each["kind"]], default=defaulted(each))
            for each in known["parameters"] or ()
        )
    )
    made = griffe.Function(name, parameters=parameters, returns=known["returns"], parent=parent, **where)
    made.docstring = words(made, known)
    return made


def defaulted(parameter: dict[str, Any]) -> str | None:
    """Its default as griffe has it: of *args and **kwargs an empty one."""
    empty = {"variadic positional": "()", "variadic keyword": "{}"}
    default: str | None = empty.get(parameter["kind"], parameter["default"])
    return default


def annotate(found: Any, known: dict[str, Any]) -> None:
    """Adds the types of parameters and result where the source has none."""
    for each in known["parameters"] or ():
        if each["name"] in found.parameters and found.parameters[each["name"]].annotation is None:
            found.parameters[each["name"]].annotation = each["type"]
    if found.returns is None:
        found.returns = known["returns"]


def words(parent: Any, known: dict[str, Any]) -> griffe.Docstring | None:
    """A docstring."""
    return griffe.Docstring(known["words"], parent=parent) if known["words"] else None


def commented(parent: Any, seen: set[str]) -> None:
    """Gives attributes below a comment that begins with `#:` its words."""
    if parent.path in seen:
        return
    seen.add(parent.path)
    for member in list(parent.members.values()):
        if member.is_alias:
            continue
        if member.is_attribute and member.docstring is None and member.lineno and member.filepath:
            text = " ".join(comment_above(Path(member.filepath), member.lineno))
            if not text and is_enumeration(parent):
                text = f"Value: `{member.value}`"
            if text:
                member.docstring = griffe.Docstring(text, parent=member)
        elif member.is_class or member.is_module:
            commented(member, seen)


def is_enumeration(found: Any) -> bool:
    """Whether it is a class of named constants."""
    return bool(found.is_class) and any("Enum" in str(base) for base in found.bases)


def comment_above(path: Path, line: int) -> Iterator[str]:
    """The words of the lines `#: ...` right above a line."""
    above = _lines(path)[: line - 1]
    first = len(above)
    while first > 0 and above[first - 1].strip().startswith("#:"):
        first -= 1
    for each in above[first:]:
        yield each.strip().removeprefix("#:").strip()


@functools.cache
def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()
