"""This process's place in the job, from the launcher's variables at each call, and the original Bagua's variables."""

from __future__ import annotations

import socket

from bagua import config, launcher


def get_world_size() -> int:
    """Returns the number of ranks in the job (``WORLD_SIZE``, or another launcher's variable)."""
    return launcher.found().world_size or 1


def get_rank() -> int:
    """Returns this process's rank (``RANK``, or another launcher's variable)."""
    return launcher.found().rank or 0


def get_local_rank() -> int:
    """Returns this process's rank on its host (``LOCAL_RANK``, or another launcher's variable)."""
    return launcher.found().local_rank or 0


def get_local_size() -> int:
    """Returns the number of ranks on this host (``LOCAL_WORLD_SIZE``, or OpenMPI's variable).

    If no launcher sets it, returns 1 until the job is joined.
    """
    return launcher.found().local_world_size or 1


def get_node_rank() -> int:
    """Returns the number of this host in the job: ``GROUP_RANK`` under torchrun, else ``NODE_RANK``."""
    return launcher.found().node_rank or 0


def get_default_bucket_size() -> int:
    """Returns the size of a bucket in bytes (``BAGUA_DEFAULT_BUCKET_SIZE``)."""
    return config.default_bucket_size()


def get_master_addr() -> str:
    """Returns the address of rank 0 (``MASTER_ADDR``, or the first host of a Slurm step)."""
    return launcher.known_master()[0] or "127.0.0.1"


def get_bagua_service_port() -> int:
    """Returns the port of the tuning service (``BAGUA_SERVICE_PORT``); 0 or less means any."""
    return config.service_port()


def is_report_metrics_switch_on() -> bool:
    """Returns ``BAGUA_REPORT_METRICS``."""
    return config.report_metrics()


def get_autotune_level() -> int:
    """Returns ``BAGUA_AUTOTUNE``; 0 means no tuning."""
    return config.autotune_level()


def get_autotune_max_samples() -> int:
    """Returns ``BAGUA_AUTOTUNE_MAX_SAMPLES``."""
    return config.autotune_max_samples()


def get_autotune_sampling_confidence_time_s() -> float:
    """Returns ``BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S``."""
    return config.autotune_sampling_confidence_time()


def get_autotune_warmup_time_s() -> float:
    """Returns ``BAGUA_AUTOTUNE_WARMUP_TIME_S``."""
    return config.autotune_warmup_time()


def get_is_output_autotune_log() -> bool:
    """Returns ``BAGUA_IS_OUTPUT_AUTOTUNE_LOG``; "0" means False."""
    return config.autotune_log()


def get_autotune_server_wait_time() -> int:
    """Returns ``BAGUA_AUTOTUNE_SERVER_WAIT_TIME`` in seconds, at least 30."""
    return max(30, config.autotune_server_wait_time())


def find_free_network_port() -> int:
    """Returns a port that was free a moment ago. Another process may take it first; to be safe, bind port 0 instead."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
