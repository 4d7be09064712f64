"""Two hosts, which are network namespaces, each start a cache server that both use, until the link is cut."""

from __future__ import annotations

import shutil
import subprocess
import time

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make setup")
for package in ("redis", "hiredis", "msgpack", "xxhash"):
    pytest.importorskip(package, reason=f"{package} is not installed: make setup")

from tests.distributed.test_network_namespaces import Hosts, hosts, next_line  # noqa: E402, F401

pytestmark = pytest.mark.slow

DEADLINE_S = 100.0


@pytest.mark.skipif(
    shutil.which("redis-server") is None, reason="redis-server is not installed: tools/system_packages test"
)
def test_hosts_share_servers_on_their_own_addresses_and_lose_only_speed_when_the_link_is_cut(
    hosts: Hosts,  # noqa: F811
) -> None:
    for rank in range(4):
        hosts.fork("tests.distributed.cache_rank_in_a_namespace", rank=rank, world=4, host=rank // 2)
    with hosts.killed_after(DEADLINE_S):
        found = [next_line(process) for process in hosts.ranks]
        hosts.cut()
        after = [next_line(process) for process in hosts.ranks]

    for words in found:
        assert words["servers"] == list(hosts.addresses)
        assert words["refused"] == [True, True]
        assert words["loopback"] == [False, False]
        assert words["wrong"] == []
        # Each rank computed its share and read the others'.
        assert words["computed"] == 20
        assert words["keys"] == 80
        assert min(words["parts"]) > 0
        assert words["warnings"] == []
    for rank, words in enumerate(after):
        assert words["wrong"] == []
        assert words["computed"] > 20
        (warning,) = words["warnings"]
        assert f"{hosts.addresses[1 - rank // 2]}:" in warning
        assert "is lost" in warning
    for process in hosts.ranks:
        process.kill()
    until = time.monotonic() + 20
    while any(processes_in(hosts, name) for name in hosts.names):
        assert time.monotonic() < until, "a server outlived its owner"
        time.sleep(0.02)


def processes_in(hosts: Hosts, name: str) -> str:  # noqa: F811
    shown = subprocess.run([hosts.ip, "netns", "pids", name], capture_output=True, text=True, check=True)
    return shown.stdout.strip()
