"""How a model's ranks stay in step: one file per algorithm, each registered under its name."""

from . import base, bytegrad, gradient_allreduce, powersgd, q_adam
from .base import Algorithm, AlgorithmImpl, GlobalAlgorithmRegistry
from .bytegrad import ByteGradAlgorithm
from .gradient_allreduce import GradientAllReduceAlgorithm
from .powersgd import PowerSGDAlgorithm
from .q_adam import QAdamAlgorithm

__all__ = [
    "Algorithm",
    "AlgorithmImpl",
    "ByteGradAlgorithm",
    "GlobalAlgorithmRegistry",
    "GradientAllReduceAlgorithm",
    "PowerSGDAlgorithm",
    "QAdamAlgorithm",
    "base",
    "bytegrad",
    "gradient_allreduce",
    "powersgd",
    "q_adam",
]
