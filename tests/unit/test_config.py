"""The environment: what is read, what wins, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest

from bagua import config, extension
from bagua.config import VARIABLES


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_without_anything_the_defaults_hold() -> None:
    assert config.settings() == config.Settings(300.0, b"", None, 5.0, "auto", 2, "auto", "")


def test_arguments_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAGUA_TIMEOUT", "7")
    monkeypatch.setenv("BAGUA_JOB_SECRET", "from the environment")
    assert config.settings().timeout == 7.0
    assert config.settings(timeout=3).timeout == 3.0
    assert config.settings(secret="given").secret == b"given"
    assert config.settings(secret=b"\x00\xff").secret == b"\x00\xff"
    with pytest.raises(TypeError, match="the secret is a int") as refused:
        config.settings(secret=12345)  # type: ignore[arg-type]
    assert "12345" not in str(refused.value)
    assert config.settings().secret == b"from the environment"


# Of each setting that not every text can be: values that it cannot be, and what reads it where it is used.
REFUSED: dict[str, tuple[tuple[str, ...], Callable[[], object]]] = {
    "BAGUA_ALGORITHM": (("bruck",), config.settings),
    "BAGUA_CUDA_CHECK": (("perhaps",), config.cuda_check),
    "BAGUA_CUDA_COLLECTIVE": (("fastest",), config.cuda_collective),
    "BAGUA_DEFAULT_BUCKET_SIZE": (("large", "0", "-1"), config.default_bucket_size),
    "BAGUA_ELASTIC": (("host:1", "file://here", "file:///", "tcp://host", "tcp://host:1/path"), config.address_book),
    "BAGUA_HEARTBEAT_TIMEOUT": (("soon", "0", "-1", "nan", "1e-300"), config.settings),
    "BAGUA_LOG": (("loud",), config.log_level),
    "BAGUA_METRICS_PORT": (("any", "0", "65536"), config.metrics_address),
    "BAGUA_SSH_PORT": (("any", "0", "65536"), config.ssh_port),
    "BAGUA_STREAMS_PER_PEER": (("many", "0", "-1", "65"), config.settings),
    "BAGUA_TIMEOUT": (("soon", "0", "-1", "nan"), config.settings),
    "BAGUA_TLS": (("perhaps", "1"), config.settings),
    "BAGUA_TLS_CA": (("/no/file",), config.settings),
    "BAGUA_TLS_CERT": (("/no/file",), config.settings),
    "BAGUA_TLS_KEY": (("/no/file",), config.settings),
    "BAGUA_TRANSPORT": (("infiniband",), config.settings),
}
# Nothing in Bagua uses them; the functions of bagua.torch_api.env and the doctor read them.
UNUSED = {
    "BAGUA_AUTOTUNE",
    "BAGUA_AUTOTUNE_MAX_SAMPLES",
    "BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S",
    "BAGUA_AUTOTUNE_SERVER_WAIT_TIME",
    "BAGUA_AUTOTUNE_WARMUP_TIME_S",
    "BAGUA_IS_OUTPUT_AUTOTUNE_LOG",
    "BAGUA_REPORT_METRICS",
    "BAGUA_RESTART_COUNT",
    "BAGUA_SERVICE_PORT",
}


@pytest.mark.parametrize(
    ("name", "value", "read"), [(name, value, read) for name, (values, read) in REFUSED.items() for value in values]
)
def test_a_value_that_cannot_be_used_is_refused_by_the_name_of_its_variable(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, read: Callable[[], object]
) -> None:
    monkeypatch.setenv(name, value)
    for check in (read, VARIABLES[name].read):
        with pytest.raises(ValueError, match=name):
            check()


def test_every_setting_takes_any_text_or_has_values_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in set(VARIABLES) - set(REFUSED) - UNUSED:
        monkeypatch.setenv(name, "any text, -1")
        VARIABLES[name].read()
    for name in UNUSED:
        monkeypatch.setenv(name, "no number")
        with pytest.raises(ValueError, match=f"{name}='no number'"):
            VARIABLES[name].read()


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
def test_a_timeout_that_is_not_positive_is_refused(timeout: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        config.settings(timeout=timeout)


@pytest.mark.parametrize("given", ["inf", "1e23"])
def test_a_timeout_without_end_is_one_that_torch_can_count(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("BAGUA_TIMEOUT", given)
    monkeypatch.setenv("BAGUA_HEARTBEAT_TIMEOUT", given)
    read = config.settings()
    for seconds in (read.timeout, read.heartbeat_timeout, config.settings(timeout=float(given)).timeout):
        assert timedelta(seconds=seconds) == timedelta(days=36500)


def test_streams_and_algorithm_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAGUA_STREAMS_PER_PEER", "4")
    for algorithm in extension.ALGORITHMS:
        monkeypatch.setenv("BAGUA_ALGORITHM", algorithm)
        assert (config.settings().streams_per_peer, config.settings().algorithm) == (4, algorithm)


def test_flags_are_true_only_when_they_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, meaning in (("1", True), ("true", True), ("0", False), ("", False), ("off", False)):
        monkeypatch.setenv("BAGUA_REPORT_METRICS", value)
        assert config.flag("BAGUA_REPORT_METRICS") is meaning
    monkeypatch.setenv("BAGUA_REPORT_METRICS", "perhaps")
    with pytest.raises(ValueError, match="perhaps"):
        config.flag("BAGUA_REPORT_METRICS")
