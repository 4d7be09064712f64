"""One rank of test_network_namespaces.py: checks the numbers, then works until its peers are gone.

Prints one JSON object per line: what it has found when all numbers are right, and how it ended.
"""

from __future__ import annotations

import hashlib
import json
import time

import numpy as np

import bagua
from tests.distributed.test_neutral_verbs import movements, reductions


def say(**words: object) -> None:
    print(json.dumps(words), flush=True)


def main() -> None:
    group = bagua.init(timeout=60)
    digest = hashlib.sha256()
    reductions(group, lambda result: digest.update(result.tobytes()))
    movements(group)
    described = bagua.stats()["groups"][group.name]
    say(
        digest=digest.hexdigest(),
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
