"""The classes for the namespace `lightning`."""

from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from .environment import EnvironmentMethods
from .fabric import FabricStrategyMethods
from .monitor import MonitorMethods
from .training import StrategyMethods

__all__ = ["BaguaEnvironment", "BaguaStrategy", "CommunicationMonitor", "FabricBaguaStrategy"]


class BaguaEnvironment(EnvironmentMethods, ClusterEnvironment):  # type: ignore[misc]
    """Ranks that were started by Bagua's launchers."""


class BaguaStrategy(StrategyMethods, DDPStrategy):  # type: ignore[misc]
    """One of Bagua's algorithms for the Trainer; the page "Train with Lightning or Fabric" has the arguments."""

    _misconfigured = MisconfigurationException
    _environment = BaguaEnvironment


class FabricBaguaStrategy(FabricStrategyMethods, FabricDDPStrategy):  # type: ignore[misc]
    """One of Bagua's algorithms for Fabric; the page "Train with Lightning or Fabric" has the arguments."""

    _misconfigured = MisconfigurationException
    _environment = BaguaEnvironment


class CommunicationMonitor(MonitorMethods, Callback):  # type: ignore[misc]
    """Logs what communication costs per step to every logger of the trainer, each ``every_n_steps`` optimizer steps."""

    _misconfigured = MisconfigurationException


BaguaStrategy.register_strategies(StrategyRegistry)
FabricBaguaStrategy.register_strategies(STRATEGY_REGISTRY)
