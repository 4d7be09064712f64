"""CUDA: reports whether this process can use it, and what is installed. The verbs of `bagua` take arrays on its
devices.

    import bagua.cuda

    print(bagua.cuda.why_not() or bagua.cuda.info()["devices"])

`python -m bagua.cuda` prints `info()`. Importing this module loads neither CUDA's libraries nor torch. The driver,
NVRTC and NCCL are searched at their first use, and the result is kept until the process ends. A child that is forked
after the import cannot use CUDA.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

from bagua import config, process_state

__all__ = ["info", "is_available", "why_not"]

_LIBRARIES = process_state.cuda_libraries()


def is_available() -> bool:
    """Returns True if the driver works and has a device, that is if `why_not()` returns None."""
    return why_not() is None


def why_not() -> str | None:
    """Returns the reason why CUDA cannot be used, in one line; None if it can.

    The line names the library and the error of the loader or driver, such as "libcuda (/usr/lib/libcuda.so.1): cuInit
    failed: CUDA_ERROR_NO_DEVICE (100)". The first call initialises the driver, which may take seconds. Later calls
    return the same result.
    """
    return _LIBRARIES.why_not(config.cuda_places())


def info() -> dict[str, Any]:
    """Returns a description of CUDA's libraries and devices, as a dict for JSON. Absent parts are None or empty. Never
    raises.

    - `driver`: `path`; `version`, the newest CUDA version that it supports ("13.0"); `error`, which is `why_not()`
    - `nvrtc`: `path`, `version` ("13.2") and `architectures`, the compute capabilities times ten that it compiles for
    - `nccl`: `path` and `version` ("2.30.7")
    - `devices`, a list: `name`, `capability` ("9.0"), `memory` in bytes, `uuid`
    - `cache`: the folder for compiled kernels, which need not exist
    """
    report = _LIBRARIES.report(config.cuda_places())
    return {
        "driver": report["driver"],
        "nvrtc": {key: report["nvrtc"][key] for key in ("path", "version", "architectures")},
        "nccl": {key: report["nccl"][key] for key in ("path", "version")},
        "devices": [_device(**device) for device in report["devices"]],
        "cache": config.cuda_cache(),
    }


def _device(
    name: str | None, capability: tuple[int, int] | None, memory: int | None, uuid: bytes | None
) -> dict[str, Any]:
    return {
        "name": name,
        "capability": None if capability is None else f"{capability[0]}.{capability[1]}",
        "memory": memory,
        "uuid": None if uuid is None else str(UUID(bytes=uuid)),
    }
