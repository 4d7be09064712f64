"""Checks the rules of the house by reading the sources: who imports whom, and where a few words may appear.

Prints ``file:line: rule`` for each violation and exits with 1 when there is one. The map of rooms is in
``rust/bagua-core/src/lib.rs``; tests inside the sources (``#[cfg(test)]`` modules, ``tests.rs``, ``model.rs``)
may import any room.
Neither the files of a crate nor the modules of the package import each other in a circle.
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

# Room -> row, as in lib.rs. A room imports only from rows below its own: neither upwards nor sideways.
ROWS = {
    "engine": 9,
    "average": 9,
    "bucket": 8,
    "op": 7,
    "group": 6,
    "collective": 5,
    "reduce": 4,
    "transport": 4,
    "request": 3,
    "memory": 2,
    "codec": 2,
    "stats": 2,
    "recorder": 2,
    "health": 2,
    "schedule": 2,
    "types": 1,
    "wait": 1,
    "error": 0,
    "sync": 0,
}

# (room, lower room that it must not import all the same): a transport moves bytes, whatever they encode.
APART = {("transport", "codec")}

# Where `unsafe` may be written.
UNSAFE = (
    f"{CORE}/memory/*",
    f"{CORE}/reduce/*",
    f"{CORE}/codec/*/simd*.rs",
    f"{CORE}/collective/shm*",
    f"{CORE}/transport/shm*",
    f"{CORE}/transport/unsent.rs",
    f"{CORE}/group/fork.rs",
    f"{CORE}/sync/ticks.rs",
    "rust/bagua-cuda/src/*",
    "rust/nccl-sys/src/*",
    "rust/bagua-py/src/call_user.rs",
    "rust/bagua-py/src/tensor_reader.rs",
    "rust/bagua-py/src/tensor.rs",
    # Their methods get addresses from Python: each call of an unsafe function of tensor.rs names its promise.
    *(
        f"rust/bagua-py/src/{file}.rs"
        for file in ("average", "bucket", "codec", "cuda_call", "engine", "fast_path", "group", "joining", "request")
    ),
)

# Where threads may be started: the engine's, and the control plane's.
THREADS = (f"{CORE}/engine/*", f"{CORE}/average*", f"{CORE}/group/*")

# Foreign crate -> the only crate that may name it.
FOREIGN = {"pyo3": "rust/bagua-py", "cudarc": "rust/bagua-cuda"}

# The only Python file that keeps process-wide state by `global` and installs fork and exit hooks.
LIFECYCLE = "lifecycle.py"

# Python modules that may import torch at module level.
TORCH = (
    "torch_api/*",
    "aggregation/*",
    "c10d/*",
    "cuda/tensors.py",
    "lightning/*",
    "horovod/*",
    "linalg.py",
    "torch_operand.py",
)


class Violation(NamedTuple):
    """One broken rule."""

    path: str
    line: int
    rule: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}"


_TOKENS = re.compile(
    r"""
      //[^\n]*
    | /\*.*?\*/
    | \b[bc]?r(?P<hashes>\#*)".*?"(?P=hashes)
    | \b[bc]?"(?:\\.|[^"\\])*" | "(?:\\.|[^"\\])*"
    | '(?:\\(?:u\{[^}]*\}|x..|.)|[^'\\])'
    """,
    re.DOTALL | re.VERBOSE,
)
_TEST_MODULE = re.compile(r"#\[cfg\((?:all\()?(?:test|model)\b[^\]]*\]\s*(?:#\[[^\]]*\]\s*)*(?:pub\s+)?mod\s+\w+\s*\{")


def blank(text: str) -> str:
    """Spaces for everything but line breaks, so that line numbers stay."""
    return re.sub(r"[^\n]", " ", text)


def bare(source: str) -> str:
    """Rust without comments, literals and test modules."""
    source = _TOKENS.sub(lambda found: blank(found.group()), source)
    while found := _TEST_MODULE.search(source):
        end = closing(source, found.end() - 1)
        source = source[: found.start()] + blank(source[found.start() : end]) + source[end:]
    return source


def closing(source: str, opening: int) -> int:
    """Index just after the brace that closes the one at ``opening``."""
    depth = 0
    for index in range(opening, len(source)):
        depth += {"{": 1, "}": -1}.get(source[index], 0)
        if depth == 0:
            return index + 1
    return len(source)


def line_of(source: str, index: int) -> int:
    """Line number of an index."""
    return source.count("\n", 0, index) + 1


def first_names(source: str, start: int) -> Iterator[str]:
    """The first path segment of each import that begins at ``start``: one name, or those of a brace group."""
    if not source.startswith("{", start):
        if name := re.match(r"\w+", source[start:]):
            yield name.group()
        return
    depth, expect = 0, False
    for found in re.finditer(r"[{},]|\w+", source[start : closing(source, start)]):
        token = found.group()
        if token == "{":
            depth += 1
            expect = depth == 1
        elif token == "}":
            depth -= 1
        elif token == ",":
            expect = depth == 1
        elif expect:
            yield token
            expect = False


def module_depth(relative: Path) -> int:
    """How many ``super`` lead from a file of core to the crate's root."""
    return len(relative.parts) - (relative.name == "mod.rs")


def core_imports(relative: Path, source: str) -> Iterator[tuple[int, str]]:
    """(index, room) for every path into another room."""
    for found in re.finditer(r"(?<![\w$])crate\s*::\s*", source):
        for name in first_names(source, found.end()):
            yield found.start(), name
    for found in re.finditer(r"\b(?:super\s*::\s*)+", source):
        if found.group().count("super") >= module_depth(relative):
            for name in first_names(source, found.end()):
                yield found.start(), name


def check_core_file(relative: Path, path: str, source: str) -> Iterator[Violation]:
    """The ladder, and the words that core or a room of it never says."""
    room = relative.parts[0].removesuffix(".rs")
    if room == "lib":
        return
    if room not in ROWS:
        yield Violation(path, 1, f"room '{room}' has no row in tools/check_layers.py")
        return
    for index, other in core_imports(relative, source):
        if (room, other) in APART:
            where = ""
        elif other not in ROWS or other == room or ROWS[other] < ROWS[room]:
            continue
        else:
            where = "sideways " if ROWS[other] == ROWS[room] else "upwards "
        yield Violation(path, line_of(source, index), f"'{room}' (row {ROWS[room]}) imports {where}from '{other}'")
    never = {
        r"\bstd\s*::\s*env\b|\buse\s+std\s*::\s*\{[^;]*\benv\b": "core reads no environment",
        r"\be?println?\s*!|\bdbg\s*!": "core never prints",
        r"\btodo\s*!|\bunimplemented\s*!": "no stubs",
    }
    if room in ("bucket", "schedule"):
        never[r"\b(?:Mutex|RwLock|Condvar|Once(?:Lock|Cell)?|Atomic\w+)\b"] = f"no lock in '{room}'"
        never[r"\b(?:Instant|SystemTime|Deadline)\b"] = f"no clock in '{room}'"
    if not allowed(path, THREADS):
        never[r"\bthread\s*::\s*(?:spawn|scope|Builder)\b|\bspawn_blocking\b"] = "only engine and group start threads"
    for pattern, rule in never.items():
        for found in re.finditer(pattern, source):
            yield Violation(path, line_of(source, found.start()), rule)


def allowed(path: str, patterns: Iterable[str]) -> bool:
    """Whether a path matches one of the patterns."""
    return any(fnmatch(path, pattern) for pattern in patterns)


def is_test_file(relative: Path) -> bool:
    """Whether a source file holds only tests, or models for the model checker."""
    return relative.name in ("tests.rs", "test.rs", "model.rs") or "tests" in relative.parts[:-1]


def check_rust(root: Path) -> Iterator[Violation]:
    """Every Rust source and manifest."""
    for file in sorted((root / "rust").glob("*/src/**/*.rs")):
        path = file.relative_to(root).as_posix()
        crate = "/".join(path.split("/")[:2])
        relative = file.relative_to(root / crate / "src")
        if is_test_file(relative):
            continue
        source = bare(file.read_text(encoding="utf-8"))
        if path.startswith(CORE):
            yield from check_core_file(relative, path, source)
        for name, owner in FOREIGN.items():
            if crate != owner:
                for found in re.finditer(rf"\b{name}\b", source):
                    yield Violation(path, line_of(source, found.start()), f"only {owner} names {name}")
        for found in re.finditer(r"\bstatic\s+\w+\s*:\s*(?:\w+\s*::\s*)*(?:Mutex|RwLock|Condvar)\b", source):
            rule = "a lock of the process is a PerProcess: a thread may hold it at a fork"
            yield Violation(path, line_of(source, found.start()), rule)
        if not allowed(path, UNSAFE):
            for found in re.finditer(r"\bunsafe\b|\ballow\s*\([^)]*\bunsafe_code\b", source):
                yield Violation(
                    path, line_of(source, found.start()), "`unsafe` outside the rooms that are named for it"
                )
    for file in sorted((root / "rust").glob("*/Cargo.toml")):
        path = file.relative_to(root).as_posix()
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            for name, owner in FOREIGN.items():
                if re.match(rf"\s*{name}\b", line) and not path.startswith(owner):
                    yield Violation(path, number, f"only {owner} names {name}")


class Use(NamedTuple):
    """One name that a ``use`` declaration binds."""

    #: Index of the declaration in the source.
    at: int
    #: The path as written.
    segments: tuple[str, ...]
    #: The name that it gets; ``*`` for all names of a module.
    name: str
    #: Declared ``pub``, to whomever.
    public: bool


class Module(NamedTuple):
    """A module of a crate: a file, or a ``mod name { … }`` in one."""

    file: Path
    #: Without comments, literals, test modules, inner modules and ``pub(in …)``.
    source: str
    uses: list[Use]


# Name of a module from the crate's root.
ModulePath = tuple[str, ...]

_USE = re.compile(r"(?P<public>\bpub\b\s*(?:\([^)]*\)\s*)?)?\buse\s+(?P<tree>[^;]+);")
_INLINE_MODULE = re.compile(r"\bmod\s+(?P<name>\w+)\s*\{")
_TEST_FILE = re.compile(r"#\[cfg\((?:all\()?(?:test|loom)\b[^\]]*\]\s*(?:#\[[^\]]*\]\s*)*(?:pub\s+)?mod\s+(\w+)\s*;")
_PATH = re.compile(r"(?<![\w:$.])(\w+)((?:\s*::\s*\w+)+)")


def use_tree(tree: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """(path, bound name) of everything that a tree such as ``a::{b, c::{self, d as e}}`` imports."""
    head, brace, rest = tree.strip().partition("{")
    if not brace:
        path, _, alias = re.sub(r"\s+", " ", head.strip()).partition(" as ")
        segments = tuple(part.strip() for part in path.split("::") if part.strip())
        if segments and segments[-1] == "self" and len(segments) > 1:
            segments = segments[:-1]
        if segments:
            yield segments, alias.strip() or segments[-1]
        return
    prefix = tuple(part.strip() for part in head.split("::") if part.strip())
    depth, start = 0, 0
    body = rest[: rest.rindex("}")]
    for index, char in enumerate(body + ","):
        depth += {"{": 1, "}": -1}.get(char, 0)
        if char == "," and depth == 0:
            part = body[start:index].strip()
            start = index + 1
            if part == "self":
                yield prefix, prefix[-1]
            elif part:
                for segments, name in use_tree(part):
                    yield prefix + segments, name


def modules_in(path: ModulePath, file: Path, source: str) -> Iterator[tuple[ModulePath, Module]]:
    """The module of a source and those inside it."""
    while found := _INLINE_MODULE.search(source):
        end = closing(source, found.end() - 1)
        inner = blank(source[: found.end()]) + source[found.end() : end - 1]
        yield from modules_in((*path, found["name"]), file, inner)
        source = source[: found.start()] + blank(source[found.start() : end]) + source[end:]
    uses = [
        Use(found.start(), segments, name, bool(found["public"]))
        for found in _USE.finditer(source)
        for segments, name in use_tree(found["tree"])
    ]
    yield path, Module(file, _USE.sub(lambda found: blank(found.group()), source), uses)


def modules_of(src: Path) -> dict[ModulePath, Module]:
    """All modules of a crate but those of its tests."""
    sources = {}
    tests = set()
    for file in sorted(src.glob("**/*.rs")):
        parts = file.relative_to(src).with_suffix("").parts
        path = parts[:-1] if parts[-1] in ("mod", "lib", "main") else parts
        text = file.read_text(encoding="utf-8")
        sources[path] = file, re.sub(r"\bpub\s*\(\s*in\b[^)]*\)", lambda found: blank(found.group()), bare(text))
        tests |= {(*path, name) for name in _TEST_FILE.findall(_TOKENS.sub(lambda found: blank(found.group()), text))}
    found: dict[ModulePath, Module] = {}
    for path, (file, source) in sources.items():
        if not any(path[:depth] in tests for depth in range(1, len(path) + 1)):
            found.update(modules_in(path, file, source))
    return found


def defined_in(
    modules: dict[ModulePath, Module], at: ModulePath, segments: tuple[str, ...], seen: frozenset[object] = frozenset()
) -> Path | None:
    """File that defines what a path in module ``at`` names, followed through re-exports; None outside the crate."""
    if (at, segments) in seen:
        return None
    seen |= {(at, segments)}
    first, module = segments[0], at
    if first in ("crate", "self", "super"):
        module = () if first == "crate" else at
        while segments and segments[0] in ("crate", "self", "super"):
            module = module[:-1] if segments[0] == "super" else module
            segments = segments[1:]
    elif (*at, first) not in modules:
        bound = next((use for use in modules[at].uses if use.name == first and use.segments != segments), None)
        return defined_in(modules, at, (*bound.segments, *segments[1:]), seen) if bound else None
    while segments and (*module, segments[0]) in modules:
        module, segments = (*module, segments[0]), segments[1:]
    if module not in modules:
        return None
    if segments and segments[0] != "*":
        for use in modules[module].uses:
            if use.name == segments[0]:
                return defined_in(modules, module, (*use.segments, *segments[1:]), seen)
        if not re.search(rf"\b{segments[0]}\b", modules[module].source):
            for use in modules[module].uses:
                if use.name == "*" and (file := defined_in(modules, module, (*use.segments[:-1], *segments), seen)):
                    return file
    return modules[module].file


def file_imports(modules: dict[ModulePath, Module]) -> dict[Path, dict[Path, int]]:
    """For each file of a crate the files that it imports, with the index of the first import.

    ``pub use`` of a child's name is a re-export and no import, as ``mod`` is none; what others import through it
    counts as imported from the file that defines it.
    """
    imports: dict[Path, dict[Path, int]] = {module.file: {} for module in modules.values()}
    for path, module in modules.items():
        found = [
            (use.at, use.segments)
            for use in module.uses
            if not (use.public and (*path, use.segments[use.segments[0] == "self"]) in modules)
        ]
        for match in _PATH.finditer(module.source):
            if match[1] in ("crate", "super", "self") or (*path, match[1]) in modules:
                found.append((match.start(), (match[1], *re.findall(r"\w+", match[2]))))
        for index, segments in sorted(found):
            file = defined_in(modules, path, segments)
            if file and file != module.file:
                imports[module.file].setdefault(file, index)
    return imports


def shortest_circle(imports: dict[Path, dict[Path, int]], start: Path) -> list[Path]:
    """The files of a shortest circle of imports from a file back to it; empty when there is none."""
    paths, seen = [[start]], {start}
    for path in paths:
        for following in imports[path[-1]]:
            if following == start:
                return path
            if following not in seen:
                seen.add(following)
                paths.append([*path, following])
    return []


def check_rust_circles(root: Path) -> Iterator[Violation]:
    """No files of a crate import each other in a circle. Of circles that share a file one is reported."""
    for src in sorted((root / "rust").glob("*/src")):
        imports = file_imports(modules_of(src))
        reported: set[Path] = set()
        for start in imports:
            circle = shortest_circle(imports, start)
            if not circle or not reported.isdisjoint(circle):
                continue
            reported.update(circle)
            line = line_of(start.read_text(encoding="utf-8"), imports[start][circle[1]])
            names = " -> ".join(file.relative_to(src).as_posix() for file in (*circle, start))
            yield Violation(start.relative_to(root).as_posix(), line, f"circle of imports: {names}")


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
            if inside != "engine.py" and any("_bagua" in name.split(".") for name in names):
                yield Violation(path, line, "only python/bagua/engine.py imports the extension")
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
    """Whether a node rebinds a module's name, or installs a hook that runs at a fork or at the end of the process."""
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        return name.split(".")[-1] in ("register_at_fork", "register_after_fork") or name == "atexit.register"
    return isinstance(node, ast.Global)


def reads_environment(node: ast.AST, names: list[str]) -> bool:
    """Whether a node names the environment of the process."""
    words = ("environ", "environb", "getenv", "getenvb", "putenv", "unsetenv")
    if isinstance(node, ast.Attribute):
        return isinstance(node.value, ast.Name) and node.value.id in ("os", "posix") and node.attr in words
    return any(name in {f"os.{word}" for word in words} for name in names)


def check(root: Path) -> list[Violation]:
    """Every violation in a tree."""
    return [*check_rust(root), *check_rust_circles(root), *check_python(root)]


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
