"""The simulated driver's streams and events: how late work begins, in which order it runs, and who has waited."""

from __future__ import annotations

import ctypes
import threading
import time

import pytest

from tests.cuda.driver import HOST_FUNCTION, Driver, until
from tests.cuda.simulated import NEVER, Simulator, _simulated_driver, simulator

__all__ = ["_simulated_driver", "simulator"]


# --- when work begins -------------------------------------------------------------------------------------------------


def test_work_begins_as_late_as_it_may(simulator: Simulator) -> None:
    def late(cuda: Driver) -> str:
        cuda.start()
        stream, address, pinned = cuda.stream(), cuda.memory(5), cuda.pinned(b"early")
        cuda.cuMemcpyHtoDAsync_v2(address, pinned, 5, stream)
        # A caller that does not wait for the copy before it writes copies this.
        pinned.raw = b"wrong"
        cuda.cuStreamSynchronize(stream)
        text = cuda.read(address, 5).decode()
        cuda.cuMemFree_v2(address)
        cuda.free_pinned(pinned)
        cuda.cuStreamDestroy_v2(stream)
        return text

    ended = simulator(late)
    assert ended.value == "wrong"
    assert ended.clean
    assert ended.report["host_waits"]["cuStreamSynchronize@main"] == 1


def test_work_that_no_call_waits_for_begins_after_the_delay(simulator: Simulator) -> None:
    def delayed(cuda: Driver) -> None:
        cuda.start()
        stream, pinned = cuda.stream(), cuda.pinned(b"\0")
        address = cuda.memory(b"x")
        begun = time.monotonic()
        cuda.cuMemcpyDtoHAsync_v2(pinned, address, 1, stream)
        until(lambda: pinned.raw == b"x")
        # However long this thread did not run meanwhile.
        assert time.monotonic() - begun >= 0.02

    simulator(delayed, BAGUA_SIM_DELAY_US=20000)


@pytest.mark.parametrize("poll", ["cuStreamQuery", "cuEventQuery"])
def test_a_poll_lets_work_begin_and_is_no_host_wait(simulator: Simulator, poll: str) -> None:
    def polled(cuda: Driver, poll: str) -> int:
        cuda.start()
        stream, pinned, address, event = cuda.stream(), cuda.pinned(b"\0"), cuda.memory(b"x"), cuda.event()
        cuda.cuMemcpyDtoHAsync_v2(pinned, address, 1, stream)
        cuda.cuEventRecord(event, stream)
        first = cuda.code(poll, event if poll == "cuEventQuery" else stream)
        until(lambda: cuda.code(poll, event if poll == "cuEventQuery" else stream) == 0)
        assert pinned.raw == b"x"
        return first

    ended = simulator(polled, poll)
    assert ended.value == 600
    # The copy to the device that made the memory.
    assert ended.report["host_waits"] == {"cuMemcpyHtoD_v2@main": 1}


def test_a_host_function_runs_in_its_place_and_may_not_call_the_driver(simulator: Simulator) -> None:
    def host_function(cuda: Driver) -> list[object]:
        cuda.start()
        stream, pinned, address = cuda.stream(), cuda.pinned(b"\0"), cuda.memory(b"x")
        seen, done = [], threading.Event()

        @HOST_FUNCTION
        def function(data: int) -> None:
            seen.extend([data, pinned.raw.decode(), cuda.code("cuStreamQuery", 0)])
            done.set()

        cuda.cuMemcpyDtoHAsync_v2(pinned, address, 1, stream)
        cuda.cuLaunchHostFunc(stream, function, 77)
        assert done.wait(60)
        return seen

    ended = simulator(host_function)
    assert ended.value == [77, "x", 800]
    assert ended.report["faults"] == ["cuStreamQuery is called by a host function"]


# --- order ------------------------------------------------------------------------------------------------------------


def across_streams(cuda: Driver) -> str:
    cuda.start()
    first, second = cuda.stream(), cuda.stream()
    event, address, pinned = cuda.event(), cuda.memory(b"old"), cuda.pinned(b"new")
    out = cuda.pinned(3)
    cuda.cuMemcpyHtoDAsync_v2(address, pinned, 3, first)
    cuda.cuEventRecord(event, first)
    cuda.cuStreamWaitEvent(second, event, 0)
    # Only the record before the wait counts: this one is not waited for.
    cuda.cuMemsetD8Async(address, 120, 3, first)
    cuda.cuEventRecord(event, first)
    cuda.cuMemcpyDtoHAsync_v2(out, address, 3, second)
    cuda.cuStreamSynchronize(second)
    text = out.raw.decode()
    cuda.cuStreamSynchronize(first)
    return text


def test_a_stream_waits_for_an_event_of_another(simulator: Simulator) -> None:
    ended = simulator(across_streams)
    assert ended.value == "new"
    assert not ended.report["faults"]


def test_with_no_wait_a_stream_does_not_wait(simulator: Simulator) -> None:
    assert simulator(across_streams, BAGUA_SIM_BREAK="no-wait").value == "old"


def test_streams_without_an_event_are_not_ordered(simulator: Simulator) -> None:
    def unordered(cuda: Driver) -> str:
        cuda.start()
        first, second = cuda.stream(), cuda.stream()
        address, pinned, out = cuda.memory(b"old"), cuda.pinned(b"new"), cuda.pinned(3)
        cuda.cuMemcpyHtoDAsync_v2(address, pinned, 3, first)
        cuda.cuMemcpyDtoHAsync_v2(out, address, 3, second)
        cuda.cuStreamSynchronize(second)
        return out.raw.decode()

    assert simulator(unordered).value == "old"


@pytest.mark.parametrize(("flags", "stream"), [(0, "made"), (1, "made"), (0, "per-thread")])
def test_the_legacy_stream_is_ordered_with_blocking_streams(simulator: Simulator, flags: int, stream: str) -> None:
    def legacy(cuda: Driver, flags: int, which: str) -> list[str]:
        cuda.start()
        seen = []
        stream = 2 if which == "per-thread" else cuda.stream(flags)
        for before, after in ((stream, 0), (1, stream)):
            address, pinned, out = cuda.memory(b"old"), cuda.pinned(b"new"), cuda.pinned(3)
            cuda.cuMemcpyHtoDAsync_v2(address, pinned, 3, before)
            cuda.cuMemcpyDtoHAsync_v2(out, address, 3, after)
            event = cuda.event()
            cuda.cuEventRecord(event, after)
            cuda.cuEventSynchronize(event)
            seen.append(out.raw.decode())
        return seen

    assert simulator(legacy, flags, stream).value == (["old", "old"] if flags else ["new", "new"])


def test_the_legacy_stream_is_idle_when_blocking_streams_are(simulator: Simulator) -> None:
    def idle(cuda: Driver) -> str:
        cuda.start()
        stream, address, out = cuda.stream(0), cuda.memory(b"new"), cuda.pinned(b"old")
        cuda.cuMemcpyDtoHAsync_v2(out, address, 3, stream)
        cuda.cuStreamSynchronize(0)
        return out.raw.decode()

    assert simulator(idle).value == "new"


def test_events_know_whether_and_when(simulator: Simulator) -> None:
    def events(cuda: Driver) -> list[object]:
        cuda.start()
        stream, first, second, untimed = cuda.stream(), cuda.event(0), cuda.event(0), cuda.event()
        time = ctypes.c_float(-1)
        never = [cuda.code("cuEventQuery", first), cuda.code("cuEventSynchronize", first)]
        unrecorded = cuda.code("cuEventElapsedTime_v2", ctypes.byref(time), first, second)
        for event in (first, untimed, second):
            cuda.cuEventRecord(event, stream)
        pending = cuda.code("cuEventElapsedTime_v2", ctypes.byref(time), first, second)
        cuda.cuEventSynchronize(second)
        cuda.cuEventElapsedTime_v2(ctypes.byref(time), first, second)
        without = cuda.code("cuEventElapsedTime_v2", ctypes.byref(time), first, untimed)
        cuda.cuEventDestroy_v2(first)
        destroyed = cuda.code("cuEventRecord", first, stream)
        inter_process = cuda.code("cuEventCreate", ctypes.byref(ctypes.c_void_p()), 4)
        return [*never, unrecorded, pending, time.value >= 0, without, destroyed, inter_process]

    assert simulator(events).value == [0, 0, 400, 600, True, 400, 400, 801]


def test_streams_know_their_properties(simulator: Simulator) -> None:
    def properties(cuda: Driver) -> list[object]:
        context = cuda.start()
        least, greatest, stream = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
        cuda.cuCtxGetStreamPriorityRange(ctypes.byref(least), ctypes.byref(greatest))
        cuda.cuStreamCreateWithPriority(ctypes.byref(stream), 1, -100)
        priority = cuda.get("cuStreamGetPriority", stream, first=False, kind=ctypes.c_int)
        flags = cuda.get("cuStreamGetFlags", stream, first=False, kind=ctypes.c_uint)
        owner = cuda.get("cuStreamGetCtx", stream, first=False)
        legacy = cuda.get("cuStreamGetCtx", 1, first=False)
        cuda.cuStreamDestroy_v2(stream)
        gone = cuda.code("cuStreamQuery", stream)
        return [least.value, greatest.value, priority, flags, owner == context, legacy == context, gone]

    ended = simulator(properties)
    assert ended.value == [0, -5, -5, 1, True, True, 400]
    assert len(ended.report["faults"]) == 1


# --- pageable memory --------------------------------------------------------------------------------------------------


def test_pageable_memory_is_read_at_the_call_and_written_before_it_returns(simulator: Simulator) -> None:
    def pageable(cuda: Driver) -> list[str]:
        cuda.start()
        stream, address = cuda.stream(), cuda.memory(5)
        own, out = ctypes.create_string_buffer(b"first", 5), ctypes.create_string_buffer(5)
        cuda.cuMemcpyHtoDAsync_v2(address, own, 5, stream)
        own.raw = b"wrong"
        cuda.cuMemcpyDtoHAsync_v2(out, address, 5, stream)
        return [out.raw.decode()]

    ended = simulator(pageable)
    assert ended.value == ["first"]
    assert ended.report["host_waits"] == {"cuMemcpyDtoHAsync_v2@main": 1}


def test_host_waits_name_the_function_and_the_thread(simulator: Simulator) -> None:
    def waits(cuda: Driver) -> None:
        context = cuda.start()
        address = cuda.memory(b"xyz")

        def work() -> None:
            ctypes.CDLL(None).pthread_setname_np(ctypes.c_void_p(threading.get_ident()), b"lane-7")
            cuda.cuCtxSetCurrent(context)
            cuda.cuCtxSynchronize()
            cuda.cuMemFree_v2(address)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        cuda.cuStreamQuery(0)

    assert simulator(waits).report["host_waits"] == {
        "cuMemcpyHtoD_v2@main": 1,
        "cuCtxSynchronize@lane-7": 1,
        "cuMemFree_v2@lane-7": 1,
    }


# --- lifetimes --------------------------------------------------------------------------------------------------------


def ordered_free(cuda: Driver, wait: bool) -> list[object]:
    cuda.start()
    first, second, event = cuda.stream(), cuda.stream(), cuda.event()
    out = cuda.pinned(4)
    address = int(cuda.get("cuMemAllocAsync", 4, first))
    cuda.cuMemsetD8Async(address, 65, 4, first)
    cuda.cuEventRecord(event, first)
    cuda.cuStreamWaitEvent(second, event, 0)
    cuda.cuMemcpyDtoHAsync_v2(out, address, 4, second)
    if wait:
        cuda.cuEventRecord(event, second)
        cuda.cuStreamWaitEvent(first, event, 0)
    cuda.cuMemFreeAsync(address, first)
    codes = [cuda.code("cuStreamSynchronize", first), cuda.code("cuStreamSynchronize", second)]
    return [codes, out.raw.hex()]


def test_memory_of_a_stream_is_valid_until_its_free_is_reached(simulator: Simulator) -> None:
    ended = simulator(ordered_free, True)
    assert ended.value == [[0, 0], "41414141"]
    assert not ended.report["faults"]
    assert not [name for name in ended.report["host_waits"] if "Mem" in name]


def test_a_free_that_is_not_ordered_after_all_uses_is_a_fault(simulator: Simulator) -> None:
    ended = simulator(ordered_free, False)
    assert ended.value[0] == [0, 700]
    freed, used = ended.report["faults"]
    assert "is freed before work that uses it has ended" in freed
    assert "was freed before the work that uses it ran" in used


def test_with_eager_free_memory_is_gone_at_once(simulator: Simulator) -> None:
    ended = simulator(ordered_free, True, BAGUA_SIM_BREAK="eager-free")
    assert 700 in ended.value[0]
    assert "was freed before the work that uses it ran" in ended.report["faults"][0]


def test_memory_of_a_stream_is_not_there_before_its_place(simulator: Simulator) -> None:
    def early(cuda: Driver) -> list[int]:
        cuda.start()
        first, second = cuda.stream(), cuda.stream()
        address = int(cuda.get("cuMemAllocAsync", 4, first))
        cuda.cuMemsetD8Async(address, 65, 4, second)
        # The error stays with the context.
        return [cuda.code("cuStreamSynchronize", second), cuda.code("cuStreamSynchronize", first)]

    ended = simulator(early)
    assert ended.value == [700, 700]
    assert "before cuMemAllocAsync's place" in ended.report["faults"][0]


def test_a_plain_free_waits_for_the_device(simulator: Simulator) -> None:
    def plain(cuda: Driver) -> str:
        cuda.start()
        stream, address, out = cuda.stream(), cuda.memory(b"abc"), cuda.pinned(3)
        cuda.cuMemcpyDtoHAsync_v2(out, address, 3, stream)
        cuda.cuMemFree_v2(address)
        return out.raw.decode(errors="replace")

    ended = simulator(plain)
    assert ended.value == "abc"
    assert not ended.report["faults"]
    assert simulator(plain, BAGUA_SIM_BREAK="eager-free").value != "abc"


@pytest.mark.parametrize("registered", [False, True])
def test_pinned_memory_that_goes_while_work_uses_it_is_a_fault(simulator: Simulator, registered: bool) -> None:
    def gone(cuda: Driver, registered: bool) -> None:
        cuda.start()
        stream, address = cuda.stream(), cuda.memory(b"abc")
        host = ctypes.create_string_buffer(3) if registered else cuda.pinned(3)
        if registered:
            cuda.cuMemHostRegister_v2(host, 3, 0)
        cuda.cuMemcpyDtoHAsync_v2(host, address, 3, stream)
        (cuda.cuMemHostUnregister if registered else cuda.cuMemFreeHost)(ctypes.addressof(host))

    (fault,) = simulator(gone, registered).report["faults"]
    assert "is still used by enqueued work" in fault


def test_with_short_copy_asynchronous_copies_lose_a_byte(simulator: Simulator) -> None:
    def copies(cuda: Driver) -> list[str]:
        cuda.start()
        stream, address, out = cuda.stream(), cuda.memory(b"abc"), cuda.pinned(b"...")
        cuda.cuMemcpyDtoHAsync_v2(out, address, 3, stream)
        cuda.cuStreamSynchronize(stream)
        return [cuda.read(address, 3).decode(), out.raw.decode()]

    assert simulator(copies).value == ["abc", "abc"]
    assert simulator(copies, BAGUA_SIM_BREAK="no-wait,short-copy").value == ["abc", "ab."]


def test_a_destroyed_stream_still_does_what_was_enqueued(simulator: Simulator) -> None:
    def destroyed(cuda: Driver) -> str:
        cuda.start()
        stream, address, out = cuda.stream(), cuda.memory(b"abc"), cuda.pinned(3)
        cuda.cuMemcpyDtoHAsync_v2(out, address, 3, stream)
        cuda.cuStreamDestroy_v2(stream)
        cuda.cuCtxSynchronize()
        return out.raw.decode()

    assert simulator(destroyed).value == "abc"


def test_many_operations_of_many_threads_keep_their_order(simulator: Simulator) -> None:
    def many(cuda: Driver) -> list[bool]:
        # The program has what tests.cuda.driver defines, and this.
        from tests.waits import on_threads

        context = cuda.start()
        right = []

        def work(number: int) -> None:
            cuda.cuCtxSetCurrent(context)
            streams, event = [cuda.stream() for _ in range(3)], cuda.event()
            address, out = cuda.memory(256), cuda.pinned(256)
            for turn in range(200):
                stream, after = streams[turn % 3], streams[(turn + 1) % 3]
                cuda.cuMemsetD8Async(address, (turn + number) % 256, 256, stream)
                cuda.cuMemcpyDtoHAsync_v2(out, address, 256, stream)
                cuda.cuEventRecord(event, stream)
                cuda.cuStreamWaitEvent(after, event, 0)
            cuda.cuEventSynchronize(event)
            right.append(out.raw == bytes([(199 + number) % 256]) * 256)

        on_threads(work, range(4))
        return right

    for delay in (0, 100, NEVER):
        ended = simulator(many, BAGUA_SIM_DELAY_US=delay)
        assert ended.value == [True] * 4
        assert not ended.report["faults"]
