"""The environment: what is read, what wins, what is refused."""

from __future__ import annotations

import pytest

from bagua import config
from bagua.errors import BaguaError

LAUNCHER = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*LAUNCHER, "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("TIMEOUT", "HEARTBEAT_TIMEOUT", "TRANSPORT", "JOB_SECRET", "HOST_ID", "STREAMS_PER_PEER", "ALGORITHM"):
        monkeypatch.delenv(f"BAGUA_{name}", raising=False)


def test_without_anything_a_process_is_alone() -> None:
    assert config.place() == config.Place(0, 1, None, None)
    assert config.settings() == config.Settings(300.0, 5.0, "auto", 2, "auto", b"", "", None)


def test_the_launcher_says_where_a_process_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LAUNCHER.items():
        monkeypatch.setenv(name, value)
    assert config.place() == config.Place(3, 8, 1, 2)


def test_arguments_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LAUNCHER.items():
        monkeypatch.setenv(name, value)
    assert config.place(1, 2) == config.Place(1, 2, None, None)
    assert config.place(local_rank=0, local_world_size=8) == config.Place(3, 8, 0, 8)
    monkeypatch.setenv("BAGUA_TIMEOUT", "7")
    monkeypatch.setenv("BAGUA_JOB_SECRET", "from the environment")
    assert config.settings().timeout == 7.0
    assert config.settings(timeout=3).timeout == 3.0
    assert config.settings(secret="given").secret == b"given"
    assert config.settings(secret=b"\x00\xff").secret == b"\x00\xff"
    assert config.settings().secret == b"from the environment"


def test_half_a_place_is_an_error_that_names_the_other_half() -> None:
    with pytest.raises(BaguaError, match="WORLD_SIZE"):
        config.place(rank=1)
    with pytest.raises(BaguaError, match="RANK"):
        config.place(world_size=2)


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_outside_its_world_is_refused(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match="world"):
        config.place(rank, size)


@pytest.mark.parametrize(
    ("name", "value"), [("BAGUA_TIMEOUT", "soon"), ("BAGUA_STREAMS_PER_PEER", "many"), ("RANK", "first")]
)
def test_a_variable_that_is_no_number_is_named_with_its_value(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{name}='{value}'"):
        config.settings() if name.startswith("BAGUA") else config.place()


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
def test_a_timeout_that_is_not_positive_is_refused(timeout: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        config.settings(timeout=timeout)


def test_streams_and_algorithm_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAGUA_STREAMS_PER_PEER", "4")
    for algorithm in config.ALGORITHMS:
        monkeypatch.setenv("BAGUA_ALGORITHM", algorithm)
        assert (config.settings().streams_per_peer, config.settings().algorithm) == (4, algorithm)


@pytest.mark.parametrize("streams", ["0", "-1", "65"])
def test_a_number_of_streams_out_of_range_is_refused(monkeypatch: pytest.MonkeyPatch, streams: str) -> None:
    monkeypatch.setenv("BAGUA_STREAMS_PER_PEER", streams)
    with pytest.raises(ValueError, match=rf"BAGUA_STREAMS_PER_PEER is {streams}.*between 1 and 64"):
        config.settings()


def test_an_unknown_algorithm_is_refused_with_those_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAGUA_ALGORITHM", "bruck")
    with pytest.raises(ValueError, match=r"BAGUA_ALGORITHM='bruck' is none of auto, direct, ring, doubling"):
        config.settings()


def test_flags_are_true_only_when_they_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, meaning in (("1", True), ("true", True), ("0", False), ("", False), ("off", False)):
        monkeypatch.setenv("BAGUA_REPORT_METRICS", value)
        assert config.flag("BAGUA_REPORT_METRICS") is meaning
    monkeypatch.setenv("BAGUA_REPORT_METRICS", "perhaps")
    with pytest.raises(ValueError, match="perhaps"):
        config.flag("BAGUA_REPORT_METRICS")


def test_a_missing_rendezvous_says_what_to_set() -> None:
    with pytest.raises(BaguaError, match="MASTER_PORT is not set"):
        config.master()
