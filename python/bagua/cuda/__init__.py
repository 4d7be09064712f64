"""CUDA: whether this process can use it, and what there is. The verbs of `bagua` take arrays on its devices.

    import bagua.cuda

    print(bagua.cuda.why_not() or bagua.cuda.info()["devices"])

`python -m bagua.cuda` prints `info()`; `python -m bagua.cuda compile --out DIR` compiles the kernels. Importing this
loads no library, and no torch. The driver, NVRTC and NCCL are looked for at their first use; what was found, or why it
was not, holds until the process ends. A child that is forked after the import has no CUDA.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

from bagua import config, lifecycle

__all__ = ["info", "is_available", "why_not"]

_LIBRARIES = lifecycle.cuda_libraries()


def is_available() -> bool:
    """Whether the driver works and has a device: `why_not() is None`."""
    return why_not() is None


def why_not() -> str | None:
    """Why there is no device that can be used, in one line, the same at each call; None when there is one.

    The line names the library and what the loader or the driver said, such as "libcuda (/usr/lib/libcuda.so.1): cuInit
    failed: CUDA_ERROR_NO_DEVICE (100)". The first call initialises the driver, which may take seconds.
    """
    return _LIBRARIES.why_not(config.cuda_places())


def info() -> dict[str, Any]:
    """What there is of CUDA, as a dict that JSON can hold; what is absent is None or empty. Never raises.

    - `driver`: `path`; `version`, the newest CUDA that it serves ("13.0"); `error`, which is `why_not()`
    - `nvrtc`: `path`, `version` ("13.2") and `architectures`, those that it compiles for (90: compute capability 9.0)
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
