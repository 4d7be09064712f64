"""Ranks with torch on device 0."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bagua import torch_api


@contextmanager
def joined() -> Iterator[None]:
    """The process group of all ranks, and device 0 as torch's current one."""
    torch.cuda.set_device(0)
    torch_api.init_process_group()
    yield
    # Not after an exception: the end of the process reports that to the other ranks.
    torch_api.destroy_process_group()


@contextmanager
def in_torch() -> Iterator[dict[str, Any]]:
    """The setup of a scenario in the process group of all ranks; for `tests.cuda.ranks.on_ranks`."""
    with joined():
        yield {}
