"""The type with which algorithms written for the original Bagua annotate the model that they communicate for."""

from ..model_engine.engine import ModelEngine as BaguaDistributedDataParallel

__all__ = ["BaguaDistributedDataParallel"]
