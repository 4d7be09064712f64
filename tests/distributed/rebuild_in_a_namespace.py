"""One rank of test_rebuild_hosts.py whose peers are cut off: goes on without them until so many are left.

Prints one JSON object per line: that it has made its first step with so many ranks, and in the end how it went on.
"""

from __future__ import annotations

import json
import time

import bagua.torch_api as bagua
from bagua import BaguaError, PeerLostError
from tests.distributed.test_rebuild import begin, digest, finish, make_step

MORE_STEPS = 3
#: Seconds between two steps: a training of a few hundred steps, which plain torch makes too within rounding.
PAUSE_S = 0.02


def say(**words: object) -> None:
    print(json.dumps(words), flush=True)


def main(optimizer_name: str, last: str) -> None:
    """Ends after some steps in a world of `last` ranks."""
    model, optimizer = begin(optimizer_name)
    # World size of each completed step, former ranks of those that are left, and whom each rebuild was without.
    sizes: list[int] = []
    names = list(range(bagua.get_world_size()))
    lost: list[int | None] = []
    reported = 0
    while sizes[-MORE_STEPS:] != [int(last)] * MORE_STEPS:
        size = bagua.get_world_size()
        try:
            make_step(model, optimizer, len(sizes))
            sizes.append(size)
            if size != reported:
                say(trains=size, names=names, digest=digest(model, optimizer))
                reported = size
            time.sleep(PAUSE_S)
        except PeerLostError as error:
            lost.append(error.rank)
            try:
                rebuilt = bagua.rebuild()
            except BaguaError as refused:
                say(refused=str(refused))
                bagua.destroy_process_group()
                return
            names = [names[former] for former in rebuilt.ranks]
            # A step that was in flight has been completed by another rank, or has to be made again.
            done = rebuilt.steps["Model_0"]
            sizes = [*sizes, size][:done]
    params, state = finish(model, optimizer)
    say(names=names, sizes=sizes, lost=lost, digest=state, params=[param.tolist() for param in params])
