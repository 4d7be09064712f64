"""Codecs through `bagua.Codec` in one thread, against a copy; minmax_u8 also against the same formula in eager torch.

    python benchmarks/codec.py                   # 10 MiB of float32

Every round times every call once, in another order. Torch writes into tensors that exist already, as our calls do.
Ratios are of medians: `copy/time` is the speed as a multiple of that of a copy of the elements, `torch/time` as a
multiple of torch's.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from common import add_output_options, parse_size, save_if_asked

import bagua
from bagua import extension

CODECS: dict[str, tuple[str, dict[str, int]]] = {name: (name, {}) for name in extension.CODECS}
CODECS["top_k chunk=4096"] = ("top_k", {"k": 64, "chunk": 4096, "bits": 2})


class Eager:
    """minmax_u8 in torch, operation by operation."""

    def __init__(self, x: torch.Tensor) -> None:
        self._x, self._work, self._q = x, torch.empty_like(x), torch.empty(x.shape, dtype=torch.uint8)
        self._back = torch.empty_like(x)

    def _levels(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        low, high = torch.aminmax(self._x)
        scale = 255.0 / (high - low + 1e-7)
        upper = torch.round(high * scale)
        return scale, upper, upper - 255.0

    def encode(self) -> torch.Tensor:
        scale, upper, lower = self._levels()
        self._scale, self._lower = scale, lower
        level = torch.mul(self._x, scale, out=self._work).round_()
        self._q.copy_(level.clamp_(max=upper).sub_(lower).clamp_(0.0, 255.0))
        return self._q

    def decode(self) -> torch.Tensor:
        self._back.copy_(self._q)
        return self._back.add_(self._lower).div_(self._scale)


def measure(size: int, rounds: int) -> list[dict[str, Any]]:
    """A row for each codec and direction."""
    torch.set_num_threads(1)
    x = np.random.default_rng(0).normal(size=size // 4).astype(np.float32)
    copy, eager = np.empty_like(x), Eager(torch.from_numpy(x))
    calls: dict[tuple[str, str], Callable[[], Any]] = {
        ("copy", "encode"): lambda: np.copyto(copy, x),
        ("torch", "encode"): eager.encode,
        ("torch", "decode"): eager.decode,
    }
    for name, (kind, options) in CODECS.items():
        codec, back = bagua.Codec(kind, **options), np.empty_like(x)
        data = np.empty(codec.encoded_bytes(x.size), np.uint8)
        calls[name, "encode"] = lambda codec=codec, data=data: codec.encode(x, out=data)  # type: ignore[misc]
        calls[name, "decode"] = lambda codec=codec, data=data, back=back: codec.decode(data, back)  # type: ignore[misc]
    results = {call: run() for call, run in calls.items()}
    check(x, results)
    times: dict[tuple[str, str], list[float]] = {call: [] for call in calls}
    for _ in range(rounds):
        for call in random.sample(list(calls), len(calls)):
            begun = time.perf_counter()
            calls[call]()
            times[call].append(time.perf_counter() - begun)
    median = {call: statistics.median(taken) for call, taken in times.items()}
    rows = []
    for (name, what), taken in median.items():
        rows.append({"codec": name, "call": what, "bytes": size, "seconds": taken})
        rows[-1]["copy/time"] = median["copy", "encode"] / taken
        rows[-1]["torch/time"] = median["torch", what] / taken if name == "minmax_u8" else ""
    return rows


def check(x: np.ndarray[Any, Any], results: dict[tuple[str, str], Any]) -> None:
    """Torch and the codec agree on every byte, but for what a fused or another division rounds."""
    ours = results["minmax_u8", "encode"][32 : 32 + x.size].astype(int)
    off = np.abs(ours - results["torch", "encode"].numpy().astype(int))
    if off.max() > 1 or (off > 0).mean() > 1e-4:
        raise AssertionError(f"torch has other levels in {(off > 0).mean():.2%} of the elements")
    for name in ("minmax_u8", "f16", "bf16", "block_i8"):
        error = np.abs(results[name, "decode"] - x).max()
        if not 0 < error < 0.1:
            raise AssertionError(f"{name} is off by {error}")


def main() -> None:
    """Prints a line of CSV for each codec and call, and saves them if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=parse_size, default="10MiB", help="bytes of float32")
    add_output_options(parser)
    args = parser.parse_args()
    rows = measure(1 << 20 if args.quick else args.size, 5 if args.quick else 41)
    print(",".join(rows[0]))
    for row in rows:
        print(",".join(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()))
    save_if_asked(args, "codec", rows)


if __name__ == "__main__":
    main()
