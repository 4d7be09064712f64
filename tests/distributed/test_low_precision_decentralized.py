"""low_precision_decentralized: weights and replicas equal the simulation of all ranks bit for bit, with every codec."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import bagua as neutral
import bagua.torch_api as bagua
from tests.distributed.torch_ranks import HOSTED, cases_in, each_case, hosts
from tests.distributed.weights_oracle import LowPrecision, Net, assert_equals, made_on_rank_0, sgd, train
from tests.distributed.weights_oracle import wrapped as wrapped_with

LowPrecisionAlgorithm = bagua.algorithms.LowPrecisionDecentralizedAlgorithm

#: One of each kind: by range, by block, by choice, at random, by sign, by rounding.
CODECS = (
    neutral.Codec("minmax_u8"),
    neutral.Codec("block_i8", block=16),
    neutral.Codec("top_k", k=0.3),
    neutral.Codec("random_k", k=0.4, seed=3),
    neutral.Codec("onebit"),
    neutral.Codec("f16"),
)

#: float32 parameters of Net, the last first; the other dtype has a bucket of its own.
FLOAT32 = ("unused", "deep", "shift", "scale")
WHOLE = (FLOAT32, ("other",))
SINGLE = tuple((name,) for name in ("unused", "other", "deep", "shift", "scale"))

make = functools.partial(Net, other=torch.float16)


def wrapped(
    rank: int, algorithm: Any = None, make: Callable[[], Net] = make, **options: Any
) -> tuple[Net, torch.optim.Optimizer]:
    return wrapped_with(rank, algorithm or LowPrecisionAlgorithm(hierarchical=False), make, **options)


def simulated(
    codec: neutral.Codec = CODECS[0],
    buckets: Sequence[Sequence[str]] = WHOLE,
    hierarchical: bool = False,
    interval: int = 1,
) -> LowPrecision:
    return LowPrecision(
        made_on_rank_0(make), bagua.get_world_size(), codec, buckets, hosts() if hierarchical else None, interval
    )


def assert_replicas(model: Net, ranks: LowPrecision, rank: int, what: str) -> None:
    """The replicas of this rank, where it exchanges for its member, are those of the simulation."""
    state = model.bagua_algorithm.state_dict()
    for names, ring in zip(ranks.buckets, ranks.rings, strict=True):
        i = ring.member_of(rank)
        of_member = {"weight": ring.weight[i], "left_peer_weight": ring.left[i], "right_peer_weight": ring.right[i]}
        for kind, flat in of_member.items():
            if kind != "weight" and (ring.members[i][0] != rank or len(ring.members) == 1):
                continue
            for name, values in ranks.parts(names, [flat]).items():
                np.testing.assert_array_equal(state[kind][name].numpy(), values[0], f"{what}: {kind} of {name}")


def every_codec_equals_the_simulation(rank: int) -> None:
    for i, (codec, hierarchical, interval) in enumerate(itertools.product(CODECS, (False, True), (1, 2))):
        small, do_flatten = i % 2 == 0, i % 3 == 0
        model, optimizer = wrapped(
            rank,
            LowPrecisionAlgorithm(hierarchical, interval, compression=codec),
            do_flatten=do_flatten,
            bucket_size=1 if small else None,
        )
        assert len(model.bagua_buckets) == (5 if small else 2)
        ranks = simulated(codec, SINGLE if small else WHOLE, hierarchical, interval)
        for step in range(5):
            train(model, optimizer, rank, step)
            ranks.train(step)
            what = f"{codec}, {hierarchical=}, {interval=}, {do_flatten=}, {small=}, step {step}"
            assert_equals(model, ranks, rank, what)
            assert_replicas(model, ranks, rank, what)


def models_and_options_that_cannot_be_are_refused(rank: int) -> None:
    model = torch.nn.Linear(3, 2)
    with pytest.raises(ValueError, match=r"no optimizer .*\['bias'\]"):
        model.with_bagua([torch.optim.SGD([model.weight], lr=0.1)], LowPrecisionAlgorithm())
    with pytest.raises(ValueError, match=r"\['weight', 'bias'\]"):
        model.with_bagua([], LowPrecisionAlgorithm())
    wide = torch.nn.Linear(3, 2).double()
    with pytest.raises(TypeError, match=r"'bias'.*float64"):
        wide.with_bagua([sgd(wide)], LowPrecisionAlgorithm())
    for compression in (None, "zip", "auto"):
        with pytest.raises(ValueError, match=r"compression|codec"):
            LowPrecisionAlgorithm(compression=compression)
    with pytest.raises(ValueError, match="communication_interval"):
        LowPrecisionAlgorithm(communication_interval=0)
    made = bagua.algorithms.Algorithm.init("low_precision_decentralized", compression="f16")
    assert isinstance(made, LowPrecisionAlgorithm)


CASES = cases_in(globals())

test = each_case(CASES, 1, *HOSTED, timeout=60)
