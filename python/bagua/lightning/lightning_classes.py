"""The classes for the namespace `lightning`."""

from .class_factory import make_classes

BaguaEnvironment, BaguaStrategy, FabricBaguaStrategy, CompressGradients = make_classes(
    __name__, "lightning.pytorch", "lightning.fabric"
)
