"""`make gpu-test`: the tests of this folder on the machine's GPU, suite by suite, and a table of them last.

    python -m tests.gpu                  # all; "skipped: …" where there is no GPU
    python -m tests.gpu staged torch     # those whose names begin so

Each suite is a process with a time limit of its own, so that one that hangs does not cost the others, and several run
at once; the one that measures time runs alone. The output of each, and what every test's outcome was, is in a folder.
Exits with 1 where a test failed or a suite did not end.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.gpu.place import why_not

ROOT = Path(__file__).resolve().parents[2]
#: Seconds after which no suite is started any more, and those that run are ended.
LIMIT = 450.0
#: What tests of time measure.
ALONE = "half_a_second or at_once"


@dataclass
class Suite:
    """Tests in one process, and what came of them."""

    name: str
    #: Arguments of pytest; or a whole command.
    arguments: list[str]
    #: Seconds.
    limit: float
    #: What the tests are chosen by.
    keywords: str = ""
    #: A command that is no pytest.
    command: bool = False
    seconds: float = 0.0
    #: Why it did not run or did not end; empty: it did.
    note: str = ""
    tests: list[dict[str, Any]] = field(default_factory=list)

    def count(self, outcome: str) -> int:
        return sum(test["outcome"] == outcome for test in self.tests)


def suites() -> list[Suite]:
    """Returns the suites that run at the same time, longest first."""
    here = "tests/gpu/"
    large = "hundred_million"
    gradients = "gradient or bytegrad or qadam"
    return [
        *(Suite(f"codec 10^8 {name}", [f"{here}test_codec.py"], 240, f"{large} and device-{name}") for name in CODED),
        Suite("torch", [f"{here}test_torch.py", f"{here}test_torch_verbs.py"], 300, f"not ({ALONE})"),
        Suite("torch c10d", [f"{here}test_torch_c10d.py", f"{here}test_torch_futures.py"], 300),
        Suite("torch ddp", [f"{here}test_torch_ddp.py"], 300),
        Suite("staged values", [f"{here}test_staged.py"], 300, "bits_of_the_host"),
        Suite("staged order", [f"{here}test_staged.py"], 300, f"not ({ALONE} or bits_of_the_host)"),
        Suite("training gradients", [f"{here}test_training.py"], 300, gradients),
        Suite("training weights", [f"{here}test_training.py", f"{here}test_averaging.py"], 300, f"not ({gradients})"),
        Suite("nccl", [f"{here}test_nccl.py"], 200),
        Suite("codec", [f"{here}test_codec.py"], 200, f"not {large}"),
        Suite("kernels", [f"{here}test_kernels.py"], 200),
    ]


def alone() -> list[Suite]:
    """Returns the suites that run alone, at the end."""
    files = ["tests/gpu/test_torch.py", "tests/gpu/test_staged.py"]
    sanitizer = ["compute-sanitizer", "--error-exitcode", "9", sys.executable, "-m", "tests.gpu.kernels"]
    return [Suite("time", files, 80, ALONE), Suite("sanitizer", sanitizer, 90, command=True)]


CODED = ("f32", "f16", "bf16")


def run(suite: Suite, folder: Path, until: float) -> None:
    """Runs a suite to its end, or ends it."""
    stem = suite.name.replace(" ", "-").replace("^", "")
    progress = folder / f"{stem}.jsonl"
    command = suite.arguments
    if not suite.command:
        options = ["-q", "-ra", "-p", "tests.gpu.progress", "-p", "no:cacheprovider"]
        # Warnings of a torch with CUDA are no failures, and pytest-timeout may be absent.
        options += ["--override-ini=addopts=", "--override-ini=filterwarnings=default"]
        if find_spec("pytest_timeout"):
            # One test that hangs leaves some time for those behind it.
            options += [f"--override-ini=timeout={int(0.7 * suite.limit)}"]
        keywords = f"not simulated and ({suite.keywords})" if suite.keywords else "not simulated"
        command = [sys.executable, "-m", "pytest", *options, "-k", keywords, *suite.arguments]
    elif shutil.which(command[0]) is None:
        suite.note = f"skipped: there is no {command[0]}"
        return
    begun = time.monotonic()
    limit = min(suite.limit, until - begun)
    if limit < 5:
        suite.note = "NOT RUN: no time was left"
        return
    env = os.environ | {"BAGUA_TESTS_PROGRESS": str(progress), "OMP_NUM_THREADS": "2"}
    log = folder / f"{stem}.log"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
            end(process)
    suite.seconds = time.monotonic() - begun
    if progress.exists():
        suite.tests = [json.loads(line) for line in progress.read_text(encoding="utf-8").splitlines()]
    last = (log.read_text(errors="replace").strip().splitlines() or [""])[-1]
    if code is None:
        suite.note = f"NOT ENDED within {limit:.0f} s"
    elif suite.command:
        command_ended(suite, code, log.read_text(errors="replace"))
    elif code not in (0, 1):
        # 2: interrupted or no module could be imported; 5: no test was chosen.
        suite.note = f"pytest ended with {code}: {last[:100]}"


def command_ended(suite: Suite, code: int, said: str) -> None:
    """Interprets the end of compute-sanitizer."""
    if "Device not supported" in said or "not supported" in said.lower().split("========= error summary")[0]:
        suite.note = "skipped: compute-sanitizer does not support this device or machine"
        return
    text = "" if code == 0 else said[-3000:]
    outcome = "passed" if code == 0 and "ERROR SUMMARY: 0 errors" in said else "failed"
    suite.tests = [{"test": " ".join(suite.arguments), "outcome": outcome, "seconds": suite.seconds, "text": text}]


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a suite with its ranks, which are in sessions of their own: by Ctrl-C, and then whatever is left."""
    theirs = descendants(process.pid)
    process.send_signal(signal.SIGINT)
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        theirs |= descendants(process.pid)
    for pid in (*theirs, process.pid):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


def descendants(parent: int) -> set[int]:
    """The processes that a process has started, and those that they have."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = entry.joinpath("stat").read_text(errors="replace").rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, ask = set(), [parent]
    while ask:
        new = set(children.get(ask.pop(), [])) - found
        found |= new
        ask += new
    return found


def machine() -> str:
    """Describes the machine and its software in one line."""
    asks = (
        "try:\n  import torch; t = torch.__version__\nexcept ImportError: t = 'absent'\n"
        "import bagua.cuda, platform; i = bagua.cuda.info(); d = i['devices'][0]\n"
        "print(d['name'], 'sm', d['capability'], '| driver serves CUDA', i['driver']['version'], '| NVRTC', "
        "i['nvrtc']['version'], '| NCCL', i['nccl']['version'], '| torch', t, '| Python', platform.python_version())"
    )
    said = subprocess.run([sys.executable, "-c", asks], capture_output=True, text=True, check=False)
    return said.stdout.strip() or said.stderr.strip()[-300:]


def show(suites: list[Suite], folder: Path) -> int:
    """Prints failures, then the table. The exit code."""
    for suite in suites:
        for test in suite.tests:
            if test["outcome"] == "failed":
                shown = test["text"].strip().splitlines()[-25:]
                print(f"--- {suite.name}: {test['test']}", *(f"    {line[:180]}" for line in shown), sep="\n")
    reasons = sorted({t["text"] for suite in suites for t in suite.tests if t["outcome"] == "skipped"})
    for reason in reasons:
        print(f"a test was skipped: {reason[:200]}")
    print(f"output of each suite: {folder}\n{machine()}")
    print(f"{'suite':<18}{'passed':>8}{'failed':>8}{'skipped':>9}{'seconds':>9}")
    wrong = False
    for suite in suites:
        wrong |= bool(suite.count("failed")) or (bool(suite.note) and not suite.note.startswith("skipped"))
        counts = f"{suite.count('passed'):>8}{suite.count('failed'):>8}{suite.count('skipped'):>9}"
        print(f"{suite.name:<18}{counts}{suite.seconds:>9.1f}  {suite.note}".rstrip())
    return int(wrong)


def main() -> int:
    """Runs everything, prints, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", help="names of suites, or their beginnings; all without one")
    parser.add_argument("--logs", type=Path, default=ROOT / "target" / "gpu-test", help="folder for the output")
    parser.add_argument("--at-once", type=int, default=max(1, min(8, (os.cpu_count() or 1) // 2)))
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for everything")
    args = parser.parse_args()
    # Bagua is found beside the tests, installed or not.
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT / "python")]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    if reason := why_not():
        print(f"skipped: {reason}")
        return 0
    until = time.monotonic() + args.limit
    args.logs.mkdir(parents=True, exist_ok=True)
    for old in (*args.logs.glob("*.log"), *args.logs.glob("*.jsonl")):
        old.unlink()

    def chosen(all_of_them: list[Suite]) -> list[Suite]:
        wanted = tuple(args.suites)
        return [suite for suite in all_of_them if not wanted or suite.name.startswith(wanted)]

    first, last = chosen(suites()), chosen(alone())
    printing = threading.Lock()

    def one(suite: Suite) -> None:
        run(suite, args.logs, until)
        with printing:
            print(
                f"{suite.name}: {suite.count('passed')} passed, {suite.count('failed')} failed {suite.note}", flush=True
            )

    # What runs alone gets its time in any case.
    kept = until - sum(suite.limit for suite in last) if last else until
    until, whole = max(kept, time.monotonic() + 60), until
    with ThreadPoolExecutor(args.at_once) as pool:
        list(pool.map(one, first))
    until = whole
    for suite in last:
        one(suite)
    return show(first + last, args.logs)


if __name__ == "__main__":
    sys.exit(main())
