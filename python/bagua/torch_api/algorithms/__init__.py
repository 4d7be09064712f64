"""How a model's ranks stay in step: one file per algorithm, each registered under its name."""

from . import base, bytegrad, gradient_allreduce
from .base import Algorithm, AlgorithmImpl, GlobalAlgorithmRegistry
from .bytegrad import ByteGradAlgorithm
from .gradient_allreduce import GradientAllReduceAlgorithm

__all__ = [
    "Algorithm",
    "AlgorithmImpl",
    "ByteGradAlgorithm",
    "GlobalAlgorithmRegistry",
    "GradientAllReduceAlgorithm",
    "base",
    "bytegrad",
    "gradient_allreduce",
]
