"""Checks the rules of the house by reading the sources: who imports whom, and where a few words may appear.

Prints ``file:line: rule`` for each violation and exits with 1 when there is one. In Rust the compiler checks which
crate uses which, and clippy that none prints or reads the environment; a few rules are left to this. Neither the files
of a Rust crate nor the modules of the Python package import each other in a circle.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

CORE = "rust/bagua-core/src"

# What Rust's compiler and clippy do not check: (files, what is not written there, the rule).
RUST = (
    (
        "rust/*/src/*.rs",
        r"\bstatic\s+\w+\s*:\s*(?:\w+\s*::\s*)*(?:Mutex|RwLock|Condvar)\b",
        "a lock of the process is a PerProcess: a thread may hold it at a fork",
    ),
    *(
        (f"{CORE}/{file}.rs", pattern, f"no {what} in '{file}'")
        for file in ("bucket", "schedule")
        for what, pattern in (
            ("lock", r"\b(?:Mutex|RwLock|Condvar|Once(?:Lock|Cell)?|Atomic\w+)\b"),
            ("clock", r"\b(?:Instant|SystemTime|Deadline)\b"),
        )
    ),
    *(
        (
            f"rust/bagua-{crate}/src/*.rs",
            r"\bthread\s*::\s*(?:spawn|scope|Builder)\b",
            "only engine and group start threads",
        )
        for crate in ("kernels", "net", "collectives")
    ),
)

# Circles of files that exist in bagua-group. Remove each one here when its circle is gone; add none.
RUST_CIRCLES = ({"builder", "group", "lane"},)

# The only Python file that keeps process-wide state by `global` and installs fork and exit hooks.
LIFECYCLE = "process_state.py"

# Python modules that may import torch at module level.
TORCH = (
    "torch_api/*",
    "accelerate.py",
    "aggregation/*",
    "c10d/*",
    "cuda/tensors.py",
    "lightning/*",
    "horovod/*",
    "fsdp.py",
    "hooks.py",
    "linalg.py",
    "compressed_torch_collectives.py",
    "torch_operand.py",
)


class Violation(NamedTuple):
    """One broken rule."""

    path: str
    line: int
    rule: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}"


def allowed(path: str, patterns: Iterable[str]) -> bool:
    """Returns True if a path matches one of the patterns."""
    return any(fnmatch(path, pattern) for pattern in patterns)


def rust_sources(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yields each Rust file below a folder that is not a test, with its code: no tests, comments or string literals."""
    for file in sorted(folder.rglob("*.rs")):
        if file.name in ("tests.rs", "model.rs") or "tests" in file.parts:
            continue
        product = re.split(r"#\[cfg\([^\]]*\btest\b.*\]\n(?:#\[.*\]\n)*mod \w+ \{", file.read_text(encoding="utf-8"))[0]
        yield file, re.sub(r'"(?:\\.|[^"\\\n])*"|//.*', "", product)


def check_rust(root: Path) -> Iterator[Violation]:
    """Yields every line of Rust that breaks one of the rules in `RUST`, and every circle of files."""
    for crate in sorted((root / "rust").glob("*/src")):
        for file, code in rust_sources(crate):
            path = file.relative_to(root).as_posix()
            for number, line in enumerate(code.splitlines(), 1):
                for files, pattern, rule in RUST:
                    if fnmatch(path, files) and re.search(pattern, line):
                        yield Violation(path, number, rule)
        yield from check_rust_circles(root, crate)


def check_rust_circles(root: Path, crate: Path) -> Iterator[Violation]:
    """Yields every circle of files of a crate, except `RUST_CIRCLES`. A file may name those above and below it."""
    files: dict[str, str] = {}
    codes: dict[str, str] = {}
    for file, code in rust_sources(crate):
        parts = file.relative_to(crate).with_suffix("").parts
        module = "::".join(parts[:-1] if parts[-1] in ("mod", "lib") else parts)
        files[module], codes[module] = file.relative_to(root).as_posix(), code
    imports: dict[str, list[Import]] = {}
    for module, code in codes.items():
        used = {other for path in rust_paths(code) if (other := rust_module(path, module, files)) is not None}
        imports[module] = [
            Import(1, other)
            for other in sorted(used)
            if not (f"{module}::".startswith(f"{other}::") or f"{other}::".startswith(f"{module}::"))
            if "" not in (module, other) and not any({module, other} <= circle for circle in RUST_CIRCLES)
        ]
    yield from check_circles(files, imports)


def rust_paths(code: str) -> Iterator[str]:
    """Yields every path in some code that begins with `crate` or `super`, one for each name in braces."""
    for start in re.finditer(r"\b(?:crate|super)::", code):
        # What `use` takes ends with a semicolon; a path inside an expression has no braces.
        text = re.match(r"[\w:]*(?:\{[^;]*?\}(?=;))?", code[start.start() :])
        waiting = [("", text[0])] if text else []
        while waiting:
            prefix, rest = waiting.pop()
            head, brace, inner = rest.partition("{")
            if not brace:
                yield prefix + head.strip()
                continue
            depth, name = 0, ""
            for character in inner.rstrip()[:-1] + ",":
                depth += (character == "{") - (character == "}")
                if character == "," and depth == 0:
                    waiting.append((prefix + head, name.strip()))
                    name = ""
                else:
                    name += character


def rust_module(path: str, importer: str, known: Iterable[str]) -> str | None:
    """Returns the module of the crate that a path leads into; None if it leads nowhere."""
    names = path.split("::")
    base = importer.split("::")
    while names and names[0] == "super":
        base, names = base[:-1], names[1:]
    if names and names[0] == "crate":
        base, names = [], names[1:]
    whole = [*base, *names]
    lengths = range(len(whole), 0, -1)
    return next((module for length in lengths if (module := "::".join(whole[:length])) in known), None)


def at_module_level(tree: ast.Module) -> Iterator[ast.stmt]:
    """Every statement that runs at import, type-checking blocks excepted."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting.extend(node.orelse)
            continue
        if isinstance(node, ast.stmt):
            yield node
        waiting.extend(ast.iter_child_nodes(node))


def imported(node: ast.AST) -> list[str]:
    """Dotted names that a statement or a call of ``import_module`` imports, each with the names taken from it."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        module = "." * node.level + (node.module or "")
        separator = "" if module.endswith(".") else "."
        return [module, *(f"{module}{separator}{alias.name}" for alias in node.names)]
    if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
        return [
            first.value for first in node.args[:1] if isinstance(first, ast.Constant) and isinstance(first.value, str)
        ]
    return []


class Import(NamedTuple):
    """One import of a module of the package by another, wherever in the file it is."""

    line: int
    module: str


def module_name(inside: Path) -> str:
    """Dotted name of a file of the package; that of a package's ``__init__.py`` is the package's own."""
    return ".".join(("bagua", *inside.with_suffix("").parts)).removesuffix(".__init__")


def resolved(name: str, importer: str, is_package: bool) -> str:
    """A name from :func:`imported` without leading dots."""
    dots = len(name) - len(name.lstrip("."))
    if dots == 0:
        return name
    parts = importer.split(".")
    base = parts[: len(parts) - dots + is_package]
    return ".".join([*base, *filter(None, [name.lstrip(".")])])


def imported_modules(node: ast.AST, importer: str, is_package: bool, known: set[str]) -> set[str]:
    """The modules of the package that a node imports, with the packages that Python initialises before.

    ``from package import name`` is an import of the module ``package.name`` where there is one, else of ``package``.
    """
    names = [resolved(name, importer, is_package) for name in imported(node)]
    if isinstance(node, ast.ImportFrom):
        module, *names = names
        names = [name if name in known else module for name in names]
    found = set()
    for name in names:
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            ancestor = ".".join(parts[:length])
            # A package around the importer is being initialised already.
            if length < len(parts) and (importer == ancestor or importer.startswith(ancestor + ".")):
                continue
            if ancestor in known:
                found.add(ancestor)
    return found - {importer}


def shortest_path(imports: dict[str, list[Import]], start: str, goal: str) -> list[str]:
    """Modules from ``start`` to ``goal``, each importing the next; empty if there is none."""
    before: dict[str, str] = {}
    waiting = [start]
    for module in waiting:
        for found in imports[module]:
            if found.module not in before and found.module != start:
                before[found.module] = module
                waiting.append(found.module)
    if goal not in before:
        return []
    path = [goal]
    while path[-1] != start:
        path.append(before[path[-1]])
    return path[::-1]


def check_circles(files: dict[str, str], imports: dict[str, list[Import]]) -> Iterator[Violation]:
    """Every circle of imports, named once, with the imports inside functions and for type checkers."""
    reported: set[str] = set()
    for module in sorted(imports):
        for found in sorted(imports[module]):
            if module in reported or found.module in reported:
                continue
            back = [module] if found.module == module else shortest_path(imports, found.module, module)
            if back:
                reported.update(back)
                circle = " -> ".join([module, *back])
                yield Violation(files[module], found.line, f"circle of imports: {circle}")


def check_python(root: Path) -> Iterator[Violation]:
    """Every module of the package."""
    package = root / "python" / "bagua"
    modules = {module_name(file.relative_to(package)): file for file in sorted(package.glob("**/*.py"))}
    files: dict[str, str] = {}
    imports: dict[str, list[Import]] = {}
    for module, file in modules.items():
        path, inside = file.relative_to(root).as_posix(), file.relative_to(package).as_posix()
        tree = ast.parse(file.read_text(encoding="utf-8"), filename=path)
        files[module] = path
        imports[module] = [
            Import(getattr(node, "lineno", 1), other)
            for node in ast.walk(tree)
            for other in sorted(imported_modules(node, module, file.name == "__init__.py", set(modules)))
        ]
        for node in ast.walk(tree):
            line = getattr(node, "lineno", 1)
            names = imported(node)
            if inside != "extension.py" and any("_bagua" in name.split(".") for name in names):
                yield Violation(path, line, "only python/bagua/extension.py imports the extension")
            if inside != LIFECYCLE and keeps_state(node):
                yield Violation(
                    path, line, f"only python/bagua/{LIFECYCLE} uses `global` and installs fork and exit hooks"
                )
            if inside != "config.py" and reads_environment(node, names):
                yield Violation(path, line, "only python/bagua/config.py reads the environment")
        if not allowed(inside, TORCH):
            for statement in at_module_level(tree):
                if any(name.split(".")[0] == "torch" for name in imported(statement)):
                    yield Violation(path, statement.lineno, "torch is not imported at module level here")
    yield from check_circles(files, imports)


def keeps_state(node: ast.AST) -> bool:
    """Returns True if a node rebinds a module's name, or installs a hook for a fork or the end of the process."""
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        return name.split(".")[-1] in ("register_at_fork", "register_after_fork") or name == "atexit.register"
    return isinstance(node, ast.Global)


def reads_environment(node: ast.AST, names: list[str]) -> bool:
    """Returns True if a node names the environment of the process."""
    words = ("environ", "environb", "getenv", "getenvb", "putenv", "unsetenv")
    if isinstance(node, ast.Attribute):
        return isinstance(node.value, ast.Name) and node.value.id in ("os", "posix") and node.attr in words
    return any(name in {f"os.{word}" for word in words} for name in names)


def check(root: Path) -> list[Violation]:
    """Every violation in a tree."""
    return [*check_rust(root), *check_python(root)]


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent, help="tree to check")
    root: Path = parser.parse_args().root
    if not (root / CORE / "lib.rs").is_file():
        print(f"{root} holds no {CORE}/lib.rs", file=sys.stderr)
        return 2
    violations = check(root)
    for violation in violations:
        print(violation)
    print(f"{len(violations)} violation(s) of the layers" if violations else "layers: ok")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
