from __future__ import annotations
import sys, time, queue
from concurrent.futures import ThreadPoolExecutor
from tests.chaos.actions import VERBS, ACTIONS
from tests.chaos.cell import Cell, run
from tests.chaos.network import Network
from tests.chaos.rank import work
from tests.chaos.faults import FAULTS

def main() -> None:
    W = 5
    nets = queue.Queue()
    for i in range(W): nets.put(Network(4, i))
    cells = [Cell(a, f, r, t) for a in (sys.argv[1].split(";") if len(sys.argv)>1 and sys.argv[1] else (*ACTIONS,'averaging','join'))
      for f in (sys.argv[2].split(";") if len(sys.argv)>2 and sys.argv[2] else FAULTS)
      for t in ("shm", "tcp", "hier") for r in (2, 4) if not (t=="hier" and r==2) and not (t == "shm" and FAULTS[f].on_the_network)]
    def one(c):
        b = time.monotonic()
        net = nets.get()
        try: row = run(c, None if c.transport == "shm" else net, work)
        finally: nets.put(net)
        print(f"{time.monotonic()-b:5.2f}", row.cell, "v", row.cell.victim, row.kinds, f"took {row.took:.2f}", {k: round(v, 3) for k, v in row.latency.items()}, row.named, row.left, *["\n   !!"+w[-3000:] for w in row.wrong], flush=True)
    from tests.world import World
    from tests.chaos.rank import nothing
    b = time.monotonic()
    World(2, timeout=200).run(nothing)
    print("warm", time.monotonic() - b)
    b = time.monotonic()
    with ThreadPoolExecutor(W) as pool:
        list(pool.map(one, cells))
    print("total", len(cells), time.monotonic()-b)
    while nets.qsize(): nets.get().close()

if __name__ == "__main__":
    main()
