"""ByteGrad: gradients are averaged through a codec, eight bits per element by default.

Source: the original Bagua's ByteGrad (Gan et al., VLDB 2021, arXiv:2107.01499). The page "Algorithms" has the formula.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch

from bagua.codecs import Compression, raw_codec

from ..bucket import BaguaBucket
from ..model_engine.exchange_interface import Exchange
from ..model_engine.gradients import GradientExchange
from ..process_group import Communicator, ReduceOp
from .base import Algorithm, AlgorithmImpl, GlobalAlgorithmRegistry, WrappedModel

#: The codec that "auto" compares with none.
_AUTO = "minmax_u8"


class ByteGradAlgorithmImpl(AlgorithmImpl):
    """One compressed all_reduce per bucket of gradients."""

    hierarchical: bool
    average: bool
    compression: Compression
    error_feedback: bool
    _pads_buckets = True

    def make_exchange(self, bagua_ddp: WrappedModel) -> Exchange:
        """The gradients."""
        exchange = super().make_exchange(bagua_ddp)
        if self.error_feedback and isinstance(exchange, GradientExchange):
            exchange.discarded = self._give_back
        return exchange

    def _give_back(self, name: str, result: torch.Tensor, given: torch.Tensor | None) -> None:
        """Returns to the error memory, in equal shares, what it contributed to a result that is not used."""
        communicator = self.process_group.get_global_communicator()
        assert isinstance(communicator, Communicator)
        ranks, holders = communicator.nranks(), communicator.members(self.hierarchical)
        if len(holders) == 1 or communicator.rank() not in holders:
            return
        error = self._tensors_of_state()["error"][name]
        error.add_(result.detach().to(error.dtype), alpha=(ranks if self.average else 1) / len(holders))
        # By host, an old gradient of the other ranks of the host is not known here, and counts as 0.
        if given is not None:
            error.sub_(given.detach().to(error.dtype))

    def init_operations(self, bagua_ddp: WrappedModel, bucket: BaguaBucket) -> None:
        """All-reduces the bucket through the codec."""
        bucket.clear_ops()
        if self.compression == "auto":
            bucket.append_automatic_op(_AUTO, self.hierarchical, self.average, self.process_group)
            return
        bucket.append_centralized_synchronous_op(
            hierarchical=self.hierarchical,
            average=self.average,
            scattergather=True,
            compression=self.compression,
            group=self.process_group,
            error_feedback=self.error_feedback,
        )

    def sparse_op(self) -> ReduceOp:
        """The same for sparse gradients, whose rows are gathered in full precision."""
        return ReduceOp.AVG if self.average else ReduceOp.SUM

    @property
    def choices(self) -> dict[str, str | None]:
        """The codec that each bucket uses, by the bucket's name; None for no codec. With ``"auto"`` it changes."""
        if self.compression == "auto":
            return {bucket.name: bucket.backend_bucket.choice() or None for bucket in self.bagua_ddp.bagua_buckets}
        codec = raw_codec(self.compression)
        return {bucket.name: None if codec is None else codec.name for bucket in self.bagua_ddp.bagua_buckets}


@dataclass(eq=False, repr=False)
class ByteGradAlgorithm(Algorithm):
    """Averages (or sums) gradients through a codec.

    ``hierarchical``: full precision inside hosts, the codec between them; on one host it is then
    ``gradient_allreduce``. ``compression``: a codec's name, a :class:`bagua.Codec`, None for none, or ``"auto"``, which
    times minmax_u8 against none in the first steps and every 1,000, and keeps the faster for each bucket.
    ``error_feedback`` adds what encoding lost to the next step's gradients. ValueError for an unknown codec, and for
    error feedback without a fixed one.
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
            raise ValueError(f"error_feedback needs a codec, and compression is {self.compression!r}")


GlobalAlgorithmRegistry.register("bytegrad", ByteGradAlgorithm, "compressed all-reduce of gradients")
