"""How a model's ranks stay in step: one file per algorithm, each registered under its name."""

from . import base, bytegrad, decentralized, gradient_allreduce
from .base import Algorithm, AlgorithmImpl, GlobalAlgorithmRegistry
from .bytegrad import ByteGradAlgorithm
from .decentralized import DecentralizedAlgorithm, LowPrecisionDecentralizedAlgorithm
from .gradient_allreduce import GradientAllReduceAlgorithm

__all__ = [
    "Algorithm",
    "AlgorithmImpl",
    "ByteGradAlgorithm",
    "DecentralizedAlgorithm",
    "GlobalAlgorithmRegistry",
    "GradientAllReduceAlgorithm",
    "LowPrecisionDecentralizedAlgorithm",
    "base",
    "bytegrad",
    "decentralized",
    "gradient_allreduce",
]
