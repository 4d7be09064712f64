"""The communication algorithms: one file per algorithm, each registered under its name."""

from .async_model_average import AsyncModelAverageAlgorithm as AsyncModelAverageAlgorithm
from .async_model_average import AsyncModelAverageAlgorithmImpl as AsyncModelAverageAlgorithmImpl
from .base import Algorithm as Algorithm
from .base import AlgorithmImpl as AlgorithmImpl
from .base import GlobalAlgorithmRegistry as GlobalAlgorithmRegistry
from .bytegrad import ByteGradAlgorithm as ByteGradAlgorithm
from .decentralized import DecentralizedAlgorithm as DecentralizedAlgorithm
from .decentralized import LowPrecisionDecentralizedAlgorithm as LowPrecisionDecentralizedAlgorithm
from .gradient_allreduce import GradientAllReduceAlgorithm as GradientAllReduceAlgorithm
from .local_sgd import DiLoCoAlgorithm as DiLoCoAlgorithm
from .local_sgd import LocalSGDAlgorithm as LocalSGDAlgorithm
from .powersgd import PowerSGDAlgorithm as PowerSGDAlgorithm
from .q_adam import QAdamAlgorithm as QAdamAlgorithm
from .q_adam import QAdamOptimizer as QAdamOptimizer
