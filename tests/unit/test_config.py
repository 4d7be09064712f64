"""The environment: what is read, what wins, what is refused."""

from __future__ import annotations

import pytest

from bagua import config


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TIMEOUT", "HEARTBEAT_TIMEOUT", "TRANSPORT", "JOB_SECRET", "HOST_ID", "STREAMS_PER_PEER", "ALGORITHM"):
        monkeypatch.delenv(f"BAGUA_{name}", raising=False)


def test_without_anything_the_defaults_hold() -> None:
    assert config.settings() == config.Settings(300.0, 5.0, "auto", 2, "auto", b"", "", None)


def test_arguments_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAGUA_TIMEOUT", "7")
    monkeypatch.setenv("BAGUA_JOB_SECRET", "from the environment")
    assert config.settings().timeout == 7.0
    assert config.settings(timeout=3).timeout == 3.0
    assert config.settings(secret="given").secret == b"given"
    assert config.settings(secret=b"\x00\xff").secret == b"\x00\xff"
    assert config.settings().secret == b"from the environment"


@pytest.mark.parametrize(("name", "value"), [("BAGUA_TIMEOUT", "soon"), ("BAGUA_STREAMS_PER_PEER", "many")])
def test_a_variable_that_is_no_number_is_named_with_its_value(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{name}='{value}'"):
        config.settings()


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
