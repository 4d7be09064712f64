"""How a model's ranks stay in step: one file per algorithm, each registered under its name."""

from . import base, bytegrad, gradient_allreduce, local_sgd
from .base import Algorithm, AlgorithmImpl, GlobalAlgorithmRegistry
from .bytegrad import ByteGradAlgorithm
from .gradient_allreduce import GradientAllReduceAlgorithm
from .local_sgd import DiLoCoAlgorithm, LocalSGDAlgorithm

__all__ = [
    "Algorithm",
    "AlgorithmImpl",
    "ByteGradAlgorithm",
    "DiLoCoAlgorithm",
    "GlobalAlgorithmRegistry",
    "GradientAllReduceAlgorithm",
    "LocalSGDAlgorithm",
    "base",
    "bytegrad",
    "gradient_allreduce",
    "local_sgd",
]
