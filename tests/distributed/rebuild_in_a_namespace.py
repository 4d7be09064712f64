"""One rank of test_rebuild_hosts.py: trains until its peers are gone, then asks to go on without them.

Prints one JSON object per line: that it trains, and how it went on.
"""

from __future__ import annotations

import json

import bagua.torch_api as bagua
from bagua import BaguaError, PeerLostError
from tests.distributed.test_rebuild import begin, finish, make_step

MORE_STEPS = 3


def say(**words: object) -> None:
    print(json.dumps(words), flush=True)


def main() -> None:
    model, optimizer = begin()
    make_step(model, optimizer, 0)
    say(trains=True)
    step = 1
    try:
        while True:
            make_step(model, optimizer, step)
            step += 1
    except PeerLostError as error:
        lost = error.rank
    try:
        rebuilt = bagua.rebuild()
    except BaguaError as error:
        say(lost=lost, refused=str(error))
        bagua.destroy_process_group()
        return
    done = rebuilt.steps["Model_0"]
    for step in range(done, done + MORE_STEPS):
        make_step(model, optimizer, step)
    params, digest = finish(model, optimizer)
    say(lost=lost, ranks=rebuilt.ranks, done=done, digest=digest, params=[param.tolist() for param in params])
