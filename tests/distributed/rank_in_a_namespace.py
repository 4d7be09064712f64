"""One rank of test_network_namespaces.py: checks the numbers, then works until its peers are gone.

Prints one JSON object per line: what it has found when all numbers are right, and how it ended.
"""

from __future__ import annotations

import hashlib
import json
import time

import numpy as np

import bagua

SIZES = (0, 1, 7, 1023, (1 << 18) + 3)


def say(**words: object) -> None:
    print(json.dumps(words), flush=True)


def inputs(size: int, world: int, seed: int) -> list[np.ndarray]:
    """What every rank contributes: each rank computes all of them, and so knows what must come out."""
    return [np.random.default_rng([seed, rank]).standard_normal(size).astype(np.float32) for rank in range(world)]


def check_numbers(group: bagua.Group) -> str:
    """Compares verbs with a float64 oracle; a digest of all results that must be equal everywhere."""
    rank, world = group.rank, group.size
    digest = hashlib.sha256()
    for size in SIZES:
        data = inputs(size, world, size)
        exact = np.sum([x.astype(np.float64) for x in data], axis=0)
        total = data[rank].copy()
        group.all_reduce(total)
        scale = np.sum(np.abs(data), axis=0, dtype=np.float64)
        assert (np.abs(total - exact) <= world * np.finfo(np.float32).eps * scale).all(), size
        again = np.empty_like(total)
        group.all_reduce(data[rank].copy(), out=again)
        assert again.tobytes() == total.tobytes(), size
        digest.update(total.tobytes())

        largest = data[rank].copy()
        group.all_reduce(largest, op="max")
        assert (largest == np.max(data, axis=0)).all(), size

        for root in range(world):
            sent = data[rank].copy()
            group.broadcast(sent, root)
            assert sent.tobytes() == data[root].tobytes(), (size, root)

        gathered = np.empty((world, size), np.float32)
        group.all_gather(data[rank], out=gathered)
        assert gathered.tobytes() == np.stack(data).tobytes(), size
        digest.update(gathered.tobytes())
    whole = np.arange(5, dtype=np.int64) * (rank + 1)
    group.all_reduce(whole)
    assert (whole == np.arange(5) * (world * (world + 1) // 2)).all()
    group.barrier()
    return digest.hexdigest()


def main() -> None:
    group = bagua.init(timeout=60)
    digest = check_numbers(group)
    described = bagua.stats()["groups"][group.name]
    say(
        digest=digest,
        hosts=group.hosts,
        collective=described["collective"],
        transports={int(rank): name for rank, name in described["transports"].items()},
        wire_bytes=described["ops"]["all_reduce"]["wire_bytes_sent"],
    )
    x = np.ones(1000, dtype=np.float32)
    try:
        while True:
            group.all_reduce(x, op="max")
    except bagua.PeerLostError as error:
        say(lost=error.rank, at=time.monotonic(), text=str(error))
    bagua.shutdown()


if __name__ == "__main__":
    main()
