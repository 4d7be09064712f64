"""Bagua as a strategy of Lightning (2.6 or newer) and of Fabric.

    import bagua.lightning
    from lightning import Trainer

    Trainer(strategy="bagua", accelerator="cpu", devices=2)

Lightning exists under two names with separate classes: `lightning`, and `pytorch_lightning` with `lightning_fabric`.
Importing this module registers the strategies "bagua", "bagua_spawn", "bagua_fork" and "bagua_notebook" in each of them
that is installed. The classes here are for `lightning` if it is installed, else for `pytorch_lightning`; `strategies()`
returns those of either. See the page "Train with Lightning or Fabric".
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .compress_gradients import CompressGradientsMethods as CompressGradients
    from .environment import EnvironmentMethods as BaguaEnvironment
    from .fabric_strategy import FabricStrategyMethods as FabricBaguaStrategy
    from .trainer_strategy import StrategyMethods as BaguaStrategy

__all__ = [
    "BaguaEnvironment",
    "BaguaStrategy",
    "CompressGradients",
    "FabricBaguaStrategy",
    "strategies",
]

# In order of preference.
_NAMESPACES = ("lightning", "pytorch_lightning")


def strategies(namespace: str = "lightning") -> tuple[type[Any], type[Any]]:
    """Returns `BaguaStrategy` and `FabricBaguaStrategy` for "lightning" or "pytorch_lightning".

    Raises ValueError for another name, and ImportError if that package is not installed.
    """
    if namespace not in _NAMESPACES:
        raise ValueError(f"Lightning's namespaces are {' and '.join(map(repr, _NAMESPACES))}, not {namespace!r}")
    classes = _classes(namespace)
    return classes.BaguaStrategy, classes.FabricBaguaStrategy


def _installed() -> list[str]:
    return [namespace for namespace in _NAMESPACES if importlib.util.find_spec(namespace) is not None]


def _classes(namespace: str) -> Any:
    if namespace not in _installed():
        raise ImportError(f'{namespace} is not installed: pip install "{namespace.replace("_", "-")}>=2.6.4"')
    return importlib.import_module(f"{__name__}.{namespace}_classes")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_classes((_installed() or ["lightning"])[0]), name)


for _namespace in _installed():
    _classes(_namespace)
