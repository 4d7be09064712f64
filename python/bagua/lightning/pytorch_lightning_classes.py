"""The classes for the namespace `pytorch_lightning`."""

from .class_factory import make

BaguaEnvironment, BaguaStrategy, FabricBaguaStrategy, CompressGradients = make(
    __name__, "pytorch_lightning", "lightning_fabric"
)
