"""The loss and accuracy of an elastic job when one of its ranks is killed every few seconds.

    python benchmarks/kills.py --csv out
    python benchmarks/kills.py --seconds 600 --every 2 --seed 3

Four ranks learn the digits by asynchronous averaging, under `python -m bagua.distributed.run --keep-going`: once
undisturbed, and once while a rank chosen at random is killed by SIGKILL every `--every` seconds; the runner starts it
again, and it joins again through the server of another rank. Both trainings take as long. In the end the ranks rest
until all are there, make one round together, and say what they have learnt. It fails when a rank fails by itself, when
the ranks' weights differ in the end, or when the accuracy is more than `--points` below that of the other run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import runpy
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import HERE, add_rank_options, machine, save_if_asked

RATE = 0.05
BATCH = 32
#: Steps between two words of a rank about its count.
WORD = 20


def batches(data: Any, rank: int, ranks: int) -> Iterator[Any]:
    """This rank's share of the images, in another order each time; a restarted process begins anew."""
    import torch

    images, labels = (part[rank::ranks] for part in data.tensors)
    generator = torch.Generator().manual_seed(os.getpid())
    while True:
        order: Any = torch.randperm(len(labels), generator=generator)
        for chosen in order.split(BATCH):
            yield images[chosen], labels[chosen]


def rate(folder: Path, seconds: float) -> float:
    """The learning rate at this moment of the training: a cosine over its length."""
    try:
        begun = (folder / "begun").stat().st_mtime
    except FileNotFoundError:
        return RATE
    done = min(1.0, (time.time() - begun) / seconds)
    return max(RATE / 50, RATE * (1 + math.cos(math.pi * done)) / 2)


def child(options: dict[str, Any]) -> None:
    """One process of one rank."""
    import torch
    from torch.nn.functional import cross_entropy

    import bagua.torch_api as bagua
    from bagua.torch_api.algorithms import AsyncModelAverageAlgorithm

    torch.set_num_threads(1)
    folder = Path(options["folder"])
    (folder / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
    model: Any
    train, test, model = torch.load(folder / "digits.pt", weights_only=False)
    bagua.init_process_group()
    rank, ranks = bagua.get_rank(), bagua.get_world_size()
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.9, weight_decay=1e-4)
    model.with_bagua([optimizer], AsyncModelAverageAlgorithm(sync_interval_ms=20))
    algorithm = model.bagua_algorithm
    for step, (images, labels) in enumerate(batches(train, rank, ranks), 1):
        optimizer.param_groups[0]["lr"] = rate(folder, options["seconds"])
        optimizer.zero_grad()
        loss: Any = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        if step % WORD == 0:
            (folder / f"steps-{rank}-{os.getpid()}").write_text(str(step))
        if (folder / "over").exists():
            break
    # No rank is killed any more: ranks that are there stay.
    while len(algorithm.stats()["ranks"]) < ranks:
        time.sleep(0.05)
    algorithm.synchronize(model, timeout=60.0)
    algorithm.abort(model)
    model.eval()
    with torch.no_grad():
        images, labels = test.tensors
        right = float((model(images).argmax(1) == labels).float().mean())
    weights = hashlib.sha256(b"".join(param.detach().numpy().tobytes() for param in model.parameters())).hexdigest()
    stats = algorithm.stats()
    words = {"accuracy": right, "weights": weights, "rounds": stats["rounds"], "restarts": options["restart"]}
    (folder / f"result-{rank}").write_text(json.dumps(words))
    bagua.destroy_process_group()


class Job:
    """A job under the runner, and who is killed in it."""

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        self.folder, self.options = folder, options
        self.ranks = int(options["ranks"])
        self.kills: list[int] = []
        #: Ranks that trained when one was to be killed.
        self.training: list[int] = []
        runner = [sys.executable, "-m", "bagua.distributed.run", "--keep-going", "--max-restarts", "100000"]
        arguments = [str(Path(__file__).resolve()), "--child", json.dumps({**options, "folder": str(folder)})]
        env = {name: value for name, value in os.environ.items() if not name.startswith("BAGUA_")}
        command = [*runner, "--nproc-per-node", str(self.ranks), *arguments]
        self.process = subprocess.Popen(command, env=env)

    def steps(self) -> dict[int, int]:
        """Steps of each rank in all its processes."""
        found = dict.fromkeys(range(self.ranks), 0)
        for path in self.folder.glob("steps-*"):
            # It may be being written.
            found[int(path.name.split("-")[1])] += int(path.read_text() or "0")
        return found

    def kill(self, choices: random.Random) -> None:
        """Kills a rank at random, of those that train or come back; not the last one that trains: the weights of the
        job would be gone with it.
        """
        running = self.running()
        training = [rank for rank, pid in running.items() if (self.folder / f"steps-{rank}-{pid}").exists()]
        if not training:
            raise RuntimeError("no rank trains")
        self.training.append(len(training))
        if victims := [rank for rank in running if training != [rank]]:
            victim = choices.choice(victims)
            os.kill(running[victim], signal.SIGKILL)
            self.kills.append(victim)

    def running(self) -> dict[int, int]:
        """The process of each rank that runs."""
        found = {}
        for rank in range(self.ranks):
            pid = (self.folder / f"pid-{rank}").read_text()
            try:
                command = Path("/proc", pid, "cmdline").read_bytes() if pid else b""
            except OSError:
                continue
            if str(self.folder).encode() in command:
                found[rank] = int(pid)
        return found

    def until(self, what: str, holds: Any, limit: float) -> None:
        """Waits until it holds, or until the runner has ended."""
        end = time.monotonic() + limit
        while not holds():
            if self.process.poll() is not None:
                raise RuntimeError(f"the runner ended with {self.process.returncode} before {what}")
            if time.monotonic() > end:
                raise RuntimeError(f"not within {limit:.0f} s: {what}")
            time.sleep(0.05)

    def run(self, every: float | None, choices: random.Random) -> dict[str, Any]:
        """Trains for the time of the options; the figures."""
        seconds, limit = float(self.options["seconds"]), float(self.options["limit"])
        self.until("all ranks train", lambda: all(self.steps().values()), limit)
        (self.folder / "begun").touch()
        begun = time.monotonic()
        while every and (due := begun + every * (len(self.training) + 1)) < begun + seconds:
            time.sleep(max(0.0, due - time.monotonic()))
            self.kill(choices)
        time.sleep(max(0.0, begun + seconds - time.monotonic()))
        steps = self.steps()
        (self.folder / "over").touch()
        if code := self.process.wait(limit):
            raise RuntimeError(f"the runner ended with {code}; what the ranks said is above")
        results = [json.loads((self.folder / f"result-{rank}").read_text()) for rank in range(self.ranks)]
        return {
            "ranks": self.ranks,
            "seconds": seconds,
            "kills": len(self.kills),
            "of_rank": " ".join(str(self.kills.count(rank)) for rank in range(self.ranks)),
            "training_at_a_kill": round(statistics.mean(self.training), 1) if self.training else "",
            "restarts": sum(result["restarts"] for result in results),
            "steps": sum(steps.values()),
            "accuracy": statistics.mean(result["accuracy"] for result in results),
            "lowest": min(result["accuracy"] for result in results),
            "equal": len({result["weights"] for result in results}) == 1,
        }

    def end(self) -> None:
        """Ends what still runs."""
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait()


def measure(args: argparse.Namespace, run: str) -> dict[str, Any]:
    """One training."""
    import torch

    with tempfile.TemporaryDirectory(prefix="bagua-kills-") as name:
        folder = Path(name)
        example = runpy.run_path(str(HERE.parent / "examples" / "train_digits.py"))
        torch.manual_seed(17)
        # Ranks that come back need not read and split the images again.
        torch.save([*example["digits"](), example["network"]()], folder / "digits.pt")
        job = Job(folder, {"ranks": args.ranks, "seconds": args.seconds, "limit": args.limit})
        try:
            found = job.run(None if run == "undisturbed" else args.every, random.Random(args.seed))
        finally:
            job.end()
    return {"run": run, "every": args.every if run == "kills" else "", **found}


def main() -> None:
    """Parses the command line, trains, compares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_rank_options(parser)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=60.0, help="length of each training")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two kills")
    parser.add_argument("--points", type=float, default=1.0, help="how much accuracy the kills may cost, in per cent")
    parser.add_argument("--seed", type=int, default=1, help="of the choice of ranks")
    args = parser.parse_args()
    if args.child:
        child({**json.loads(args.child), "restart": int(os.environ["BAGUA_RESTART_COUNT"])})
        return
    if args.quick:
        args.seconds, args.every, args.ranks = 3.0, 2.0, 2
    print(f"{machine()}, {args.ranks} ranks, {args.seconds:g} s each", flush=True)
    rows = [measure(args, run) for run in (["kills"] if args.quick else ["undisturbed", "kills"])]
    for row in rows:
        print(
            f"{row['run']:<12} {row['kills']} kills (of rank 0, 1, ...: {row['of_rank']}), when "
            f"{row['training_at_a_kill'] or args.ranks} ranks trained; {row['steps']} steps, "
            f"accuracy {row['accuracy']:.2%}, lowest {row['lowest']:.2%}",
            flush=True,
        )
    save_if_asked(args, "kills", rows)
    if not all(row["equal"] for row in rows):
        raise SystemExit("the ranks' weights differ after a round that all made")
    if (cost := 100 * (rows[0]["accuracy"] - rows[-1]["lowest"])) > args.points:
        raise SystemExit(f"the kills cost {cost:.2f} points of accuracy, more than {args.points:g}")


if __name__ == "__main__":
    main()
