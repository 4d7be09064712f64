"""A job of three pods, each a network namespace: one is killed, and its index comes back at another address."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.test_network_namespaces import Hosts
from tests.distributed.test_rebuild_hosts import switched  # noqa: F401
from tests.unit.test_kubernetes import JOBS, container, variables
from tests.waits import until
from tests.world import ROOT

pytestmark = pytest.mark.slow

PODS = 3
#: Imports of torch on two processors that other tests use too.
PATIENCE_S = 120.0


class Pods:
    """The pods of deploy/kubernetes/job.yaml, with the elastic example and the option by which it goes on."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self._hosts, self._folder = hosts, folder
        manifest = container(JOBS["job.yaml:Job"])
        python, *self._launcher, script = manifest["command"]
        assert (python, script) == ("python", "train.py")
        self._variables = variables(manifest)

    def start(self, index: int, host: int) -> subprocess.Popen[bytes]:
        """Starts the pod of this index on a host; what it prints is `output(index)`."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("BAGUA_")}
        # What the manifest says is to be set, and what Kubernetes looks up. There is no name server here.
        given = {
            "PET_NNODES": str(PODS),
            "PET_NODE_RANK": str(index),
            "PET_MASTER_ADDR": self._hosts.addresses[0],
            "BAGUA_JOB_SECRET": "that of the job",
        }
        assert set(given) <= set(self._variables)
        found = self._variables | given
        # In a command of a manifest they are written $(PET_NNODES).
        names = ("nnodes", "node_rank", "nproc_per_node", "master_addr", "master_port")
        options = [f"--{name.replace('_', '-')}={found[f'PET_{name.upper()}']}" for name in names]
        example = [str(Path(ROOT, "examples", "elastic.py")), "--fails", "-1", "--seconds", "1"]
        command = [sys.executable, *self._launcher, "--keep-going", *options, *example]
        with self._path(index).open("ab") as output:
            pod = subprocess.Popen(
                [*self._hosts.inside(host), *command],
                env={**inherited, **found},
                stdout=output,
                stderr=output,
            )
        self._hosts.ranks.append(pod)
        return pod

    def output(self, index: int) -> str:
        """What the pods of this index have printed."""
        return self._path(index).read_text()

    def await_line(self, index: int, text: str) -> None:
        """Waits until the pod of this index has printed it."""
        until(lambda: text in self.output(index), f"pod {index} prints: {text}", PATIENCE_S)

    def _path(self, index: int) -> Path:
        return self._folder / f"pod-{index}"


def test_a_pod_that_is_killed_comes_back_with_its_index_at_another_address_and_the_job_ends_well(
    switched: Hosts,  # noqa: F811
    tmp_path: Path,
) -> None:
    pods = Pods(switched, tmp_path)
    running = [pods.start(index, host=index) for index in range(PODS)]
    for index in range(PODS):
        pods.await_line(index, f"rank {index} began at forward 0")
    # The launcher, and by the kernel what it has started; the interface of the pod goes with it.
    running[2].kill()
    assert running[2].wait() == -9
    for index in (0, 1):
        pods.await_line(index, f"rank {index} goes on with 2 of 3 ranks")
    switched.run("-n", switched.names[2], "link", "set", switched.links[2], "down")
    running[2] = pods.start(2, host=3)
    codes = [pod.wait(PATIENCE_S) for pod in running]
    assert codes == [0, 0, 0], "\n".join(map(pods.output, range(PODS)))
    assert "rank 2 came back at forward " in pods.output(2)
    assert "rank 2 came back at forward 0\n" not in pods.output(2)
    for index in range(PODS):
        # Within 0.01 of what it should be, or the exit code would be 1.
        assert f"rank {index}: farthest weight " in pods.output(index)
