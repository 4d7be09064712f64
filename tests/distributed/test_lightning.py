"""Lightning's Trainer and Fabric with Bagua's strategies: the checks of docs/lightning.md, on two ranks."""

from __future__ import annotations

import functools
from typing import Any

import pytest

pytest.importorskip("lightning", reason="lightning is not installed: make setup")
pytest.importorskip("pytorch_lightning", reason="pytorch_lightning is not installed: make setup")

from tests.distributed.lightning_ranks import CASES, PARITY, run
from tests.world import World

#: The second name has the same code: a part of the cases shows that it runs there.
SHORT = ["reductions", "checkpoints_fit_everywhere", "the_monitor_logs_to_every_logger", "fabric_trains"]


@functools.cache
def outcomes(namespace: str) -> list[dict[str, Any]]:
    """What both ranks found. Runs once for all tests."""
    cases = list(CASES) if namespace == "lightning" else SHORT
    found: list[dict[str, Any]] = World(2, timeout=280.0).run(run, namespace, cases)
    return found


@pytest.mark.parametrize("name", PARITY)
@pytest.mark.parametrize("namespace", ["lightning", "pytorch_lightning"])
def test_a_training_is_bitwise_that_of_ddp(namespace: str, name: str) -> None:
    for found in outcomes(namespace):
        assert found[name] == found[f"ddp: {name}"]
        assert found[name][1], "the gradients of the ranks differ"


@pytest.mark.parametrize(
    ("namespace", "name"),
    [*(("lightning", name) for name in CASES), *(("pytorch_lightning", name) for name in SHORT)],
)
def test_the_strategy(namespace: str, name: str) -> None:
    failed = [f"--- rank {rank} ---\n{found[name]}" for rank, found in enumerate(outcomes(namespace))]
    assert not any(found[name] for found in outcomes(namespace)), "\n".join(failed)
