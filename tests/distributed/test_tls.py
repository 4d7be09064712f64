"""TLS between ranks: the same results, failures named as over TCP, and clear errors where ranks disagree."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bagua
from tests.certificates import Authority
from tests.distributed.test_neutral_failures import is_named
from tests.distributed.test_neutral_verbs import everything
from tests.waits import meet
from tests.world import make_world

TCP = {"BAGUA_TRANSPORT": "tcp"}
TLS = TCP | {"BAGUA_TLS": "1", "BAGUA_JOB_SECRET": "a secret of this test"}


@pytest.mark.parametrize("size", [2, 4])
def test_every_verb_over_tls_equals_the_same_without(world: Callable[..., Any], size: int) -> None:
    plain = world(size, env=TCP).run(everything)
    results = world(size, env=TLS).run(everything)
    assert {result["digest"] for result in results} == {plain[0]["digest"]}
    for rank, result in enumerate(results):
        others = [name for to, name in result["stats"]["transports"].items() if to != rank]
        assert others == ["tls"] * (size - 1)
        assert result["stats"]["ops"]["all_reduce"]["wire_bytes_sent"] > 0


def test_a_killed_rank_is_named_over_tls(world: Callable[..., Any], tmp_path: Path) -> None:
    is_named(world, tmp_path, "all_reduce", TLS)


def sum_over_tls(rank: int) -> tuple[float, list[str]]:
    group = bagua.init(timeout=30)
    x = np.full(100_000, rank + 1.0)
    group.all_reduce(x)
    found = float(x[-1]), group.transports
    bagua.shutdown()
    return found


def test_ranks_with_certificates_of_one_authority_need_no_secret(world: Callable[..., Any], tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    files = [TCP | authority.issue(f"rank{rank}") for rank in range(2)]
    assert world(2, env=lambda rank: files[rank]).run(sum_over_tls) == [
        (3.0, ["self", "tls"]),
        (3.0, ["tls", "self"]),
    ]


def refused(rank: int, limit: float) -> tuple[str, float]:
    # The time to connect counts from when both are here, however long their processes took to start.
    meet("have started", rank, range(2))
    begun = time.monotonic()
    with pytest.raises(bagua.BaguaError) as raised:
        bagua.init(timeout=limit)
    return str(raised.value), time.monotonic() - begun


#: Seconds to connect.
LIMIT = 5.0


def settings(folder: Path) -> dict[str, list[dict[str, str]]]:
    """For each reason why two ranks refuse each other, the variables of both."""
    plain = {name: value for name, value in TLS.items() if name != "BAGUA_TLS"}
    own = [TCP | Authority(folder / f"ca{rank}").issue("rank") for rank in range(2)]
    certificates = TLS | own[0]
    return {
        "only rank 0 uses TLS": [TLS, plain],
        "only rank 1 uses TLS": [plain, TLS],
        "another secret": [TLS | {"BAGUA_JOB_SECRET": f"secret {rank}"} for rank in range(2)],
        "a certificate of another authority": own,
        "only rank 0 has a certificate": [certificates, TLS],
        "only rank 1 has a certificate": [TLS, certificates],
    }


REASONS = [
    *(f"only rank {rank} {what}" for what in ("uses TLS", "has a certificate") for rank in range(2)),
    *("another secret", "a certificate of another authority"),
]


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Future[list[tuple[str, float]]]]:
    """Returns the outcome for each reason. All worlds wait at the same time, for the whole time to connect."""
    folder = tmp_path_factory.mktemp("refusals")
    found = {}
    with ThreadPoolExecutor(len(REASONS)) as threads:
        for reason, env in settings(folder).items():
            world = make_world(2, env=env.__getitem__)
            found[reason] = threads.submit(world.run, refused, LIMIT)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("reason", REASONS)
def test_both_ranks_get_the_reason_of_a_refusal(
    refusals: dict[str, Future[list[tuple[str, float]]]], reason: str
) -> None:
    words = "secret" if reason == "another secret" else "TLS"
    for rank, (text, after) in enumerate(refusals[reason].result()):
        assert words in text, f"rank {rank}: {text}"
        assert after < LIMIT + 20, f"rank {rank} after {after:.1f} s: {text}"


def test_an_expired_certificate_is_refused_before_anything_is_sent(world: Callable[..., Any], tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    try:
        files = authority.issue("old", days=-1)
    except subprocess.CalledProcessError:
        pytest.skip("this openssl issues no certificate that has expired")
    assert "expired" in world(1, env=files).run(invalid)[0]


def invalid(rank: int) -> str:
    with pytest.raises(ValueError, match="the certificate: the other ranks would refuse it") as raised:
        bagua.init(timeout=30)
    return str(raised.value)
