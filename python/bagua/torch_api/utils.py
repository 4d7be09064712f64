"""Small tools of the original Bagua: flattening, dtype names, and averages of measurements."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import _utils

from bagua import extension

__all__ = [
    "StatisticalAverage",
    "apply_flattened_call",
    "apply_flattened_call_all",
    "average_by_removing_extreme_values",
    "check_contiguous",
    "flatten",
    "get_flattened_tensor",
    "to_bagua_datatype",
    "unflatten",
]

#: ``flatten`` makes one tensor from many of one dtype; ``unflatten`` reverses it.
flatten: Callable[[Sequence[torch.Tensor]], torch.Tensor] = _utils._flatten_dense_tensors
unflatten: Callable[[torch.Tensor, Sequence[torch.Tensor]], Sequence[torch.Tensor]] = _utils._unflatten_dense_tensors

# The original Bagua's names, such as bf16, f32, u8 and bool. It has no complex types.
_NAMES = {
    getattr(torch, name): re.sub(r"^(bf|f|u|i)[a-z]+", r"\1", name)
    for name in extension.DTYPES
    if not name.startswith("complex")
}


def to_bagua_datatype(datatype: torch.dtype) -> str:
    """Returns the short name of a dtype, such as "f32". Raises ValueError for a dtype that cannot be communicated."""
    name = _NAMES.get(datatype)
    if name is None:
        raise ValueError(f"{datatype} cannot be communicated; these can: {', '.join(map(str, _NAMES))}")
    return name


def check_contiguous(tensors: Sequence[torch.Tensor]) -> bool:
    """Returns True if each tensor begins in memory where the previous one ends."""
    end: int | None = None
    for tensor in tensors:
        # An empty tensor leaves no gap.
        if tensor.numel() == 0:
            continue
        if end is not None and tensor.data_ptr() != end:
            return False
        end = tensor.data_ptr() + tensor.numel() * tensor.element_size()
    return True


def get_flattened_tensor(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Returns a new flat tensor with the values of all tensors; None if there are none."""
    if not tensors:
        return None
    with torch.no_grad():
        return flatten([tensor.detach() for tensor in tensors])


def apply_flattened_call(bucket: Sequence[torch.Tensor], call: Callable[..., Any], extra_args: Any = None) -> None:
    """Calls ``call`` once on the flattened values of tensors of one dtype, and copies the result back."""
    with torch.no_grad():
        flat = flatten([tensor.detach() for tensor in bucket])
        call(flat, *(extra_args if extra_args is not None else ()))
        for tensor, piece in zip(bucket, unflatten(flat, bucket), strict=True):
            tensor.copy_(piece)


def apply_flattened_call_all(tensors: Sequence[torch.Tensor], call: Callable[..., Any]) -> None:
    """Calls :func:`apply_flattened_call` for each dtype, in the order of the first tensor of each dtype."""
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    for group in groups.values():
        apply_flattened_call(group, call)


def average_by_removing_extreme_values(raw_score_list: Sequence[float]) -> tuple[float, float, list[float]]:
    """Returns mean, standard deviation, and the list of values used.

    Leaves out the first third (warm-up) and values more than 2 standard deviations from the mean. Raises ValueError
    without values.
    """
    scores = torch.tensor(list(raw_score_list)[len(raw_score_list) // 3 :], dtype=torch.float64)
    if scores.numel() == 0:
        raise ValueError("no values to average")
    near = (scores - scores.mean()).abs() <= 2 * scores.std(correction=0)
    kept = scores[near]
    return float(kept.mean()), float(kept.std(correction=0)), kept.tolist()


def _now() -> float:
    return time.time()


class StatisticalAverage:
    """Means of a rate over the last 1, 2, 4, ... seconds, in a list that grows with the logarithm of time.

    ``record(v)`` reports that the rate was v since the last record. Means between two of these durations are
    interpolated linearly. ``record_tail`` is (seconds beyond the longest duration in ``records``, mean over all time).
    """

    def __init__(
        self,
        last_update_time: float | None = None,
        records: Sequence[float] | None = None,
        record_tail: tuple[float, float] = (0.0, 0.0),
        clock: Callable[[], float] = _now,
    ) -> None:
        self._clock = clock
        self.last_update_time = clock() if last_update_time is None else last_update_time
        # records[i] is the mean over the last 2**i seconds.
        self.records = list(records or ())
        self.record_tail = record_tail

    def record(self, val: float) -> None:
        """Records that the rate was ``val`` since the last record."""
        now = self._clock()
        span = now - self.last_update_time
        if span <= 0.0:
            return
        before = self.total_recording_time()
        total = before + span

        def mean(seconds: float) -> float:
            older = max(seconds - span, 0.0)
            return (val * (seconds - older) + self._mean(older) * older) / seconds

        records: list[float] = []
        while 2.0 ** len(records) <= total:
            records.append(mean(2.0 ** len(records)))
        self.record_tail = (total - _longest(records), mean(total))
        self.records, self.last_update_time = records, now

    def get(self, last_n_seconds: float) -> float:
        """Returns the mean over the last n seconds."""
        return self.get_records_mean(last_n_seconds - (self._clock() - self.last_update_time))

    def get_records_mean(self, last_n_seconds: float) -> float:
        """Returns the mean over n seconds up to the last record. n is limited to 1 and to all recorded seconds."""
        return self._mean(last_n_seconds)

    def total_recording_time(self) -> float:
        """Returns the number of seconds from the first to the last record."""
        return _longest(self.records) + self.record_tail[0]

    def _mean(self, seconds: float) -> float:
        known = [(2.0**i, mean) for i, mean in enumerate(self.records)]
        known.append((self.total_recording_time(), self.record_tail[1]))
        for (start, first), (end, last) in pairwise(known):
            if seconds <= start:
                return first
            if seconds < end:
                return first + (last - first) * (seconds - start) / (end - start)
        return known[-1][1]


def _longest(records: Sequence[float]) -> float:
    return 2.0 ** (len(records) - 1) if records else 0.0
