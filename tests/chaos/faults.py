"""Faults of a rank or a line, and the ranks that an error may then name. To add a fault, add a class here."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import stat
import struct
import time
from typing import TYPE_CHECKING, ClassVar

from tests.chaos.network import Rule

if TYPE_CHECKING:
    from tests.chaos.cell import Cell, RunningCell

#: Of the system call of that name, on all architectures (include/uapi/asm-generic/unistd.h).
_PIDFD_GETFD = 438


class Fault:
    """A fault; an instance belongs to one cell."""

    name: ClassVar[str]
    #: The results are right and nothing raises.
    harmless: ClassVar[bool] = False
    #: Happens on the lines between hosts.
    on_the_network: ClassVar[bool] = False
    #: The process of the rank that it hits ends.
    kills: ClassVar[bool] = False
    #: The rank that it hits notices nothing before it ends.
    freezes: ClassVar[bool] = False
    #: Nothing comes of it where no operation needs what it breaks.
    may_go_unnoticed: ClassVar[bool] = False
    #: Errors that it may cause, beside those of the action.
    errors: ClassVar[tuple[str, ...]] = ()

    def strike(self, stage: RunningCell) -> float:
        """Makes it happen. The moment, in seconds of the monotonic clock."""
        raise NotImplementedError

    def end(self, stage: RunningCell) -> None:
        """Makes it go away, once all ranks that can have noticed it."""

    def may_be_named(self, cell: Cell, by: int) -> set[int]:
        """The ranks that the error of rank `by` may name."""
        return {cell.victim}

    def left_out(self, cell: Cell) -> set[int]:
        """The ranks that the others go on without, and that may not notice that before the fault is over."""
        return {cell.victim}


class Kill(Fault):
    """The process ends without a word."""

    name = "SIGKILL"
    kills = True

    def strike(self, stage: RunningCell) -> float:
        at = time.monotonic()
        os.kill(stage.run.ranks[stage.cell.victim].pid, signal.SIGKILL)
        return at


class Freeze(Fault):
    """The process stops, and goes on when the others have noticed."""

    name = "SIGSTOP, SIGCONT"
    freezes = True

    def strike(self, stage: RunningCell) -> float:
        at = time.monotonic()
        os.kill(stage.run.ranks[stage.cell.victim].pid, signal.SIGSTOP)
        return at

    def end(self, stage: RunningCell) -> None:
        os.kill(stage.run.ranks[stage.cell.victim].pid, signal.SIGCONT)


class OnTheNetwork(Fault):
    """A fault of lines."""

    on_the_network = True

    def rules(self, cell: Cell) -> dict[tuple[int, int], Rule]:
        """Returns what happens to packets on each line."""
        raise NotImplementedError

    def strike(self, stage: RunningCell) -> float:
        assert stage.network is not None
        return stage.network.set(self.rules(stage.cell))

    def end(self, stage: RunningCell) -> None:
        assert stage.network is not None
        stage.network.set({})


def _next_host(cell: Cell) -> int:
    return (cell.host_of(cell.victim) + 1) % len(cell.hosts)


def _of_victim(cell: Cell, rule: Rule) -> dict[tuple[int, int], Rule]:
    """The rule on all lines from and to the host of the rank that is hit."""
    here = cell.host_of(cell.victim)
    others = [host for host in range(len(cell.hosts)) if host != here]
    return {line: rule for other in others for line in ((here, other), (other, here))}


class LinkDown(OnTheNetwork):
    """The host of a rank is cut off."""

    name = "link down"

    def rules(self, cell: Cell) -> dict[tuple[int, int], Rule]:
        return _of_victim(cell, {"drop": True})

    def may_be_named(self, cell: Cell, by: int) -> set[int]:
        here = cell.host_of(cell.victim)
        if cell.host_of(by) != here:
            return set(cell.hosts[here])
        return {rank for host, ranks in enumerate(cell.hosts) if host != here for rank in ranks}


class OneLine(OnTheNetwork):
    """A fault of one line in one direction, both ends of which may be named."""

    def may_be_named(self, cell: Cell, by: int) -> set[int]:
        return {*cell.hosts[cell.host_of(cell.victim)], *cell.hosts[_next_host(cell)]}

    def left_out(self, cell: Cell) -> set[int]:
        # Of two hosts that do not reach each other the higher goes. Without a third, each goes on without the other.
        higher = max(cell.host_of(cell.victim), _next_host(cell))
        return set(cell.hosts[higher]) if len(cell.hosts) > 2 else {cell.victim}


class OneWayLoss(OneLine):
    """Drops all packets from one host to one other host. Packets in the other direction arrive."""

    name = "one-way loss"

    def rules(self, cell: Cell) -> dict[tuple[int, int], Rule]:
        return {(cell.host_of(cell.victim), _next_host(cell)): {"drop": True}}


class CorruptByte(OneLine):
    """One byte of a packet is changed. TCP's checksum detects it, and the packet is sent again."""

    name = "a corrupt byte"
    harmless = True

    def rules(self, cell: Cell) -> dict[tuple[int, int], Rule]:
        return {(cell.host_of(cell.victim), _next_host(cell)): {"corrupt": "byte"}}


class CorruptHeader(OneLine):
    """One byte of a message's header is changed, and the checksum of TCP with it, as by a faulty adapter."""

    name = "a corrupt byte, checksum changed too"
    # TCP may send a packet twice, and only the first is read.
    may_go_unnoticed = True
    errors = ("MismatchError", "BaguaError")

    def rules(self, cell: Cell) -> dict[tuple[int, int], Rule]:
        return {(cell.host_of(cell.victim), _next_host(cell)): {"corrupt": "header"}}


class Delay(OnTheNetwork):
    """All packets between hosts come later."""

    name = "200 ms delay"
    harmless = True

    def rules(self, cell: Cell) -> dict[tuple[int, int], Rule]:
        hosts = range(len(cell.hosts))
        return {(source, target): {"delay": 0.2} for source in hosts for target in hosts if source != target}


class SlowLine(OnTheNetwork):
    """The host of a rank has 4 Mbit/s in each direction."""

    name = "slow line"
    harmless = True

    def rules(self, cell: Cell) -> dict[tuple[int, int], Rule]:
        return _of_victim(cell, {"rate": 4e6 / 8})


class CloseStream(Fault):
    """A connection between two ranks is closed under them, as by a middlebox that forgot it.

    Between hosts that is the stream that was opened last between two first ranks of hosts. In shared memory there are
    no streams, only the Unix sockets of the control connections: it is one of those.
    """

    name = "a stream closed"
    may_go_unnoticed = True

    def __init__(self) -> None:
        self._ends: set[int] = set()

    def strike(self, stage: RunningCell) -> float:
        cell = stage.cell
        # The coordinator has a control connection to every rank. Streams are there between ranks that exchange data.
        following = (cell.victim + 1) % cell.ranks
        pairs = [(cell.victim, 0 if cell.transport == "shm" and cell.victim else following)]
        if cell.transport == "hier":
            one, other = cell.hosts[:2]
            # The second has a connection in a world where not every two ranks have one.
            pairs = [(one[0], other[0]), (one[-1], other[0])]
        # Sockets come and go while groups are made.
        until = time.monotonic() + 5.0
        while time.monotonic() < until:
            for pair in pairs:
                for stream in _between(stage, *pair):
                    self._ends = set(pair)
                    at = time.monotonic()
                    with stream, contextlib.suppress(OSError):
                        stream.shutdown(socket.SHUT_RDWR)
                        return at
        raise RuntimeError(f"ranks {pairs} have no connection")

    def may_be_named(self, cell: Cell, by: int) -> set[int]:
        return self._ends


def _between(stage: RunningCell, first: int, second: int) -> list[socket.socket]:
    """A connection between two ranks, as a copy of the first rank's descriptor, if there is one."""
    theirs = stage.run.ranks[second].pid
    family = socket.AF_UNIX if stage.network is None else socket.AF_INET
    ours, others = _connections(stage.run.ranks[first].pid, family), _connections(theirs, family)
    names = {stream.getsockname() for stream in others}

    def leads_there(stream: socket.socket) -> bool:
        if stage.network is not None:
            try:
                return stream.getpeername() in names
            except OSError:
                # It has ended since.
                return False
        pid, _, _ = struct.unpack("3i", stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return bool(pid == theirs)

    # torch's store and gloo opened theirs before the first operation opened a lane.
    found = [stream for stream in ours if leads_there(stream)][-1:]
    for stream in (*ours, *others):
        if stream not in found:
            stream.close()
    return found


def _connections(pid: int, family: int) -> list[socket.socket]:
    """Copies of all connected sockets of a process, in the order of their numbers."""
    found = []
    process = os.pidfd_open(pid)
    try:
        for number in sorted(map(int, os.listdir(f"/proc/{pid}/fd"))):
            copied = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, process, number, 0)
            if copied < 0:
                continue
            if not stat.S_ISSOCK(os.fstat(copied).st_mode):
                os.close(copied)
                continue
            stream = socket.socket(fileno=copied)
            try:
                stream.getpeername()
            except OSError:
                stream.close()
                continue
            if stream.family == family and stream.type == socket.SOCK_STREAM:
                found.append(stream)
            else:
                stream.close()
    finally:
        os.close(process)
    return found


FAULTS: dict[str, type[Fault]] = {
    fault.name: fault
    for fault in (
        Kill,
        Freeze,
        LinkDown,
        OneWayLoss,
        CloseStream,
        CorruptByte,
        CorruptHeader,
        Delay,
        SlowLine,
    )
}
