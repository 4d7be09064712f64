"""One rank of test_tls_listener.py: verbs on a payload that is found again where it travels in clear."""

from __future__ import annotations

import sys

import numpy as np

import bagua


def main() -> None:
    """Argument: the payload, which repeats in every tensor."""
    group = bagua.init(timeout=60)
    payload = np.frombuffer(sys.argv[1].encode() * 4000, np.uint8)
    for size in (len(payload), 100):
        x = payload[:size].copy()
        group.broadcast(x, 0)
        group.all_reduce(x, "max")
        assert (x == payload[:size]).all()
        gathered = np.empty((group.size, size), np.uint8)
        group.all_gather(x, out=gathered)
        assert (gathered == payload[:size]).all()
    part = group.new_group([0, 1])
    if part is not None:
        part.all_reduce(payload.copy(), "max")
    print(" ".join(group.transports), flush=True)
    bagua.shutdown()


if __name__ == "__main__":
    main()
