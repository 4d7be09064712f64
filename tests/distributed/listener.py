"""Records every TCP segment that the interfaces of a network namespace send or receive, and puts streams together.

As a program it writes the segments to a file until its input ends: `python listener.py FILE`.
"""

from __future__ import annotations

import pickle
import select
import socket
import struct
import sys
from collections import defaultdict
from pathlib import Path

# Of <linux/if_ether.h>, <asm-generic/socket.h> and <netinet/in.h>.
ETH_P_ALL, SO_RCVBUFFORCE, IPV4, TCP = 0x0003, 33, 0x0800, 6

#: Content types of TLS records, and the longest ciphertext (RFC 8446, section 5).
CONTENT_TYPES, LONGEST = range(20, 24), (16 << 10) + 256

Flow = tuple[bytes, int, bytes, int]


def listen(path: Path) -> None:
    """Records until the input ends."""
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL)) as line:
        # What does not fit into the buffer is lost, and the streams have gaps then.
        line.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 256 << 20)
        print("listens", flush=True)
        segments = []
        while True:
            ready = select.select([line, sys.stdin], [], [])[0]
            if line in ready:
                segments.append(line.recv(1 << 17))
            elif sys.stdin in ready:
                break
    path.write_bytes(pickle.dumps([segment for segment in segments if is_tcp(segment)]))


def is_tcp(frame: bytes) -> bool:
    """Returns True if a frame has a segment of TCP over IPv4."""
    return int.from_bytes(frame[12:14], "big") == IPV4 and frame[14 + 9] == TCP


def streams(frames: list[bytes]) -> dict[Flow, bytes]:
    """Returns the bytes that each end of each connection sent. Raises AssertionError if the listener was too slow."""
    starts: dict[Flow, int] = {}
    pieces: dict[Flow, dict[int, bytes]] = defaultdict(dict)
    for frame in frames:
        packet = frame[14:]
        ip_header, total = (packet[0] & 15) * 4, int.from_bytes(packet[2:4], "big")
        segment = packet[ip_header : total or len(packet)]
        source, destination, number = struct.unpack("!HHI", segment[:8])
        flow = (packet[12:16], source, packet[16:20], destination)
        body = segment[(segment[12] >> 4) * 4 :]
        if segment[13] & 2:
            starts[flow] = number
        if body:
            known = pieces[flow].get(number, b"")
            pieces[flow][number] = max(known, body, key=len)
    found = {}
    for flow, parts in pieces.items():
        assert flow in starts, f"{flow}: it was recorded without its beginning"
        whole = bytearray()
        # Sequence numbers begin anywhere and wrap around.
        for at, body in sorted(((number - starts[flow] - 1) % (1 << 32), body) for number, body in parts.items()):
            assert at <= len(whole), f"{flow}: {at - len(whole)} bytes are missing after {len(whole)}"
            whole[at : at + len(body)] = body
        found[flow] = bytes(whole)
    return found


def not_tls(stream: bytes) -> str | None:
    """Why a stream is not a sequence of TLS records; None when it is. The last record may be cut off."""
    at = 0
    while at + 5 <= len(stream):
        kind, version, length = struct.unpack("!BHH", stream[at : at + 5])
        if kind not in CONTENT_TYPES or version not in (0x0301, 0x0303) or length > LONGEST:
            return f"no record at byte {at} of {len(stream)}: {stream[at : at + 40]!r}"
        at += 5 + length
    return None


if __name__ == "__main__":
    listen(Path(sys.argv[1]))
