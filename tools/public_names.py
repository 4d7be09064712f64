"""Which names of the package are public, read from its sources without importing them.

    python -m tools.public_names

prints them, and the members of classes, one a line.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "python"

# The modules that users import from, by the heading under which the reference has them.
PUBLIC = {
    "Any framework": [
        "bagua",
        "bagua.cuda",
        "bagua.errors",
        "bagua.group",
        "bagua.shared_memory",
        "bagua.metrics",
        "bagua.trace",
    ],
    "torch": [
        "bagua.torch_api",
        "bagua.torch_api.algorithms",
        "bagua.torch_api.bucket",
        "bagua.torch_api.checkpoint",
        "bagua.torch_api.communication",
        "bagua.torch_api.data_parallel",
        "bagua.torch_api.data_parallel.functional",
        "bagua.torch_api.env",
        "bagua.torch_api.model_parallel",
        "bagua.torch_api.model_parallel.moe",
        "bagua.torch_api.moe",
        "bagua.torch_api.process_group",
        "bagua.torch_api.tensor",
        "bagua.torch_api.utils",
    ],
    "Additions to torch": [
        "bagua.torch_api.contrib",
        "bagua.torch_api.contrib.cache_loader",
        "bagua.torch_api.contrib.cached_dataset",
        "bagua.torch_api.contrib.fuse",
        "bagua.torch_api.contrib.load_balancing_data_loader",
        "bagua.torch_api.contrib.utils.lmdb_store",
        "bagua.torch_api.contrib.utils.memory_store",
        "bagua.torch_api.contrib.utils.redis_store",
        "bagua.torch_api.contrib.utils.serialization",
        "bagua.torch_api.contrib.utils.store",
    ],
    "Other front ends": [
        "bagua.accelerate",
        "bagua.aggregation",
        "bagua.aggregation.optim",
        "bagua.c10d",
        "bagua.hooks",
        "bagua.horovod.torch",
        "bagua.lightning",
    ],
    "Programs": [
        "bagua.cli",
        "bagua.distributed.launch",
        "bagua.distributed.run",
        "bagua.distributed.store",
        "bagua.script.baguarun",
    ],
}

# The other modules that have an `__all__`: for the package itself.
INTERNAL = (
    "bagua.aggregation.centralized",
    "bagua.arrays",
    "bagua.buckets",
    "bagua.c10d.*",
    "bagua.codecs",
    "bagua.collectives",
    "bagua.commands.*",
    "bagua.cuda.arrays",
    "bagua.cuda.kernels",
    "bagua.cuda.tensors",
    "bagua.distributed.signals",
    "bagua.distributions",
    "bagua.default_group",
    "bagua.deprecation",
    "bagua.dlpack",
    "bagua.handle",
    "bagua.hints",
    "bagua.horovod.*",
    "bagua.joining",
    "bagua.launcher",
    "bagua.lifecycle",
    "bagua.lightning.*",
    "bagua.linalg",
    "bagua.log",
    "bagua.messages",
    "bagua.metrics.*",
    "bagua.objects",
    "bagua.operand",
    "bagua.records",
    "bagua.tcp_store_requests",
    "bagua.torch_api.contrib.utils.cache_state",
    "bagua.torch_api.contrib.utils.counters",
    "bagua.torch_api.contrib.utils.redis_*",
    "bagua.torch_api.data_parallel.*",
    "bagua.torch_api.default_collectives",
    "bagua.torch_api.devices",
    "bagua.torch_api.membership*",
    "bagua.torch_api.model_engine*",
    "bagua.torch_api.patches",
    "bagua.torch_api.process_group.state",
    "bagua.torch_exchange",
    "bagua.torch_needed",
    "bagua.torch_operand",
    "bagua.torch_store",
    "bagua.verbs",
)


def public_modules() -> dict[str, list[str]]:
    """Module -> its public names. ValueError for a module with an `__all__` that the lists above leave out."""
    chosen = [module for modules in PUBLIC.values() for module in modules]
    exporting = {module: names for module in _modules() if (names := exported(module)) is not None}
    unplaced = [m for m in exporting if m not in chosen and not any(fnmatch(m, pattern) for pattern in INTERNAL)]
    if unplaced:
        raise ValueError(f"neither public nor internal in tools/public_names.py: {', '.join(unplaced)}")
    return {module: exporting.get(module) or defined(module) for module in chosen}


def dotted_names() -> Iterator[str]:
    """Every public name with its module, and the public members of every class with its name."""
    for module, names in public_modules().items():
        yield module
        for name in names:
            yield f"{module}.{name}"
            yield from (f"{module}.{name}.{member}" for member in sorted(members(module, name)))


def members(module: str, name: str) -> set[str]:
    """The public methods and attributes of a class of the package, with those of its bases; empty for anything else.

    Those that the body of the class has: not what `__init__` or another module sets.
    """
    for node in _tree(module).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            found = {member for part in node.body for member in bound(part) if not member.startswith("_")}
            return found.union(*(members(module, base.id) for base in node.bases if isinstance(base, ast.Name)))
    source = imported(module).get(name, "")
    if not source.startswith("bagua.") or is_module(source):
        return set()
    return members(*source.rsplit(".", 1))


def bound(node: ast.stmt) -> list[str]:
    """The names that a statement binds: a definition, or an assignment to plain names."""
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AnnAssign(target=ast.Name(name)):
            return [name]
        case ast.Assign(targets=targets):
            return [target.id for target in targets if isinstance(target, ast.Name)]
    return []


def imported(module: str) -> dict[str, str]:
    """What a module imports by `from`, under its name there: where from."""
    here = module.split(".")
    found: dict[str, str] = {}
    for node in _tree(module).body:
        if isinstance(node, ast.ImportFrom):
            around = (here if _folder(module).is_dir() else here[:-1]) if node.level else []
            within = [*around, *([node.module] if node.module else [])]
            found |= {alias.asname or alias.name: ".".join([*within, alias.name]) for alias in node.names}
    return found


def exported(module: str) -> list[str] | None:
    """The public names of the module's `__all__`, those of another module that it adds included; None without one."""
    found = None
    modules = imported(module)
    for node in _tree(module).body:
        match node:
            case ast.Assign(targets=[ast.Name("__all__")], value=listed):
                found = [name for name in ast.literal_eval(listed) if not name.startswith("_")]
            case ast.AugAssign(target=ast.Name("__all__"), value=ast.Attribute(ast.Name(name), "__all__")):
                found = sorted([*(found or []), *(exported(modules[name]) or [])])
            case ast.AugAssign(target=ast.Name("__all__"), value=listed):
                raise ValueError(f"{module}: __all__ += {ast.unparse(listed)}, which is not the __all__ of a module")
    return found


def defined(module: str) -> list[str]:
    """The functions and classes of a module without `__all__`, and what it imports `as` its own name, unless they begin
    with an underscore.
    """
    found = []
    for node in _tree(module).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.append(node.name)
        elif isinstance(node, ast.ImportFrom):
            found += [alias.name for alias in node.names if alias.asname == alias.name]
    return [name for name in found if not name.startswith("_")]


def is_module(dotted: str) -> bool:
    """Whether a dotted name is a module of the package."""
    path = _folder(dotted)
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def _folder(module: str) -> Path:
    return PACKAGE.joinpath(*module.split("."))


def _modules() -> list[str]:
    found = [path.relative_to(PACKAGE).with_suffix("") for path in sorted(PACKAGE.glob("bagua/**/*.py"))]
    return [".".join(path.parts).removesuffix(".__init__") for path in found]


@functools.cache
def _tree(module: str) -> ast.Module:
    path = _folder(module)
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


if __name__ == "__main__":
    sys.stdout.writelines(f"{name}\n" for name in dotted_names())
