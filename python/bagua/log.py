"""The logger `bagua` (BAGUA_LOG), and what a rank logs about the groups it joins."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import logging
import socket
import time
from collections import Counter
from collections.abc import Sequence

from bagua import config, extension

__all__ = ["Waiting", "configure", "interface_of", "joined", "log"]

log = logging.getLogger("bagua")

#: Seconds until a rank first warns of ranks that have not come. The waiting time doubles with each further warning.
PATIENCE = 10.0

#: Largest number of ranks that a warning names.
_NAMED = 16

#: The Linux request for the IPv4 address of an interface: netdevice(7).
_SIOCGIFADDR = 0x8915


def configure() -> None:
    """Sets the logger's level to BAGUA_LOG, and logs to stderr unless the program has handlers of its own."""
    level = config.log_level()
    if level is None:
        return
    log.setLevel(level)
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s: %(message)s"))
        log.addHandler(handler)


class Waiting:
    """Warns of missing ranks while this rank joins a group. The caller calls it repeatedly with those ranks."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._begun = time.monotonic()
        self._due = PATIENCE

    def __call__(self, missing: Sequence[int]) -> None:
        waited = time.monotonic() - self._begun
        if not missing or waited < self._due:
            return
        self._due = 2 * max(waited, PATIENCE)
        ranks = ", ".join(map(str, missing[:_NAMED])) + (
            f" and {more} more" if (more := len(missing) - _NAMED) > 0 else ""
        )
        log.warning(
            "rank %d of %d has waited %.0f s to join: waiting for rank%s %s",
            self._rank,
            self._world_size,
            waited,
            "" if len(missing) == 1 else "s",
            ranks,
        )


def joined(group: extension.Communicator) -> None:
    """Logs how this rank reaches the other ranks of a group that it has joined."""
    if not log.isEnabledFor(logging.INFO):
        return
    host = group.listen_host
    interface = interface_of(host)
    transports = Counter(group.transports)
    del transports["self"]
    log.info(
        "rank %d of %d joined group %r in %.2f s: address %s%s, transport %s, collective %s",
        group.rank,
        group.size,
        group.name,
        group.stats()["join_s"],
        host,
        f" ({interface})" if interface else "",
        ", ".join(f"{name} to {_ranks(count)}" for name, count in transports.items()) or "none",
        group.collective,
    )
    log.debug(
        "rank %d of %d: view %d, ranks by host %s, transport to each rank %s, connections %s",
        group.rank,
        group.size,
        group.view,
        group.hosts,
        group.transports,
        group.stats()["connections"],
    )


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def interface_of(address: str) -> str | None:
    """Returns the name of the network interface whose main address this is; None if there is none."""
    wanted = ipaddress.ip_address(address)
    with contextlib.suppress(OSError):
        if wanted.version == 6:
            with open("/proc/net/if_inet6") as lines:
                names = {int(line.split()[0], 16): line.split()[-1] for line in lines}
            return names.get(int(wanted))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            for _, name in socket.if_nameindex():
                with contextlib.suppress(OSError):
                    # A struct ifreq: 16 bytes of name, then a sockaddr_in with the address at offset 4.
                    found = fcntl.ioctl(asked, _SIOCGIFADDR, name.encode().ljust(40, b"\0"))
                    if found[20:24] == wanted.packed:
                        return name
    return None
