"""Compiles the device kernels in advance, without a driver. Otherwise each kernel is compiled at its first use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from bagua import config, process_state
from bagua.errors import BaguaError
from bagua.extension import CUDA_ARCHITECTURES, CUDA_KERNELS

__all__ = ["compile_to"]


def compile_to(folder: str | Path, architectures: Sequence[int] | None = None) -> Iterator[Path]:
    """Writes NAME.sm_X.ptx and NAME.sm_X.cubin of every program to a folder. Yields each path after it is written.

    `architectures` are compute capabilities times ten, such as 90 for 9.0. None means those of 70, 75, 80, 86, 89, 90,
    100 and 120 that NVRTC supports. The folder is created if it does not exist. Each program takes seconds to compile.

    Raises BaguaError without NVRTC or for an architecture that it does not support, and OSError if a file cannot be
    written.
    """
    libraries, places = process_state.cuda_libraries(), config.cuda_places()
    nvrtc = libraries.report(places)["nvrtc"]
    if nvrtc["error"] is not None:
        raise BaguaError(f"the kernels cannot be compiled: {nvrtc['error']}")
    known = nvrtc["architectures"]
    unknown = sorted(set(architectures or ()) - set(known))
    if unknown:
        raise BaguaError(
            f"NVRTC {nvrtc['version']} ({nvrtc['path']}) does not know {unknown}; it knows {sorted(known)}"
        )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for architecture in [it for it in CUDA_ARCHITECTURES if it in known] if architectures is None else architectures:
        for program in CUDA_KERNELS:
            ptx, cubin, _ = libraries.compile(places, program, architecture)
            for ending, data in (("ptx", ptx), ("cubin", cubin)):
                path = folder / f"{program}.sm_{architecture}.{ending}"
                path.write_bytes(data)
                yield path
