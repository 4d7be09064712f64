"""Synchronous data-parallel training: every rank steps with the average (or sum) of all ranks' gradients."""

from __future__ import annotations

from dataclasses import dataclass

from ..bucket import BaguaBucket
from ..process_group import ReduceOp
from .base import Algorithm, AlgorithmImpl, GlobalAlgorithmRegistry, WrappedModel


class GradientAllReduceAlgorithmImpl(AlgorithmImpl):
    """One all_reduce per bucket of gradients."""

    hierarchical: bool
    average: bool

    def init_operations(self, bagua_ddp: WrappedModel, bucket: BaguaBucket) -> None:
        """All-reduces the bucket."""
        bucket.clear_ops()
        bucket.append_centralized_synchronous_op(
            hierarchical=self.hierarchical, average=self.average, group=self.process_group
        )

    def sparse_op(self) -> ReduceOp:
        """The same for sparse gradients, whose rows are gathered; never inside hosts first."""
        return ReduceOp.AVG if self.average else ReduceOp.SUM


@dataclass(eq=False, repr=False)
class GradientAllReduceAlgorithm(Algorithm):
    """``hierarchical``: add inside hosts first, then between them. ``average``: divide by the number of ranks; without,
    gradients accumulate under ``no_sync`` only, as each other backward sums over the ranks all that ``.grad`` holds.
    """

    _implementation = GradientAllReduceAlgorithmImpl

    hierarchical: bool = False
    average: bool = True


GlobalAlgorithmRegistry.register(
    "gradient_allreduce", GradientAllReduceAlgorithm, "all-reduce of gradients, overlapped with backward"
)
