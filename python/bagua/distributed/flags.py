"""The flags that the original's launchers have besides torchrun's, and the variables that they set for the ranks."""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

__all__ = ["FLAGS", "add", "both", "given", "variables", "warning"]


class Flag(NamedTuple):
    """One flag and its variable."""

    name: str
    variable: str
    #: Of its value; None for a flag without one.
    type: type | None
    #: What the variable becomes by a flag without a value.
    value: str
    #: Whether something in Bagua depends on the variable.
    works: bool
    help: str


FLAGS = (
    Flag("default_bucket_size", "BAGUA_DEFAULT_BUCKET_SIZE", int, "", True, "bytes of a gradient bucket"),
    Flag("bagua_service_port", "BAGUA_SERVICE_PORT", int, "", False, "port of the tuning service"),
    Flag("autotune_level", "BAGUA_AUTOTUNE", int, "", False, "level of tuning"),
    Flag("autotune_max_samples", "BAGUA_AUTOTUNE_MAX_SAMPLES", int, "", False, "samples of the tuning"),
    Flag(
        "autotune_sampling_confidence_time",
        "BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S",
        float,
        "",
        False,
        "seconds of one sample of the tuning",
    ),
    Flag("autotune_warmup_time", "BAGUA_AUTOTUNE_WARMUP_TIME_S", float, "", False, "seconds before the tuning"),
    Flag("is_output_autotune_log", "BAGUA_IS_OUTPUT_AUTOTUNE_LOG", None, "1", False, "log the tuning"),
    Flag("report_metrics", "BAGUA_REPORT_METRICS", None, "1", False, "report to the tuning service"),
    Flag("enable_bagua_net", "BAGUA_NET_IMPLEMENT", None, "BASIC", False, "bagua-net below NCCL"),
)


def both(name: str) -> tuple[str, ...]:
    """--name with dashes and with underscores."""
    spellings = (f"--{name.replace('_', '-')}", f"--{name.replace('-', '_')}")
    return tuple(dict.fromkeys(spellings))


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the flags to a parser."""
    for flag in FLAGS:
        text = flag.help if flag.works else f"{flag.help}; sets {flag.variable}, which has no effect"
        options: dict[str, Any] = {"action": "store_true"} if flag.type is None else {"type": flag.type}
        parser.add_argument(*both(flag.name), help=text, **options)


def given(options: argparse.Namespace) -> list[tuple[Flag, str]]:
    """The flags that were given, with the values of their variables."""
    found = []
    for flag in FLAGS:
        value = getattr(options, flag.name)
        if flag.type is not None and value is not None:
            found.append((flag, str(value)))
        elif flag.type is None and value:
            found.append((flag, flag.value))
    return found


def variables(options: argparse.Namespace) -> dict[str, str]:
    """What the ranks get in their environment."""
    found = {flag.variable: value for flag, value in given(options)}
    if (options.autotune_level or 0) > 0:
        # Where the original's ranks sent their spans.
        found["AUTO_TUNE_SERVER_ADDR"] = f"{options.master_addr}:{options.bagua_service_port or 29501}"
    return found


def warning(options: argparse.Namespace) -> str:
    """What to say about flags without effect; "" where none was given."""
    idle = [f"--{flag.name} ({flag.variable})" for flag, _ in given(options) if not flag.works]
    if not idle:
        return ""
    return f"{', '.join(idle)}: set for the ranks, but without effect; there is no tuning service and no bagua-net here"
