"""One rank of test_rebuild_hosts.py whose peers are cut off one by one: goes on without each until it is alone.

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


def main(optimizer_name: str) -> None:
    model, optimizer = begin(optimizer_name)
    # World size of each completed step, and former ranks of those that are left.
    sizes: list[int] = []
    names = list(range(bagua.get_world_size()))
    reported = 0
    while True:
        size = bagua.get_world_size()
        if size == 1 and sizes[-MORE_STEPS:] == [1] * MORE_STEPS:
            break
        try:
            make_step(model, optimizer, len(sizes))
            sizes.append(size)
            if size != reported:
                say(trains=size, names=names, digest=digest(model, optimizer))
                reported = size
            time.sleep(PAUSE_S)
        except PeerLostError:
            try:
                rebuilt = bagua.rebuild()
            except BaguaError as error:
                say(refused=str(error))
                bagua.destroy_process_group()
                return
            names = [names[former] for former in rebuilt.ranks]
            # A step that was in flight has been completed by another rank, or has to be made again.
            done = rebuilt.steps["Model_0"]
            sizes = [*sizes, size][:done]
    params, _ = finish(model, optimizer)
    say(names=names, sizes=sizes, params=[param.tolist() for param in params])
