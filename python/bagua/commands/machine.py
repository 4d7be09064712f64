"""Properties and limits of this machine that matter for communication."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import resource
import socket
import struct
from pathlib import Path
from typing import Any

__all__ = ["cpu_quota", "hard_limit_of_files", "interface_of", "limits", "machine", "mtu_of", "shm", "tcp"]

# From linux/sockios.h.
_SIOCGIFADDR = 0x8915


def machine() -> dict[str, Any]:
    """Returns the number of cores that this process may use, the bytes of memory, and the kernel's release."""
    return {
        "cores": _cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": os.uname().release,
    }


def _cores() -> int:
    """Returns the number of cores that this process may use. macOS cannot restrict them, so all count there."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
    if not hasattr(os, "memfd_create"):
        return False, "this system has no anonymous files: ranks of one host use TCP"
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


def interface_of(address: str) -> str | None:
    """Returns the interface that has the address; None if there is none."""
    wanted = ipaddress.ip_address(address)
    if wanted.version == 6:
        try:
            lines = Path("/proc/net/if_inet6").read_text().splitlines()
        except OSError:
            return None
        return next((line.split()[-1] for line in lines if int(line.split()[0], 16) == int(wanted)), None)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, request)
            except OSError:
                # This interface has no IPv4 address.
                continue
            if answer[20:24] == wanted.packed:
                return name
    return None


def mtu_of(interface: str) -> int | None:
    """Returns the size of an interface's largest packet in bytes; None if the kernel does not say."""
    try:
        return int(Path("/sys/class/net", interface, "mtu").read_text())
    except (OSError, ValueError):
        return None
