"""Reads samples from the cache, against redis-py used directly and against computing them again.

Everybody reads the same values from the same server in the same process, one after another in turns, and the fastest
turn counts. redis-py gives raw bytes; the cache gives samples that were checked and unpacked, and one more row is
redis-py with the least that makes a sample of its bytes. Needs ``redis-server`` and ``pip install bagua[cache]``.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import hashlib
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import redis

from bagua.torch_api.contrib import CacheLoader
from bagua.torch_api.contrib.utils.redis_server import RedisServer, new_password

RECORD = Path(__file__).parent / "record"
BYTES = 4096


def compute(key: int) -> np.ndarray[Any, Any]:
    """A sample that takes some work: 4 KiB from 64 rounds of hashing, as decoding a small file might cost."""
    rounds = hashlib.pbkdf2_hmac("sha256", str(key).encode(), b"sample", 64, BYTES)
    return np.frombuffer(rounds, dtype=np.uint8).copy()


def turns(work: Callable[[range], None], samples: int, repeats: int, chunk: int) -> float:
    """Samples per second of the fastest of several turns, each over its own part of the samples."""
    best = 0.0
    part = samples // repeats
    for repeat in range(repeats):
        keys = range(repeat * part, (repeat + 1) * part)
        begun = time.perf_counter()
        for start in range(keys.start, keys.stop, chunk):
            work(range(start, min(start + chunk, keys.stop)))
        best = max(best, part / (time.perf_counter() - begun))
    return best


def measure(samples: int, batch: int, repeats: int) -> dict[str, float]:
    """Samples per second of each way to get a sample."""
    server = RedisServer("127.0.0.1", 4 << 30, password=new_password())
    host: dict[str, Any] = {"host": server.host, "port": server.port, "password": server.password}
    loader = CacheLoader("redis", "benchmark", batch, hosts=[host])
    begun = time.perf_counter()
    for start in range(0, samples, batch):
        loader.get_many(
            range(start, min(start + batch, samples)), lambda key: np.full(BYTES, key % 251, dtype=np.uint8)
        )
    loader.flush()
    filled = samples / (time.perf_counter() - begun)
    direct: Any = redis.Redis(**host)
    raw = direct.get("benchmark_7")
    header = len(raw) - BYTES
    assert loader.num_keys() == samples

    def never(key: int) -> Any:
        raise AssertionError(f"sample {key} was not in the cache")

    def check(key: int, sample: np.ndarray[Any, Any]) -> None:
        assert sample[0] == key % 251
        assert len(sample) == BYTES

    def ours_one(keys: range) -> None:
        for key in keys:
            check(key, loader.get(key, never))

    def ours_many(keys: range) -> None:
        for key, sample in zip(keys, loader.get_many(keys, never), strict=True):
            check(key, sample)

    def redis_one(keys: range) -> None:
        for key in keys:
            assert direct.get(f"benchmark_{key}")[header] == key % 251

    def redis_many(keys: range) -> None:
        for key, value in zip(keys, direct.mget([f"benchmark_{key}" for key in keys]), strict=True):
            assert value[header] == key % 251

    def redis_unpacked(keys: range) -> None:
        for key, value in zip(keys, direct.mget([f"benchmark_{key}" for key in keys]), strict=True):
            check(key, np.frombuffer(bytearray(value), dtype=np.uint8, offset=header))

    def again(keys: range) -> None:
        for key in keys:
            assert len(compute(key)) == BYTES

    rates = {"filling the cache": filled}
    ways: dict[str, tuple[Callable[[range], None], int]] = {
        "redis-py get, raw bytes": (redis_one, samples),
        "CacheLoader.get": (ours_one, samples),
        f"redis-py mget of {batch}, raw bytes": (redis_many, samples),
        f"redis-py mget of {batch}, arrays": (redis_unpacked, samples),
        f"CacheLoader.get_many of {batch}": (ours_many, samples),
        "computing again": (again, min(samples, 2000)),
    }
    for _ in range(2):
        for name, (work, count) in ways.items():
            rates[name] = max(rates.get(name, 0.0), turns(work, count, repeats, batch))
    direct.close()
    loader.close()
    server.stop()
    return rates


def plot(rates: dict[str, float], path: Path, samples: int) -> None:
    """A bar per way."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    names = [name for name in rates if name != "filling the cache"]
    figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
    bars = axes.barh(names[::-1], [rates[name] / 1000 for name in names[::-1]])
    axes.bar_label(bars, fmt="%.1f")
    axes.set_xlabel("thousand samples per second")
    axes.set_title(f"{samples} samples of 4 KiB from one Redis server on this machine")
    figure.savefig(path)


def main() -> None:
    """Prints the table, and keeps it with --record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--record", action="store_true", help="adds lines to benchmarks/record/cache.csv, and draws a plot"
    )
    chosen = parser.parse_args()
    rates = measure(chosen.samples, chosen.batch, chosen.repeats)
    one, many = rates["redis-py get, raw bytes"], rates[f"redis-py mget of {chosen.batch}, raw bytes"]
    for name, rate in rates.items():
        print(
            f"{name:36} {rate:9.0f} samples/s   {rate / one:6.2f} x redis-py get   {rate / many:6.2f} x redis-py mget"
        )
    if chosen.record:
        RECORD.mkdir(exist_ok=True)
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        path = RECORD / "cache.csv"
        new = not path.exists()
        with open(path, "a", newline="") as file:
            lines = csv.writer(file)
            if new:
                lines.writerow(["date", "commit", "machine", "samples", "batch", "way", "samples_per_second"])
            day = datetime.datetime.now(datetime.timezone.utc).date()
            for name, rate in rates.items():
                lines.writerow(
                    [day, commit.stdout.strip(), platform.machine(), chosen.samples, chosen.batch, name, round(rate)]
                )
        plot(rates, RECORD / "cache.svg", chosen.samples)


if __name__ == "__main__":
    main()
