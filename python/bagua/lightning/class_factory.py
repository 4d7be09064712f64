"""Makes Bagua's classes for one of Lightning's two namespaces."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .compress_gradients import CompressGradientsMethods
from .environment import EnvironmentMethods
from .fabric_strategy import FabricStrategyMethods
from .trainer_strategy import StrategyMethods

__all__ = ["make_classes"]


def make_classes(module: str, pytorch: str, fabric: str) -> tuple[Any, Any, Any, Any]:
    """Makes the environment, the strategies of the Trainer and of Fabric, and a callback, and registers the
    strategies.

    `module` is the module in which pickle finds the classes. `pytorch` and `fabric` are the packages of their base
    classes.
    """
    misconfigured = import_module(f"{pytorch}.utilities.exceptions").MisconfigurationException

    def build(name: str, methods: type[Any], base: type[Any], **attributes: Any) -> Any:
        found = {"__module__": module, "__doc__": methods.__doc__, "_misconfigured": misconfigured, **attributes}
        return type(name, (methods, base), found)

    training, setup = import_module(f"{pytorch}.strategies"), import_module(f"{fabric}.strategies")
    environments = import_module(f"{fabric}.plugins.environments")
    environment = build("BaguaEnvironment", EnvironmentMethods, environments.ClusterEnvironment)
    strategy = build("BaguaStrategy", StrategyMethods, training.DDPStrategy, _environment=environment)
    fabrics = build("FabricBaguaStrategy", FabricStrategyMethods, setup.DDPStrategy, _environment=environment)
    callback = import_module(f"{pytorch}.callbacks").Callback
    compress = build("CompressGradients", CompressGradientsMethods, callback)
    strategy.register_strategies(training.StrategyRegistry)
    fabrics.register_strategies(setup.STRATEGY_REGISTRY)
    return environment, strategy, fabrics, compress
