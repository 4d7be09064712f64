"""Aggregates gradients and models by hand, with the classes and closures of mlbench.

    from bagua.aggregation import AllReduceAggregation

    aggregate = AllReduceAggregation(world_size).agg_grad()
    loss.backward()
    aggregate(model, "avg_world")
    optimizer.step()

The optimizers in :mod:`bagua.aggregation.optim` do this themselves.
"""

from bagua.require_torch import require

require("bagua.aggregation")

from .aggregation import Aggregation
from .centralized import ALLREDUCE_AGGREGATION_OPS, AVG_CUSTOM, AVG_WORLD, AllReduceAggregation, AllReduceAggregationHVD
from .decentralized import DecentralizedAggregation
from .powersgd import PowerAggregation, orthogonalize
from .sparsified import SparsifiedAggregation
from .tensor_packing import global_average, pack_tensors, unpack_tensors

__all__ = [
    "ALLREDUCE_AGGREGATION_OPS",
    "AVG_CUSTOM",
    "AVG_WORLD",
    "Aggregation",
    "AllReduceAggregation",
    "AllReduceAggregationHVD",
    "DecentralizedAggregation",
    "PowerAggregation",
    "SparsifiedAggregation",
    "global_average",
    "orthogonalize",
    "pack_tensors",
    "unpack_tensors",
]
