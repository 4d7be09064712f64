"""ByteGrad: averages gradients through a codec, by default with eight bits per element.

Source: the original Bagua's ByteGrad (Gan et al., VLDB 2021, arXiv:2107.01499). The page "Algorithms" has the formula.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch

from bagua.codecs import Compression, raw_codec

from ..bucket import BaguaBucket
from ..model_engine.gradients import GradientExchange
from ..model_engine.sparse import exchange_gradients
from ..process_group import Communicator, ReduceOp
from ._policy import ExchangePolicy
from .base import Algorithm, AlgorithmImpl, GlobalAlgorithmRegistry, WrappedModel

#: The codec that "auto" compares with sending uncompressed gradients.
_AUTO = "minmax_u8"


class ByteGradAlgorithmImpl(AlgorithmImpl):
    """Runs one compressed all_reduce per bucket of gradients."""

    hierarchical: bool
    average: bool
    compression: Compression
    error_feedback: bool

    def _policy(self) -> ExchangePolicy:
        return ExchangePolicy(
            make_exchange=self._make_exchange,
            sparse_op=self._sparse_op,
            pads_buckets=True,
            votes_divide=self.average,
        )

    @property
    def _sparse_op(self) -> ReduceOp:
        # Rows of sparse gradients are gathered in full precision.
        return ReduceOp.AVG if self.average else ReduceOp.SUM

    def _make_exchange(self, bagua_ddp: WrappedModel) -> GradientExchange:
        """Exchanges gradients. With error feedback, adds results that no optimizer uses to the error memory again."""
        exchange = exchange_gradients(bagua_ddp, self._sparse_op)
        if self.error_feedback:
            exchange.discarded = self._give_back
        return exchange

    def _give_back(self, name: str, result: torch.Tensor, given: torch.Tensor | None) -> None:
        """Adds a discarded result to the error memory, in equal shares on all ranks that contributed to it."""
        communicator = self.process_group.get_global_communicator()
        assert isinstance(communicator, Communicator)
        ranks, holders = communicator.nranks(), communicator.members(self.hierarchical)
        if len(holders) == 1 or communicator.rank() not in holders:
            return
        error = self._tensors_of_state()["error"][name]
        divided = self.average and not self._only_adds
        error.add_(result.detach().to(error.dtype), alpha=(ranks if divided else 1) / len(holders))
        # With hierarchical=True, old gradients of other ranks on this host are not known here and count as 0.
        if given is not None:
            error.sub_(given.detach().to(error.dtype))

    def init_operations(self, bagua_ddp: WrappedModel, bucket: BaguaBucket) -> None:
        """Appends an all_reduce through the codec."""
        bucket.clear_ops()
        average = self.average and not self._only_adds
        if self.compression == "auto":
            bucket.append_automatic_op(_AUTO, self.hierarchical, average, self.process_group)
            return
        bucket.append_centralized_synchronous_op(
            hierarchical=self.hierarchical,
            average=average,
            scattergather=True,
            compression=self.compression,
            group=self.process_group,
            error_feedback=self.error_feedback,
        )

    @property
    def choices(self) -> dict[str, str | None]:
        """Codec of each bucket, by bucket name; None means no codec. With ``"auto"`` it changes during training."""
        if self.compression == "auto":
            return {bucket.name: bucket.backend_bucket.choice() or None for bucket in self.bagua_ddp.bagua_buckets}
        codec = raw_codec(self.compression)
        return {bucket.name: None if codec is None else codec.name for bucket in self.bagua_ddp.bagua_buckets}


@dataclass(eq=False, repr=False)
class ByteGradAlgorithm(Algorithm):
    """Averages (or sums) gradients through a codec.

    - ``hierarchical``: Adds in full precision inside each host, and uses the codec only between hosts. On a single host
      the algorithm then equals ``gradient_allreduce``.
    - ``average``: True divides by the number of ranks; False sums.
    - ``compression``: A codec's name, a :class:`bagua.Codec`, None for no codec, or ``"auto"``. ``"auto"`` times
      minmax_u8 against no codec in the first steps and every 1,000 steps, and uses the faster one for each bucket.
    - ``error_feedback``: Adds what encoding lost to the gradients of the next step.

    Raises ValueError for an unknown codec, and for error feedback without a codec or with ``"auto"``.
    """

    _implementation = ByteGradAlgorithmImpl

    hierarchical: bool = True
    average: bool = True
    _: KW_ONLY
    compression: Compression = "MinMaxUInt8"
    error_feedback: bool = False

    def __post_init__(self) -> None:
        if self.compression != "auto":
            raw_codec(self.compression)
        if self.error_feedback and (self.compression is None or self.compression == "auto"):
            raise ValueError(f"error_feedback needs a fixed codec, but compression is {self.compression!r}")


GlobalAlgorithmRegistry.register("bytegrad", ByteGradAlgorithm, "compressed all-reduce of gradients")
