"""How a model's ranks stay in step: one file per algorithm, each registered under its name."""

from . import async_model_average, base, bytegrad, decentralized, gradient_allreduce, local_sgd, powersgd, q_adam
from .async_model_average import AsyncModelAverageAlgorithm
from .base import Algorithm, AlgorithmImpl, GlobalAlgorithmRegistry
from .bytegrad import ByteGradAlgorithm
from .decentralized import DecentralizedAlgorithm, LowPrecisionDecentralizedAlgorithm
from .gradient_allreduce import GradientAllReduceAlgorithm
from .local_sgd import DiLoCoAlgorithm, LocalSGDAlgorithm
from .powersgd import PowerSGDAlgorithm
from .q_adam import QAdamAlgorithm, QAdamOptimizer

__all__ = [
    "Algorithm",
    "AlgorithmImpl",
    "AsyncModelAverageAlgorithm",
    "ByteGradAlgorithm",
    "DecentralizedAlgorithm",
    "DiLoCoAlgorithm",
    "GlobalAlgorithmRegistry",
    "GradientAllReduceAlgorithm",
    "LocalSGDAlgorithm",
    "LowPrecisionDecentralizedAlgorithm",
    "PowerSGDAlgorithm",
    "QAdamAlgorithm",
    "QAdamOptimizer",
    "async_model_average",
    "base",
    "bytegrad",
    "decentralized",
    "gradient_allreduce",
    "local_sgd",
    "powersgd",
    "q_adam",
]
