"""The classes for the namespace `pytorch_lightning`."""

from lightning_fabric.plugins.environments import ClusterEnvironment
from lightning_fabric.strategies import STRATEGY_REGISTRY
from lightning_fabric.strategies import DDPStrategy as FabricDDPStrategy
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry
from pytorch_lightning.utilities.exceptions import MisconfigurationException

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
