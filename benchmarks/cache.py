"""Compares reading samples from the cache with redis-py used directly and with computing the samples again.

Every method reads the same values from the same server in the same process; the methods alternate, and the fastest part
counts. A single value is compared with redis-py's ``get``, a batch with its ``mget``. redis-py is measured twice: with
raw bytes as its result, and with the least work that makes a writable sample of them, its type and shape known
beforehand. The cache's samples are checked, and have the type with which they were stored. Needs ``redis-server`` and
``pip install "redis[hiredis]>=5.3" "xxhash>=3" "msgpack>=1"``.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import redis
import torch
from common import add_output_options, pyplot, save_if_asked

from bagua.torch_api.contrib import CacheLoader
from bagua.torch_api.contrib.utils.redis_server import RedisServer, new_password

BYTES = 4096
FILLING, AGAIN = "filling the cache", "computing again"
#: The peers of each of our methods: redis-py with raw bytes, and with samples.
PEERS = {
    "CacheLoader.get, array": ("redis-py get, bytes", "redis-py get, array"),
    "CacheLoader.get_many, arrays": ("redis-py mget, bytes", "redis-py mget, arrays"),
    "CacheLoader.get_many, tensors": ("redis-py mget, bytes", "redis-py mget, tensors"),
}


def compute(key: int) -> np.ndarray[Any, Any]:
    """A sample of 4 KiB from 64 rounds of hashing, about the work of decoding a small file."""
    rounds = hashlib.pbkdf2_hmac("sha256", str(key).encode(), b"sample", 64, BYTES)
    return np.frombuffer(rounds, dtype=np.uint8).copy()


def measure(samples: int, batch: int, repeats: int) -> dict[str, float]:
    """Samples per second of each method."""
    server = RedisServer("127.0.0.1", 4 << 30, password=new_password())
    host: dict[str, Any] = {"host": server.host, "port": server.port, "password": server.password}
    loader = CacheLoader("redis", "benchmark", batch, hosts=[host])
    tensors = CacheLoader("redis", "tensors", batch, hosts=[host])
    # A part of the samples is stored a second time, as tensors.
    part = max(samples // 5, batch)
    begun = time.perf_counter()
    for keys in batches(range(samples), batch):
        loader.get_many(keys, lambda key: np.full(BYTES, key % 251, dtype=np.uint8))
    loader.flush()
    filled = samples / (time.perf_counter() - begun)
    for keys in batches(range(part), batch):
        tensors.get_many(keys, lambda key: torch.full((BYTES // 4,), float(key % 251)))
    tensors.flush()
    assert loader.num_keys() == samples + part
    direct: Any = redis.Redis(**host)
    # The cache writes a header before the content.
    header = len(direct.get("benchmark_7")) - BYTES
    header_of_tensors = len(direct.get("tensors_7")) - BYTES

    def never(key: int) -> Any:
        raise AssertionError(f"sample {key} was not in the cache")

    def check(key: int, sample: Any, length: int = BYTES) -> None:
        assert sample[0] == key % 251
        assert len(sample) == length

    def ours_one(keys: range) -> None:
        for key in keys:
            check(key, loader.get(key, never))

    def ours_many(keys: range) -> None:
        for key, sample in zip(keys, loader.get_many(keys, never), strict=True):
            check(key, sample)

    def ours_tensors(keys: range) -> None:
        for sample in tensors.get_many(keys, never):
            assert len(sample) == BYTES // 4

    def redis_one(keys: range) -> None:
        for key in keys:
            assert direct.get(f"benchmark_{key}")[header] == key % 251

    def redis_one_array(keys: range) -> None:
        for key in keys:
            check(key, np.frombuffer(bytearray(direct.get(f"benchmark_{key}")), dtype=np.uint8, offset=header))

    def redis_many(keys: range) -> None:
        for key, value in zip(keys, direct.mget([f"benchmark_{key}" for key in keys]), strict=True):
            assert value[header] == key % 251

    def redis_many_arrays(keys: range) -> None:
        for key, value in zip(keys, direct.mget([f"benchmark_{key}" for key in keys]), strict=True):
            check(key, np.frombuffer(bytearray(value), dtype=np.uint8, offset=header))

    def redis_many_tensors(keys: range) -> None:
        for value in direct.mget([f"tensors_{key}" for key in keys]):
            # A copy, or the numbers would lie at odd addresses.
            content = bytearray(memoryview(value)[header_of_tensors:])
            assert len(torch.frombuffer(content, dtype=torch.float32)) == BYTES // 4

    def again(keys: range) -> None:
        for key in keys:
            assert len(compute(key)) == BYTES

    for key, sample in enumerate(tensors.get_many(range(batch), never)):
        check(key, sample, BYTES // 4)
    rates = {FILLING: filled}
    ways: dict[str, tuple[Callable[[range], None], int]] = {
        "redis-py get, bytes": (redis_one, samples),
        "redis-py get, array": (redis_one_array, samples),
        "CacheLoader.get, array": (ours_one, samples),
        "redis-py mget, bytes": (redis_many, samples),
        "redis-py mget, arrays": (redis_many_arrays, samples),
        "CacheLoader.get_many, arrays": (ours_many, samples),
        "redis-py mget, tensors": (redis_many_tensors, part),
        "CacheLoader.get_many, tensors": (ours_tensors, part),
        AGAIN: (again, min(samples, 2000)),
    }
    for _ in range(2):
        for name, (work, count) in ways.items():
            rates[name] = max(rates.get(name, 0.0), fastest(work, count, repeats, batch))
    direct.close()
    loader.close()
    tensors.close()
    server.stop()
    return rates


def batches(keys: range, batch: int) -> list[range]:
    """The keys in batches of this length."""
    return [keys[start : start + batch] for start in range(0, len(keys), batch)]


def fastest(work: Callable[[range], None], samples: int, repeats: int, batch: int) -> float:
    """Samples per second on the fastest of several parts of the samples."""
    best = 0.0
    part = samples // repeats
    for repeat in range(repeats):
        keys = batches(range(repeat * part, (repeat + 1) * part), batch)
        begun = time.perf_counter()
        for few in keys:
            work(few)
        best = max(best, part / (time.perf_counter() - begun))
    return best


def plot(rates: dict[str, float], path: Path, title: str) -> None:
    """A bar per method."""
    if (plt := pyplot("svg")) is None:
        return

    names = [name for name in rates if name != FILLING][::-1]
    colours = ["tab:orange" if name.startswith("CacheLoader") else "tab:blue" for name in names]
    figure, axes = plt.subplots(figsize=(8, 3.5), layout="constrained")
    bars = axes.barh(names, [rates[name] / 1000 for name in names], color=colours)
    axes.bar_label(bars, fmt="%.1f")
    axes.set_xlabel("thousand samples per second")
    axes.set_title(title)
    # Without the date, so that a file changes only with its figures.
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    """Prints the table, and saves it if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    add_output_options(parser)
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.samples, chosen.repeats = 640, 2
    torch.set_num_threads(1)
    rates = measure(chosen.samples, chosen.batch, chosen.repeats)
    reader = "hiredis" if redis.utils.HIREDIS_AVAILABLE else "its own reader in Python"
    print(f"{chosen.samples} samples of 4 KiB, {chosen.batch} in a batch; redis-py {redis.__version__} with {reader}\n")
    print("| way | samples/s | x redis-py, bytes | x redis-py, decoded | x computing again |\n|---|---|---|---|---|")
    rows = []
    for name, rate in rates.items():
        peers = PEERS.get(name, ())
        ratios = [rate / rates[peer] if peer else None for peer in peers] or [None, None]
        cells = ["" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
        print(f"| {name} | {rate:.0f} | {' | '.join(cells)} | {rate / rates[AGAIN]:.1f} |")
        rows.append(
            {"samples": chosen.samples, "batch": chosen.batch, "reader": reader, "way": name}
            | {"samples_per_second": round(rate), "of_bytes": cells[0], "of_decoded": cells[1]}
        )
    for path in save_if_asked(chosen, "cache", rows):
        plot(
            rates, path.with_suffix(".svg"), f"{chosen.samples} samples of 4 KiB from one Redis server on this machine"
        )


if __name__ == "__main__":
    main()
