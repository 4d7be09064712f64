"""How a model's ranks stay in step: one file per algorithm, each registered under its name."""

from . import base, gradient_allreduce
from .base import Algorithm, AlgorithmImpl, GlobalAlgorithmRegistry
from .gradient_allreduce import GradientAllReduceAlgorithm

__all__ = [
    "Algorithm",
    "AlgorithmImpl",
    "GlobalAlgorithmRegistry",
    "GradientAllReduceAlgorithm",
    "base",
    "gradient_allreduce",
]
