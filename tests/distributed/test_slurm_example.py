"""The batch script of examples/slurm with an srun in its place: ranks start, get Slurm's signal, save, and go on."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.unit.test_run import until
from tests.world import ROOT, free_port

pytestmark = pytest.mark.slow

FOLDER = ROOT / "examples" / "slurm"
SCRIPT = FOLDER / "train.sbatch"

DEADLINE_S = 120.0

# Starts two ranks as `srun` does and forwards what Slurm would send them; the exit code is the highest, as srun's is.
SRUN = """#!{python}
import os, signal, subprocess, sys
rest = sys.argv[1:]
while rest[0].startswith("-"):
    rest.pop(0)
ranks = []
for rank in range(2):
    variables = {{
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "127.0.0.1",
    }}
    ranks.append(subprocess.Popen(rest, env=os.environ | variables))
with open(os.environ["PIDS"] + ".new", "w") as file:
    file.write(" ".join(str(rank.pid) for rank in ranks))
os.rename(os.environ["PIDS"] + ".new", os.environ["PIDS"])
sys.exit(max(rank.wait() for rank in ranks))
"""

SCONTROL = '#!/bin/bash\necho "scontrol $*" >> "$REQUEUED"\n'


class Job:
    """One job, which may be started several times."""

    def __init__(self, folder: Path, port: int) -> None:
        self.checkpoint, self.pids, self.requeued = folder / "kept.npz", folder / "pids", folder / "requeued"
        self.output = folder / "output"
        (programs := folder / "bin").mkdir()
        # By its own path an interpreter of a virtual environment finds its packages.
        python = f'#!/bin/bash\nexec {sys.executable} "$@"\n'
        for name, text in (("srun", SRUN.format(python=sys.executable)), ("scontrol", SCONTROL), ("python", python)):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        ours = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "BAGUA_", "OMPI_", "PMI_")
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(ours)},
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([str(ROOT / "python"), os.environ.get("PYTHONPATH", "")]),
            # 15000 and the last four digits are the port.
            "SLURM_JOB_ID": f"87{port - 15000:04d}",
            "SLURM_CPUS_PER_TASK": "1",
            "CHECKPOINT": str(self.checkpoint),
            "PIDS": str(self.pids),
            "REQUEUED": str(self.requeued),
            "BAGUA_TRACE_DIR": str(folder / "traces"),
        }

    @contextlib.contextmanager
    def started(self, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
        """The batch script while the block runs. No rank is left afterwards."""
        self.pids.unlink(missing_ok=True)
        with open(self.output, "wb") as output:
            script = subprocess.Popen(
                ["bash", str(SCRIPT), *arguments],
                cwd=ROOT,
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                # What it starts has its process group.
                start_new_session=True,
            )
        try:
            yield script
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(script.pid, signal.SIGKILL)
            script.wait()

    def finish(self, script: subprocess.Popen[bytes]) -> tuple[int, str]:
        """Exit code and output."""
        code = script.wait(DEADLINE_S)
        return code, self.output.read_text()


def test_a_signal_to_the_ranks_saves_a_checkpoint_from_which_the_job_goes_on(tmp_path: Path) -> None:
    with free_port(range(20000, 25000)) as port:
        job = Job(tmp_path, port)
        with job.started("--steps", "100000", "--pause", "0.01") as script:
            # Two processes write, so what they write may be mixed.
            until(lambda: job.output.read_text().count("begins at step 0") == 2, "the ranks do not train")
            # Slurm's signal comes to one rank earlier than to another.
            os.kill(int(job.pids.read_text().split()[1]), signal.SIGUSR1)
            code, output = job.finish(script)
        # The job is not a failed one, and is queued again.
        assert code == 0, output
        assert job.requeued.read_text() == f"scontrol requeue {job.environment['SLURM_JOB_ID']}\n"
        with np.load(job.checkpoint) as kept:
            step = int(kept["step"])
        assert 0 < step < 100000
        assert f"saved after step {step}: " in output

        job.requeued.unlink()
        with job.started("--steps", str(step + 200)) as script:
            code, output = job.finish(script)
        assert code == 0, output
        for rank in range(2):
            assert f"rank {rank} of 2 begins at step {step}" in output
        assert not job.requeued.exists()
        with np.load(job.checkpoint) as kept:
            assert int(kept["step"]) == step + 200
            assert np.abs(kept["weights"] - np.arange(1, 9)).max() < 0.01


def test_a_rank_that_fails_ends_the_job_with_its_code_and_does_not_queue_it_again(tmp_path: Path) -> None:
    with free_port(range(20000, 25000)) as port:
        job = Job(tmp_path, port)
        with job.started("--steps", "none") as script:
            code, output = job.finish(script)
    assert code == 2, output
    assert "argument --steps: invalid int value: 'none'" in output
    assert not job.requeued.exists()
