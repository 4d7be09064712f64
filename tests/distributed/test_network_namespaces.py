"""Two network namespaces joined by a veth pair are two hosts with two ranks each."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests import forks
from tests.world import ROOT, Rank

pytestmark = pytest.mark.slow

RANK = "tests.distributed.rank_in_a_namespace"
HEARTBEAT_TIMEOUT_S = 2.0
#: From the missing heartbeat to the exception, on a busy machine. Nothing else would end the wait before BAGUA_TIMEOUT.
SLACK_S = 10.0
DEADLINE_S = 100.0
#: In namespaces of our own every port is free.
PORT = 29500


class Hosts:
    """Two namespaces, the link between them, and the ranks that run in them."""

    def __init__(self, ip: str) -> None:
        self.ip = ip
        pid = os.getpid()
        self.names: tuple[str, ...] = (f"bagua-{pid}-a", f"bagua-{pid}-b")
        # Interface names have at most 15 characters.
        self.links: tuple[str, ...] = (f"bg{pid % 10**8}a", f"bg{pid % 10**8}b")
        self.addresses: tuple[str, ...] = (f"10.77.{pid % 250}.1", f"10.77.{pid % 250}.2")
        self.ranks: list[Rank] = []

    def run(self, *arguments: str) -> None:
        shown = subprocess.run([self.ip, *arguments], capture_output=True, text=True, check=False)
        if shown.returncode != 0:
            raise OSError(f"ip {' '.join(arguments)}: {shown.stderr.strip()}")

    def inside(self, host: int) -> tuple[str, ...]:
        """Returns the words in front of a command that runs on a host."""
        return self.ip, "netns", "exec", self.names[host]

    def namespace(self, host: int) -> str:
        """The path that `ip netns` gives a host's namespace."""
        return f"/run/netns/{self.names[host]}"

    def build(self) -> None:
        for name in self.names:
            self.run("netns", "add", name)
        first, second = zip(self.names, self.links, self.addresses, strict=True)
        self.run(
            "link", "add", first[1], "netns", first[0], "type", "veth", "peer", "name", second[1], "netns", second[0]
        )
        for name, link, address in (first, second):
            self.run("-n", name, "addr", "add", f"{address}/30", "dev", link)
            self.run("-n", name, "link", "set", link, "up")
            self.run("-n", name, "link", "set", "lo", "up")
            self.run("netns", "exec", name, "true")

    def start(self, rank: int, world: int, host: int) -> None:
        """Starts a rank as a new process, two per host."""
        command = [*self.inside(host), sys.executable, "-m", RANK]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.ranks.append(subprocess.Popen(command, cwd=ROOT, env=self.environment(rank, world, host, 2), **pipes))

    def fork(self, module: str, *arguments: str, rank: int, world: int, host: int, per_host: int = 2) -> None:
        """Starts a rank as a fork that has imported torch and calls `main` of the module."""
        environment = self.environment(rank, world, host, per_host)
        self.ranks.append(
            forks.start_with_pipes(
                module, *arguments, rank=rank, environment=environment, namespace=self.namespace(host)
            )
        )

    def environment(self, rank: int, world: int, host: int, per_host: int) -> dict[str, str]:
        """The variables of a rank."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("BAGUA_")}
        return environment | {
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": str(rank % per_host),
            "LOCAL_WORLD_SIZE": str(per_host),
            "MASTER_ADDR": self.addresses[0],
            "MASTER_PORT": str(PORT),
            "BAGUA_HEARTBEAT_TIMEOUT": str(HEARTBEAT_TIMEOUT_S),
            # The name of this machine means nothing in a namespace, and gloo would look it up.
            "GLOO_SOCKET_IFNAME": self.links[host],
        }

    def cut(self) -> float:
        """Takes the link down; the moment, on the clock that the ranks use too."""
        before = time.monotonic()
        self.run("-n", self.names[0], "link", "set", self.links[0], "down")
        return before

    @contextlib.contextmanager
    def killed_after(self, seconds: float) -> Iterator[None]:
        """A rank that hangs would block readline: after so long this ends the ranks, and readline with them."""
        deadline = threading.Timer(seconds, lambda: [process.kill() for process in self.ranks])
        deadline.start()
        try:
            yield
        finally:
            deadline.cancel()

    def remove(self) -> None:
        for process in self.ranks:
            end(process)
        for name in self.names:
            # The veth pair goes with its namespaces.
            subprocess.run([self.ip, "netns", "del", name], capture_output=True, check=False)


def built(make: Callable[[str], Hosts]) -> Iterator[Hosts]:
    """Hosts for a fixture, which skips the test where there can be none."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    ip = shutil.which("ip", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if ip is None:
        pytest.skip("network namespaces need the program `ip` (Debian and Ubuntu: iproute2)")
    made = make(ip)
    try:
        try:
            made.build()
        except OSError as error:
            pytest.skip(f"network namespaces are not permitted here: {error}")
        yield made
    finally:
        made.remove()


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    yield from built(Hosts)


def test_two_hosts_agree_through_hier_and_a_cut_link_is_noticed_within_the_heartbeat_timeout(hosts: Hosts) -> None:
    for rank in range(4):
        hosts.start(rank, 4, host=rank // 2)
    with hosts.killed_after(DEADLINE_S):
        found = [next_line(process) for process in hosts.ranks]
        cut_at = hosts.cut()
        ended = [next_line(process) for process in hosts.ranks]
        codes = [process.wait() for process in hosts.ranks]

    assert len({words["digest"] for words in found}) == 1
    for rank, words in enumerate(found):
        assert words["hosts"] == [[0, 1], [2, 3]]
        assert words["collective"] == "hier"
        neighbour = rank ^ 1
        expected = {other: "self" if other == rank else "shm" if other == neighbour else "tcp" for other in range(4)}
        assert {int(other): name for other, name in words["transports"].items()} == expected
    # Only the leaders put an all_reduce on the wire.
    assert [words["wire_bytes"] > 0 for words in found] == [True, False, True, False]

    for rank, words in enumerate(ended):
        assert words["lost"] // 2 != rank // 2, f"rank {rank} lost a rank of its own host: {words['text']}"
        assert words["at"] - cut_at <= HEARTBEAT_TIMEOUT_S + SLACK_S, f"rank {rank}: {words['text']}"
    assert codes == [0, 0, 0, 0]


def end(process: Rank) -> None:
    """Kills a rank that still runs, and closes its pipes."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            # What it did not read any more cannot be written.
            with contextlib.suppress(OSError):
                pipe.close()


def next_line(process: Rank) -> dict[str, Any]:
    """The next JSON object that a rank prints; its own words if it ended instead."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        words = process.stderr.read().decode() if process.stderr is not None else "its words are among ours"
        pytest.fail(f"a rank ended with {process.wait()}:\n{words}")
    found: dict[str, Any] = json.loads(line)
    return found
