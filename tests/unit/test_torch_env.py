"""The environment is read at each call."""

from __future__ import annotations

import pytest

from bagua.torch_api import env

DEFAULTS = {
    "get_world_size": ("WORLD_SIZE", 1, "8", 8),
    "get_rank": ("RANK", 0, "3", 3),
    "get_local_rank": ("LOCAL_RANK", 0, "2", 2),
    "get_local_size": ("LOCAL_WORLD_SIZE", 1, "4", 4),
    "get_node_rank": ("NODE_RANK", 0, "5", 5),
    "get_default_bucket_size": ("BAGUA_DEFAULT_BUCKET_SIZE", 10 * 1024**2, "4096", 4096),
    "get_master_addr": ("MASTER_ADDR", "127.0.0.1", "10.0.0.1", "10.0.0.1"),
    "get_bagua_service_port": ("BAGUA_SERVICE_PORT", -1, "29501", 29501),
    "is_report_metrics_switch_on": ("BAGUA_REPORT_METRICS", False, "1", True),
    "get_autotune_level": ("BAGUA_AUTOTUNE", 0, "1", 1),
    "get_autotune_max_samples": ("BAGUA_AUTOTUNE_MAX_SAMPLES", 60, "7", 7),
    "get_autotune_sampling_confidence_time_s": ("BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S", 5.0, "2.5", 2.5),
    "get_autotune_warmup_time_s": ("BAGUA_AUTOTUNE_WARMUP_TIME_S", 30.0, "1", 1.0),
    "get_is_output_autotune_log": ("BAGUA_IS_OUTPUT_AUTOTUNE_LOG", False, "1", True),
    "get_autotune_server_wait_time": ("BAGUA_AUTOTUNE_SERVER_WAIT_TIME", 300, "60", 60),
}


@pytest.mark.parametrize("function", DEFAULTS)
def test_a_variable_is_read_at_each_call(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variable, default, text, value = DEFAULTS[function]
    for name in (variable, "GROUP_RANK"):
        monkeypatch.delenv(name, raising=False)
    read = getattr(env, function)
    assert read() == default
    monkeypatch.setenv(variable, text)
    assert read() == value


def test_a_flag_of_zero_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAGUA_IS_OUTPUT_AUTOTUNE_LOG", "0")
    assert env.get_is_output_autotune_log() is False


def test_the_node_is_torchruns_group_where_torchrun_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODE_RANK", "1")
    monkeypatch.setenv("GROUP_RANK", "2")
    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert env.get_node_rank() == 1
    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    assert env.get_node_rank() == 2
