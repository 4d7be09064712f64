"""The classes for the namespace `lightning`."""

from .classes import make

BaguaEnvironment, BaguaStrategy, FabricBaguaStrategy, CommunicationMonitor = make(
    __name__, "lightning.pytorch", "lightning.fabric"
)
