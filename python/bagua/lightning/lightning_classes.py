"""The classes for the namespace `lightning`."""

from .class_factory import make

BaguaEnvironment, BaguaStrategy, FabricBaguaStrategy, CompressGradients = make(
    __name__, "lightning.pytorch", "lightning.fabric"
)
