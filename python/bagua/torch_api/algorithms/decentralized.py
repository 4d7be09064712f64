"""Decentralized training: each member steps with its own gradients and averages its weights with those of peers.

Sources: Lian et al., NeurIPS 2017 (arXiv:1705.09056) for decentralized SGD, which averages during forward and backward;
Assran et al., ICML 2019 (arXiv:1811.10792) and Ying et al., NeurIPS 2021 (arXiv:2110.13363) for the exponential graphs.
The compressed ring is DCD-PSGD of Tang et al., NeurIPS 2018 (arXiv:1803.06443), as in the original Bagua (Gan et al.,
VLDB 2021, arXiv:2107.01499). The page "Algorithms" has the formulas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from bagua import extension
from bagua.codecs import Compression, raw_codec

from ..bucket import BaguaBucket
from ..model_engine.optimizer_steps import parameters_of
from ..model_engine.weights import WeightAverage, WeightUpdate, check_floating
from ..process_group import Communicator, ReduceOp
from ._policy import ExchangePolicy, TrainingCallbacks
from .base import (
    Algorithm,
    AlgorithmImpl,
    GlobalAlgorithmRegistry,
    WrappedModel,
    check_codec,
    one_bucket_per_dtype,
    tensors_of_buckets,
)

#: The names of the rules by which a member chooses its peers. The page "Algorithms" describes them.
PEER_SELECTION_MODES = tuple(extension.PEER_SELECTION_MODES)

#: A bucket's replicas of the own weights and both neighbours' weights.
_REPLICAS = ("weight", "left_peer_weight", "right_peer_weight")


def check_interval(communication_interval: int) -> None:
    """Raises ValueError unless ``communication_interval`` is a positive integer."""
    if not isinstance(communication_interval, int) or communication_interval < 1:
        raise ValueError(f"communication_interval must be a positive integer, not {communication_interval!r}")


class _WeightsAlgorithmImpl(AlgorithmImpl):
    """Base of both algorithms. Exchanges weights in each step t with t % ``communication_interval`` == 0."""

    hierarchical: bool
    communication_interval: int

    def _communicates(self, step: int) -> bool:
        return step % self.communication_interval == 0


class DecentralizedAlgorithmImpl(_WeightsAlgorithmImpl):
    """Averages one bucket of weights per dtype with peers, during the forward and backward of each step."""

    peer_selection_mode: str

    def _policy(self) -> ExchangePolicy:
        return ExchangePolicy(
            make_exchange=WeightAverage,
            communicates=self._communicates,
            check_model=self._check_model,
            callbacks=TrainingCallbacks(after_forward=self._guard),
            # Accepts models with sparse gradients, which stay on their rank. The weights are dense.
            sparse_op=ReduceOp.AVG,
            votes_divide=True if self.peer_selection_mode == "all" else None,
        )

    def _check_model(self, bagua_ddp: WrappedModel) -> None:
        """Raises TypeError for complex parameters, and ValueError for "shift_one" with an odd number of members."""
        check_floating(bagua_ddp.bagua_build_params())
        communicator = self.process_group.get_global_communicator()
        assert isinstance(communicator, Communicator)
        extension.check_peer_selection(self.peer_selection_mode, len(communicator.members(self.hierarchical)))

    def _guard(self, output: Any) -> None:
        """Guards the graph of ``output`` against use after this step's exchange changed the weights."""
        exchange = self.bagua_ddp.exchange
        assert isinstance(exchange, WeightAverage)
        exchange.guard(output)

    def tensors_to_buckets(self, tensors: Sequence[Sequence[torch.Tensor]], do_flatten: bool) -> list[BaguaBucket]:
        """Makes one bucket per dtype. All weights are ready when a step begins, so more buckets would not help."""
        return one_bucket_per_dtype(tensors, do_flatten, self.process_group)

    def init_operations(self, bagua_ddp: WrappedModel, bucket: BaguaBucket) -> None:
        """Appends averaging with peers. The average, or the sum, is written to ``bucket._peer_weight``."""
        bucket.clear_ops()
        if bucket._peer_weight is None:
            bucket._peer_weight = bucket.extra_memory("peer-weight")
        if self._only_adds:
            # In place in ``_peer_weight``, where the exchange puts weighted copies.
            bucket.append_centralized_synchronous_op(self.hierarchical, False, group=self.process_group)
            return
        bucket.append_decentralized_synchronous_op(
            bucket._peer_weight, self.hierarchical, self.peer_selection_mode, self.process_group
        )


class LowPrecisionDecentralizedAlgorithmImpl(_WeightsAlgorithmImpl):
    """Sends encoded differences of the weights to both neighbours of a ring, after each optimizer step."""

    compression: Compression

    def _policy(self) -> ExchangePolicy:
        return ExchangePolicy(
            make_exchange=WeightUpdate,
            communicates=self._communicates,
            check_model=self._check_model,
            has_weight_state=True,
            rank_state=_REPLICAS,
            # As in DecentralizedAlgorithmImpl.
            sparse_op=ReduceOp.AVG,
        )

    def _check_model(self, bagua_ddp: WrappedModel) -> None:
        """Raises ValueError for parameters without an optimizer, TypeError for dtypes that the codec cannot encode."""
        parameters = bagua_ddp.bagua_build_params()
        check_floating(parameters)
        stepped = {id(param) for optimizer in bagua_ddp.bagua_optimizers for param in parameters_of(optimizer)}
        missing = [name for name, param in parameters if id(param) not in stepped]
        if missing:
            raise ValueError(
                f"no optimizer given to with_bagua holds the parameters {missing}: give with_bagua an optimizer that "
                "steps them, because weights are communicated after the optimizer's step"
            )
        check_codec(self.compression, bagua_ddp)

    def init_operations(self, bagua_ddp: WrappedModel, bucket: BaguaBucket) -> None:
        """Appends a round of the compressed ring. All ranks have rank 0's weights at this moment."""
        bucket.clear_ops()
        replicas = bucket.flattened_tensor(), bucket.flattened_tensor(), bucket.flattened_tensor()
        bucket._weight, bucket._left_peer_weight, bucket._right_peer_weight = replicas
        bucket.append_low_precision_decentralized_synchronous_op(
            *replicas, self.hierarchical, self.compression, self.process_group
        )

    def _tensors_of_state(self) -> dict[str, dict[str, torch.Tensor]]:
        attributes = {kind: f"_{kind}" for kind in _REPLICAS}
        return tensors_of_buckets(self.bagua_ddp.bagua_buckets, attributes)


@dataclass(eq=False, repr=False)
class DecentralizedAlgorithm(Algorithm):
    """Averages weights with peers in full precision. Each rank's gradient, computed at its own weights, is applied to
    the average.

    - ``hierarchical``: The members are hosts, with the mean of their ranks' weights, instead of ranks.
    - ``peer_selection_mode``: One of :data:`PEER_SELECTION_MODES`.
    - ``communication_interval``: Steps t with t % interval == 0 communicate; the other steps are local.

    Raises ValueError for an unknown mode or an interval below 1.
    """

    _implementation = DecentralizedAlgorithmImpl

    hierarchical: bool = True
    peer_selection_mode: str = "all"
    communication_interval: int = 1

    def __post_init__(self) -> None:
        extension.check_peer_selection(self.peer_selection_mode, 1)
        check_interval(self.communication_interval)


@dataclass(eq=False, repr=False)
class LowPrecisionDecentralizedAlgorithm(Algorithm):
    """Averages weights with both neighbours of a ring. After each optimizer step, only encoded differences are sent.

    - ``hierarchical``: The members are hosts, with the mean of their ranks' weights. All ranks of a host get the
      result.
    - ``communication_interval``: Steps t with t % interval == 0 communicate; the other steps are local.
    - ``compression``: A codec's name or a :class:`bagua.Codec`.

    Raises ValueError for an unknown or missing codec, or an interval below 1.
    """

    needs_optimizers = True
    _implementation = LowPrecisionDecentralizedAlgorithmImpl

    hierarchical: bool = True
    communication_interval: int = 1
    _: KW_ONLY
    compression: Compression = "MinMaxUInt8"

    def __post_init__(self) -> None:
        if raw_codec(self.compression) is None:
            raise ValueError("low_precision_decentralized needs a compression; decentralized works without one")
        check_interval(self.communication_interval)


GlobalAlgorithmRegistry.register(
    "decentralized", DecentralizedAlgorithm, "weights averaged with peers, overlapped with forward and backward"
)
GlobalAlgorithmRegistry.register(
    "low_precision_decentralized",
    LowPrecisionDecentralizedAlgorithm,
    "encoded differences of weights to both neighbours of a ring",
)
