"""Values for tests of the cache, and when two are the same."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import torch

Point = namedtuple("Point", "x y")


def same(one: Any, two: Any) -> bool:
    """Equal in type and value, all the way down; NaN equals NaN."""
    if type(one) is not type(two):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == two.dtype and one.shape == two.shape and one.numpy(force=True).tobytes() == bits(two)
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == two.dtype and one.shape == two.shape and one.tobytes() == two.tobytes()
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, dict):
        return list(one) == list(two) and all(same(one[key], two[key]) for key in one)
    return bool(one == two) or one != one


def bits(tensor: Any) -> bytes:
    return bytes(tensor.numpy(force=True).tobytes())
