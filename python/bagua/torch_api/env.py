"""What the launcher says about this process and the job, read at every call; and the variables of the original."""

from __future__ import annotations

import socket

from bagua import config, launcher


def get_world_size() -> int:
    """Ranks of the job (``WORLD_SIZE``, or the variable of another launcher)."""
    return launcher.found().world_size or 1


def get_rank() -> int:
    """This process's rank (``RANK``, or the variable of another launcher)."""
    return launcher.found().rank or 0


def get_local_rank() -> int:
    """This process's rank on its host (``LOCAL_RANK``, or the variable of another launcher)."""
    return launcher.found().local_rank or 0


def get_local_size() -> int:
    """Ranks on this host (``LOCAL_WORLD_SIZE``, or OpenMPI's variable). Where no launcher says, 1 until the job is
    joined.
    """
    return launcher.found().local_world_size or 1


def get_node_rank() -> int:
    """Which host of the job this is: ``GROUP_RANK`` where torchrun set all of its variables, else ``NODE_RANK``."""
    return launcher.found().node_rank or 0


def get_default_bucket_size() -> int:
    """Bytes of a bucket (``BAGUA_DEFAULT_BUCKET_SIZE``)."""
    return config.default_bucket_size()


def get_master_addr() -> str:
    """Where rank 0 can be reached (``MASTER_ADDR``, or the first host of a Slurm step)."""
    return launcher.known_master()[0] or "127.0.0.1"


def get_bagua_service_port() -> int:
    """Port of the tuning service (``BAGUA_SERVICE_PORT``); 0 or less: any."""
    return config.service_port()


def is_report_metrics_switch_on() -> bool:
    """``BAGUA_REPORT_METRICS``."""
    return config.report_metrics()


def get_autotune_level() -> int:
    """0: no tuning (``BAGUA_AUTOTUNE``)."""
    return config.autotune_level()


def get_autotune_max_samples() -> int:
    """``BAGUA_AUTOTUNE_MAX_SAMPLES``."""
    return config.autotune_max_samples()


def get_autotune_sampling_confidence_time_s() -> float:
    """``BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S``."""
    return config.autotune_sampling_confidence_time()


def get_autotune_warmup_time_s() -> float:
    """``BAGUA_AUTOTUNE_WARMUP_TIME_S``."""
    return config.autotune_warmup_time()


def get_is_output_autotune_log() -> bool:
    """``BAGUA_IS_OUTPUT_AUTOTUNE_LOG``; "0" means no."""
    return config.autotune_log()


def get_autotune_server_wait_time() -> int:
    """Seconds, at least 30 (``BAGUA_AUTOTUNE_SERVER_WAIT_TIME``)."""
    return max(30, config.autotune_server_wait_time())


def find_free_network_port() -> int:
    """A port that was free a moment ago. Another process may take it first: where that matters, bind port 0."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
