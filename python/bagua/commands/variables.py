"""Every BAGUA_ variable with its default and what makes a value unusable: docs/configuration.md as a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from bagua import config
from bagua.engine import ALGORITHMS, MAX_STREAMS

__all__ = ["SECRET", "VARIABLES", "Variable"]

#: Whose value is not shown.
SECRET = "BAGUA_JOB_SECRET"

_Check = Callable[[str], None]


class Variable(NamedTuple):
    """One variable."""

    #: What holds where it is not set; None: nothing.
    default: str | None
    #: Raises ValueError for a value that cannot be used.
    check: _Check


def _any(name: str) -> None:
    """Every text can be used."""


def _flag(name: str) -> None:
    config.flag(name)


def _integer(least: int | None = None, most: int | None = None) -> _Check:
    def check(name: str) -> None:
        value = config.integer(name, 0)
        if (least is not None and value < least) or (most is not None and value > most):
            raise ValueError(
                f"{name} is {value}; it must be " + (f"from {least} to {most}" if most else f"{least} or more")
            )

    return check


def _number(name: str) -> None:
    config.number(name, 0.0)


def _seconds(name: str) -> None:
    value = config.number(name, 1.0)
    if not value > 0:
        raise ValueError(f"{name} is {value} s; it must be positive")


def _one_of(*choices: str) -> _Check:
    def check(name: str) -> None:
        value = config.text(name)
        if value not in choices:
            raise ValueError(f"{name}={value!r} is none of {', '.join(choices)}")

    return check


def _book(name: str) -> None:
    value = config.text(name) or ""
    if not value.startswith(("tcp://", "file:///")):
        raise ValueError(f"{name}={value!r} is neither tcp://host:port nor file:///directory")


def _tls(name: str) -> None:
    """The four variables make sense together only."""
    config.settings()


VARIABLES: dict[str, Variable] = {
    "BAGUA_ALGORITHM": Variable("auto", _one_of(*ALGORITHMS)),
    "BAGUA_AUTOTUNE": Variable("0", _integer()),
    "BAGUA_AUTOTUNE_MAX_SAMPLES": Variable("60", _integer()),
    "BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S": Variable("5.0", _seconds),
    "BAGUA_AUTOTUNE_SERVER_WAIT_TIME": Variable("300", _integer()),
    "BAGUA_AUTOTUNE_WARMUP_TIME_S": Variable("30.0", _number),
    "BAGUA_CUDA_CHECK": Variable("0", _flag),
    "BAGUA_CUDA_COLLECTIVE": Variable("auto", _one_of("auto", "nccl", "staged")),
    "BAGUA_DEFAULT_BUCKET_SIZE": Variable("10485760", _integer(1)),
    "BAGUA_ELASTIC": Variable(None, _book),
    "BAGUA_HEARTBEAT_TIMEOUT": Variable("5", _seconds),
    "BAGUA_HOST_ID": Variable(None, _any),
    "BAGUA_IS_OUTPUT_AUTOTUNE_LOG": Variable("0", _flag),
    "BAGUA_JOB_SECRET": Variable(None, _any),
    "BAGUA_LIBCUDA": Variable(None, _any),
    "BAGUA_LIBNCCL": Variable(None, _any),
    "BAGUA_LIBNVRTC": Variable(None, _any),
    "BAGUA_METRICS_ADDR": Variable("127.0.0.1", _any),
    "BAGUA_METRICS_PORT": Variable(None, _integer(1, 65535)),
    "BAGUA_NET_IMPLEMENT": Variable(None, _any),
    "BAGUA_NODE_DOMAIN_NAMES": Variable(None, _any),
    "BAGUA_REPORT_METRICS": Variable("0", _flag),
    "BAGUA_RESTART_COUNT": Variable(None, _integer()),
    "BAGUA_SERVICE_PORT": Variable("-1", _integer()),
    "BAGUA_SSH_PORT": Variable(None, _integer(1, 65535)),
    "BAGUA_STREAMS_PER_PEER": Variable("2", _integer(1, MAX_STREAMS)),
    "BAGUA_TIMEOUT": Variable("300", _seconds),
    "BAGUA_TLS": Variable("0", _tls),
    "BAGUA_TLS_CA": Variable(None, _tls),
    "BAGUA_TLS_CERT": Variable(None, _tls),
    "BAGUA_TLS_KEY": Variable(None, _tls),
    "BAGUA_TRACE_DIR": Variable(config.default_trace_dir(), _any),
    "BAGUA_TRANSPORT": Variable("auto", _one_of("auto", "tcp")),
}
