from __future__ import annotations
import sys, time
from tests.chaos.actions import VERBS, ACTIONS
from tests.chaos.cell import Cell, run
from tests.chaos.network import Network
from tests.chaos.rank import work
from tests.chaos.faults import FAULTS

def main() -> None:
    net = Network(4)
    for action in sys.argv[1].split(";") if len(sys.argv)>1 else ("all_reduce", "all_gather"):
        for fault in sys.argv[2].split(";") if len(sys.argv)>2 else FAULTS:
            for t in ("shm", "tcp", "hier"):
                for ranks in (2, 4):
                    if t == "hier" and ranks == 2: continue
                    b = time.monotonic()
                    row = run(Cell(action, fault, ranks, t), None if t == "shm" else net, work)
                    print(f"{time.monotonic()-b:5.2f}", row.cell, "v", row.cell.victim, row.kinds, {k: round(v, 3) for k, v in row.latency.items()}, row.named, row.left, flush=True)
                    for w in row.wrong: print("   !!", w[-3000:])
    net.close()

if __name__ == "__main__":
    main()
