"""A network in one process: hosts are network namespaces, and every packet between them passes through here.

Each namespace has one TUN device and no other. So packets can be dropped, delayed, held to a rate or changed at an
exact moment, on one line and in one direction, without the kernel's `netem` and without `nft`. The kernel checks the
TCP checksum of what comes out of a TUN device as it would on a cable.

Reads a JSON object per line, the rules of every line ("0>1": {...}, what is not named is a perfect line), and answers
with the moment at which they began to hold. The namespaces go with this process, which goes when its input ends. Needs
root.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import json
import os
import select
import struct
import subprocess
import sys
import time
from typing import Any

CLONE_NEWNET = 0x40000000
TUNSETIFF = 0x400454CA
IFF_TUN_NO_PI = 0x1001
#: Bytes of a packet. A large one costs this process no more than a small one.
MTU = 9000
#: Seconds of packets that wait before a line of limited rate; what comes then is dropped, as by any router.
QUEUE_S = 0.1
#: Begin of the header of a message between ranks, of every version (docs/reference/wire.md).
MAGIC = b"BGW"
#: Longer than any single write to a TUN device can wait for.
_FOREVER = 3600.0


def _make_host(address: str) -> tuple[int, int]:
    """Descriptors of a new namespace and of its TUN device. Leaves the process in that namespace."""
    # os.unshare is new in Python 3.12.
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "unshare: no new network namespace")
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", b"line", IFF_TUN_NO_PI))
    for words in (
        "link set lo up",
        f"addr add {address}/24 dev line",
        f"link set line mtu {MTU} txqueuelen 10000 up",
        # To the address whose route a rank uses when it knows no peer. Not a default route: to look up names would take
        # seconds instead of failing at once.
        "route add 192.0.2.0/24 dev line",
    ):
        subprocess.run(["ip", *words.split()], check=True, stdout=subprocess.DEVNULL)
    return os.open("/proc/self/ns/net", os.O_RDONLY), tun


class Line:
    """The rules for packets from one host to another."""

    def __init__(
        self, drop: bool = False, delay: float = 0.0, rate: float = 0.0, corrupt: str = "", longest: int = 0
    ) -> None:
        self.drop = drop
        #: Bytes of the longest packet that is not dropped, 0 for any.
        self.longest = longest
        #: Seconds.
        self.delay = delay
        #: Bytes per second, 0 for any.
        self.rate = rate
        #: "byte": one byte of a payload, once; "header": one of a message's header, once, with a checksum that fits.
        self.corrupt = corrupt
        self._free_at = 0.0

    def leaves_at(self, now: float, size: int) -> float | None:
        """When a packet reaches the other end; None when it never does."""
        if self.drop or (self.longest and size > self.longest) or (self.rate and self._free_at - now > QUEUE_S):
            return None
        if self.rate:
            now = self._free_at = max(now, self._free_at) + size / self.rate
        return now + self.delay

    def change(self, packet: bytes) -> bytes:
        """The packet as it arrives."""
        start = (packet[0] & 15) * 4
        if not self.corrupt or packet[9] != 6:
            return packet
        payload = start + (packet[start + 12] >> 4) * 4
        place = packet.find(MAGIC, payload) if self.corrupt == "header" else (payload + len(packet)) // 2
        if place < 0 or payload >= len(packet):
            return packet
        changed = bytearray(packet)
        # Within the header: the kind of operation.
        place += 4 if self.corrupt == "header" else 0
        if place >= len(packet):
            return packet
        changed[place] ^= 0x40
        if self.corrupt == "header":
            changed[start + 16 : start + 18] = b"\0\0"
            changed[start + 16 : start + 18] = struct.pack("!H", _checksum(bytes(changed), start))
        self.corrupt = ""
        return bytes(changed)


def _checksum(packet: bytes, start: int) -> int:
    """Returns the checksum of a TCP segment over IPv4 (RFC 9293, 3.1)."""
    segment = packet[start:]
    covered = packet[12:20] + struct.pack("!HH", 6, len(segment)) + segment + b"\0" * (len(segment) % 2)
    total = sum(struct.unpack(f"!{len(covered) // 2}H", covered))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


class Switch:
    """Passes packets on until the input ends."""

    def __init__(self, tuns: list[int]) -> None:
        self._tuns = tuns
        self._perfect = Line()
        self._lines: dict[tuple[int, int], Line] = {}
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self._count = 0

    def serve(self) -> None:
        poll = select.epoll()
        hosts = {tun: host for host, tun in enumerate(self._tuns)}
        for descriptor in (0, *self._tuns):
            poll.register(descriptor, select.EPOLLIN)
        while True:
            left = self._waiting[0][0] - time.monotonic() if self._waiting else _FOREVER
            for ready, _ in poll.poll(max(left, 0.0)):
                if ready in hosts:
                    self._take(hosts[ready])
                elif not self._obey():
                    return
            self._deliver()

    def _obey(self) -> bool:
        line = sys.stdin.readline()
        if not line:
            return False
        rules: dict[str, Any] = json.loads(line)
        self._lines = {}
        for name, rule in rules.items():
            source, target = map(int, name.split(">"))
            self._lines[source, target] = Line(**rule)
        if not rules:
            self._waiting.clear()
        print(json.dumps(time.monotonic()), flush=True)
        return True

    def _take(self, source: int) -> None:
        # Not all that is there: the other hosts take turns.
        for _ in range(64):
            try:
                packet = os.read(self._tuns[source], 65536)
            except BlockingIOError:
                return
            if packet[0] >> 4 != 4:
                continue
            target = packet[19] - 1
            if not 0 <= target < len(self._tuns):
                continue
            line = self._lines.get((source, target))
            if line is None:
                self._write(target, packet)
                continue
            now = time.monotonic()
            at = line.leaves_at(now, len(packet))
            if at is None:
                continue
            packet = line.change(packet)
            if at <= now:
                self._write(target, packet)
            else:
                self._count += 1
                heapq.heappush(self._waiting, (at, self._count, target, packet))

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now:
            _, _, target, packet = heapq.heappop(self._waiting)
            self._write(target, packet)

    def _write(self, target: int, packet: bytes) -> None:
        # As on a full line: TCP sends it again.
        with contextlib.suppress(BlockingIOError):
            os.write(self._tuns[target], packet)


def main() -> None:
    """Arguments: the addresses of the hosts, whose last byte counts from 1."""
    made = [_make_host(address) for address in sys.argv[1:]]
    print(json.dumps([f"/proc/{os.getpid()}/fd/{namespace}" for namespace, _ in made]), flush=True)
    Switch([tun for _, tun in made]).serve()


if __name__ == "__main__":
    main()
