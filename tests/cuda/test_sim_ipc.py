"""Memory and events of other processes on the simulated driver."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading

import pytest

from tests.cuda.driver import HOST_FUNCTION, Driver, Handle, until
from tests.cuda.simulated import Simulator, _simulated_driver, simulator

__all__ = ["_simulated_driver", "simulator"]


def line(process: subprocess.Popen[str]) -> str:
    """The next line that a scenario prints."""
    assert process.stdout is not None
    text = process.stdout.readline().strip()
    assert text, process.communicate(timeout=60)
    return text


def tell(process: subprocess.Popen[str]) -> None:
    """Lets a scenario go on that waits for a line."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def owner(cuda: Driver, mode: str) -> str:
    """Shares memory and an event, whose record comes after a fill that has not begun."""
    cuda.start()
    stream, address, event = cuda.stream(), cuda.memory(b"old"), cuda.event(6)
    handles = Handle(), Handle()
    cuda.cuIpcGetMemHandle(ctypes.byref(handles[0]), address)
    cuda.cuIpcGetEventHandle(ctypes.byref(handles[1]), event)
    cuda.cuMemsetD8Async(address, ord("n"), 3, stream)
    cuda.cuEventRecord(event, stream)
    print(handles[0].text(), flush=True)
    print(handles[1].text(), flush=True)
    sys.stdin.readline()
    if mode == "free":
        cuda.cuMemFree_v2(address)
        print("freed", flush=True)
        sys.stdin.readline()
        return ""
    data = cuda.read(address, 3).decode()
    cuda.cuMemFree_v2(address)
    cuda.cuEventDestroy_v2(event)
    cuda.cuStreamDestroy_v2(stream)
    return data


def reader(cuda: Driver, memory: str, event: str, mode: str) -> list[object]:
    """Reads after the event, on a stream; then writes, or says what it gets when the owner has freed the memory."""
    cuda.start()
    stream, out, mine = cuda.stream(), cuda.pinned(3), ctypes.c_void_p()
    address = int(cuda.get("cuIpcOpenMemHandle_v2", Handle.of(memory), 1))
    again = int(cuda.get("cuIpcOpenMemHandle_v2", Handle.of(memory), 1))
    cuda.cuIpcOpenEventHandle(ctypes.byref(mine), Handle.of(event))
    cuda.cuStreamWaitEvent(stream, mine, 0)
    cuda.cuMemcpyDtoHAsync_v2(out, address, 3, stream)
    cuda.cuStreamSynchronize(stream)
    seen = [address == again, out.raw.decode(), cuda.code("cuMemFree_v2", address)]
    if mode == "free":
        print("read", flush=True)
        sys.stdin.readline()
        cuda.cuMemsetD8Async(address, 1, 1, stream)
        return [*seen, cuda.code("cuStreamSynchronize", stream)]
    cuda.cuMemsetD8_v2(address, ord("w"), 2)
    cuda.cuCtxSynchronize()
    cuda.cuIpcCloseMemHandle(address)
    cuda.cuIpcCloseMemHandle(address)
    seen.append(cuda.code("cuIpcCloseMemHandle", address))
    cuda.cuEventDestroy_v2(mine)
    cuda.free_pinned(out)
    cuda.cuStreamDestroy_v2(stream)
    return seen


@pytest.mark.parametrize("broken", [False, True])
def test_a_process_reads_and_writes_what_another_owns_in_the_order_of_its_event(
    simulator: Simulator, broken: bool
) -> None:
    first = simulator.start(owner, "keep")
    second = simulator.start(reader, line(first), line(first), "keep", BAGUA_SIM_BREAK="no-wait" if broken else "")
    read = simulator.end(second)
    assert read.value == [True, "old" if broken else "nnn", 1, 1]
    # Memory that another process owns is not freed here, and is closed as often as it was opened.
    assert len(read.report["faults"]) == 2
    assert read.report["leaked"] == 0
    owned = simulator.end(first, "\n")
    assert broken or owned.value == "wwn"
    assert owned.clean


def test_memory_that_is_freed_while_another_process_has_it_is_a_fault_of_both(simulator: Simulator) -> None:
    first = simulator.start(owner, "free")
    second = simulator.start(reader, line(first), line(first), "free")
    assert line(second) == "read"
    tell(first)
    assert line(first) == "freed"
    used = simulator.end(second, "\n")
    assert used.value == [True, "nnn", 1, 700]
    assert "was freed by the process that owns it" in used.report["faults"][-1]
    owned = simulator.end(first, "\n")
    assert ["1 other process(es) have it open" in fault for fault in owned.report["faults"]] == [True]


def test_a_wait_for_a_process_that_was_killed_ends(simulator: Simulator) -> None:
    def waiter(cuda: Driver, event: str) -> int:
        cuda.start()
        stream, mine = cuda.stream(), ctypes.c_void_p()
        cuda.cuIpcOpenEventHandle(ctypes.byref(mine), Handle.of(event))
        cuda.cuStreamWaitEvent(stream, mine, 0)
        print("waits", flush=True)
        sys.stdin.readline()
        until(lambda: cuda.code("cuStreamQuery", stream) == 0)
        return cuda.code("cuEventQuery", mine)

    # A recorder whose stream never gets to the record, because a host function holds it.
    def recorder(cuda: Driver) -> None:
        cuda.start()
        stream, event, handle = cuda.stream(), cuda.event(6), Handle()
        held = threading.Event()
        function = HOST_FUNCTION(lambda _: held.wait() and None)
        cuda.cuLaunchHostFunc(stream, function, 0)
        cuda.cuEventRecord(event, stream)
        cuda.cuIpcGetEventHandle(ctypes.byref(handle), event)
        print(handle.text(), flush=True)
        sys.stdin.readline()

    first = simulator.start(recorder)
    second = simulator.start(waiter, line(first))
    assert line(second) == "waits"
    first.kill()
    first.communicate(timeout=60)
    assert simulator.end(second, "\n").value == 0


def test_what_cannot_be_shared_is_refused(simulator: Simulator) -> None:
    def refused(cuda: Driver) -> list[int]:
        cuda.start()
        handle, out = Handle(), ctypes.byref(ctypes.c_void_p())
        address, ordered = cuda.memory(10), cuda.get("cuMemAllocAsync", 10, cuda.stream())
        place = ctypes.byref(handle)
        codes = [
            cuda.code("cuIpcGetMemHandle", place, ordered),
            cuda.code("cuIpcGetMemHandle", place, address + 1),
            cuda.code("cuIpcGetEventHandle", place, cuda.event()),
        ]
        cuda.cuIpcGetMemHandle(place, address)
        codes.append(cuda.code("cuIpcOpenMemHandle_v2", out, handle, 1))
        cuda.cuIpcGetEventHandle(place, cuda.event(6))
        codes.append(cuda.code("cuIpcOpenEventHandle", out, handle))
        return codes

    assert simulator(refused).value == [1, 1, 400, 201, 201]


def test_a_handle_of_memory_that_is_gone_opens_nothing(simulator: Simulator) -> None:
    first = simulator.start(owner, "free")
    memory = line(first)
    line(first)
    tell(first)
    assert line(first) == "freed"

    def late(cuda: Driver, memory: str) -> int:
        cuda.start()
        return cuda.code("cuIpcOpenMemHandle_v2", ctypes.byref(ctypes.c_uint64()), Handle.of(memory), 1)

    assert simulator(late, memory).value == 1
    simulator.end(first, "\n")
