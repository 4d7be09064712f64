"""Synchronous data-parallel training: every rank steps with the average (or sum) of all ranks' gradients."""

from __future__ import annotations

from dataclasses import dataclass

from ..bucket import BaguaBucket
from ..process_group import ReduceOp
from ._policy import ExchangePolicy
from .base import Algorithm, AlgorithmImpl, GlobalAlgorithmRegistry, WrappedModel


class GradientAllReduceAlgorithmImpl(AlgorithmImpl):
    """Runs one all_reduce per bucket of gradients."""

    hierarchical: bool
    average: bool

    def init_operations(self, bagua_ddp: WrappedModel, bucket: BaguaBucket) -> None:
        """Appends an all_reduce."""
        bucket.clear_ops()
        bucket.append_centralized_synchronous_op(
            hierarchical=self.hierarchical,
            average=self.average and not self._only_adds,
            group=self.process_group,
        )

    def _policy(self) -> ExchangePolicy:
        # Rows of sparse gradients are gathered without a hierarchy.
        return ExchangePolicy(sparse_op=ReduceOp.AVG if self.average else ReduceOp.SUM, votes_divide=self.average)


@dataclass(eq=False, repr=False)
class GradientAllReduceAlgorithm(Algorithm):
    """Averages (or sums) gradients in full precision.

    - ``hierarchical``: Adds inside each host first, then between hosts.
    - ``average``: True divides by the number of ranks. With False, accumulate gradients only under ``no_sync``: every
      other backward sums the whole ``.grad`` over the ranks again.
    """

    _implementation = GradientAllReduceAlgorithmImpl

    hierarchical: bool = False
    average: bool = True


GlobalAlgorithmRegistry.register(
    "gradient_allreduce", GradientAllReduceAlgorithm, "all-reduce of gradients, overlapped with backward"
)
