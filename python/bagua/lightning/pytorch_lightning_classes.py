"""The classes for the namespace `pytorch_lightning`."""

from .class_factory import make_classes

BaguaEnvironment, BaguaStrategy, FabricBaguaStrategy, CompressGradients = make_classes(
    __name__, "pytorch_lightning", "lightning_fabric"
)
