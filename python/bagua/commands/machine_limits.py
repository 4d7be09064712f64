"""Properties and limits of this machine that matter for communication."""

from __future__ import annotations

import os
import resource
import socket
from pathlib import Path
from typing import Any

__all__ = ["cpu_quota", "hard_limit_of_files", "limits", "machine", "mtu_of", "shm", "tcp"]


def machine() -> dict[str, Any]:
    """Returns the number of cores that this process may use, the bytes of memory, and the kernel's release."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": os.uname().release,
    }


def limits() -> dict[str, Any]:
    """Returns this process's soft limits, and its control group's CPU quota in cores. None means unlimited."""
    return {
        "open_files": _limit(resource.RLIMIT_NOFILE)[0],
        "locked_memory_bytes": _limit(resource.RLIMIT_MEMLOCK)[0],
        "cpu_quota": cpu_quota(),
    }


def _limit(which: int) -> list[int | None]:
    return [None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(which)]


def hard_limit_of_files() -> int | None:
    return _limit(resource.RLIMIT_NOFILE)[1]


def cpu_quota(cgroups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float | None:
    """Returns the CPU quota in cores: the smallest one of this process's control groups and their parents."""
    found: list[float] = []
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "cpu", "cpu,cpuacct", "cpuacct,cpu"):
            continue
        root = cgroups / controllers if controllers else cgroups
        folder = root / path.lstrip("/")
        for level in (folder, *folder.parents):
            found.extend(_quota_at(level))
            if level == root:
                break
    return min(found, default=None)


def _quota_at(folder: Path) -> list[float]:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota, period = ((folder / f"cpu.cfs_{what}_us").read_text().strip() for what in ("quota", "period"))
        except OSError:
            return []
    return [] if quota in ("max", "-1") else [int(quota) / int(period)]


def shm() -> tuple[bool, str]:
    """Returns True if ranks on this host can share memory, and the reason."""
    try:
        descriptor = os.memfd_create("bagua-doctor")
        try:
            os.ftruncate(descriptor, 4096)
        finally:
            os.close(descriptor)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM):
            pass
    except OSError as error:
        return False, f"anonymous files or Unix sockets cannot be used: {error}"
    return True, "anonymous files and Unix sockets work"


def tcp() -> tuple[bool, str]:
    """Returns True if a loopback connection can be made, and the reason."""
    why = []
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        try:
            with socket.create_server((address, 0), family=family) as server:
                socket.create_connection(server.getsockname()[:2], 5.0).close()
        except OSError as error:
            why.append(f"{address}: {error}")
        else:
            return True, f"a connection over loopback ({address}) works"
    return False, f"no connection over loopback: {'; '.join(why)}"


def mtu_of(interface: str) -> int | None:
    """Returns the size of an interface's largest packet in bytes; None if the kernel does not say."""
    try:
        return int(Path("/sys/class/net", interface, "mtu").read_text())
    except (OSError, ValueError):
        return None
