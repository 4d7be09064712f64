"""The weight of a rank in an average."""

from __future__ import annotations

import math


def checked_weight(weight: object) -> float:
    """Returns a weight as a float. Raises TypeError if it is not a number, and ValueError unless it is finite and not
    negative.
    """
    if isinstance(weight, (str, bytes)) or not hasattr(weight, "__float__"):
        raise TypeError(f"weight must be a number, not {type(weight).__name__}")
    found = float(weight)
    if not 0 <= found < math.inf:
        raise ValueError(f"weight must be finite and not negative, not {found}")
    return found
