"""Stream capture on the simulated driver: what is recorded, and what makes a capture invalid."""

from __future__ import annotations

import ctypes
import threading

import pytest

from tests.cuda.driver import Driver
from tests.cuda.simulated import Simulator, _simulated_driver, simulator

__all__ = ["_simulated_driver", "simulator"]


def test_captured_work_is_recorded_and_does_not_run(simulator: Simulator) -> None:
    def capture(cuda: Driver) -> list[object]:
        cuda.start()
        stream, address, pinned = cuda.stream(), cuda.memory(b"abc"), cuda.pinned(b"xyz")
        asked = [cuda.get("cuStreamIsCapturing", stream, first=False, kind=ctypes.c_int)]
        cuda.cuStreamBeginCapture_v2(stream, 0)
        asked.append(cuda.get("cuStreamIsCapturing", stream, first=False, kind=ctypes.c_int))
        status, number = ctypes.c_int(), ctypes.c_uint64()
        cuda.cuStreamGetCaptureInfo_v3(stream, ctypes.byref(status), ctypes.byref(number), 0, 0, 0, 0)
        cuda.cuMemcpyHtoDAsync_v2(address, pinned, 3, stream)
        cuda.cuMemsetD8Async(address, 1, 1, stream)
        graph = cuda.get("cuStreamEndCapture", stream, first=False)
        nodes = ctypes.c_size_t()
        cuda.cuGraphGetNodes(graph, 0, ctypes.byref(nodes))
        cuda.cuGraphDestroy(graph)
        asked.append(cuda.get("cuStreamIsCapturing", stream, first=False, kind=ctypes.c_int))
        cuda.cuStreamSynchronize(stream)
        return [asked, status.value, number.value, nodes.value, cuda.read(address, 3).decode()]

    assert simulator(capture).value == [[0, 1, 0], 1, 1, 2, "abc"]


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("cuStreamQuery", 900),
        ("cuStreamSynchronize", 900),
        ("cuCtxSynchronize", 900),
        ("cuMemAlloc_v2", 900),
        ("cuEventQuery", 900),
        ("captured cuEventQuery", 907),
        ("cuStreamWaitEvent", 905),
        ("cuMemsetD8_v2", 906),
    ],
)
def test_a_question_that_a_capture_cannot_answer_makes_it_invalid(simulator: Simulator, call: str, code: int) -> None:
    def question(cuda: Driver, call: str) -> list[int]:
        cuda.start()
        # A blocking stream, so that the legacy stream is ordered with it.
        stream, event, address = cuda.stream(0), cuda.event(), cuda.memory(b"abc")
        cuda.cuEventRecord(event, stream)
        cuda.cuStreamSynchronize(stream)
        cuda.cuStreamBeginCapture_v2(stream, 0)
        cuda.cuMemsetD8Async(address, 1, 1, stream)
        if call == "captured cuEventQuery":
            cuda.cuEventRecord(event, stream)
        calls = {
            "cuStreamQuery": (stream,),
            "cuStreamSynchronize": (stream,),
            "cuCtxSynchronize": (),
            "cuMemAlloc_v2": (ctypes.byref(ctypes.c_uint64()), 10),
            "cuEventQuery": (event,),
            "cuStreamWaitEvent": (stream, event, 0),
            "cuMemsetD8_v2": (address, 1, 1),
        }
        name = call.split()[-1]
        codes = [cuda.code(name, *calls[name])]
        codes.append(cuda.code("cuMemsetD8Async", address, 1, 1, stream))
        codes.append(cuda.get("cuStreamIsCapturing", stream, first=False, kind=ctypes.c_int))
        codes.append(cuda.code("cuStreamEndCapture", stream, ctypes.byref(ctypes.c_void_p())))
        # The stream is usable again.
        cuda.cuMemsetD8Async(address, 1, 1, stream)
        cuda.cuStreamSynchronize(stream)
        return codes

    assert simulator(question, call).value == [code, 901, 2, 901]


def test_asking_whether_a_stream_is_captured_leaves_the_capture_valid(simulator: Simulator) -> None:
    def ask(cuda: Driver) -> list[int]:
        cuda.start()
        stream, other = cuda.stream(), cuda.stream()
        cuda.cuStreamBeginCapture_v2(stream, 0)
        found = [cuda.get("cuStreamIsCapturing", each, first=False, kind=ctypes.c_int) for each in (stream, other, 0)]
        cuda.cuStreamQuery(other)
        cuda.get("cuStreamEndCapture", stream, first=False)
        return found

    assert simulator(ask).value == [1, 0, 0]


@pytest.mark.parametrize(("join", "code"), [(True, 0), (False, 904)])
def test_a_stream_that_waits_for_a_captured_event_is_captured_until_it_is_joined(
    simulator: Simulator, join: bool, code: int
) -> None:
    def fork(cuda: Driver, join: bool) -> list[int]:
        cuda.start()
        first, second, event, address = cuda.stream(), cuda.stream(), cuda.event(), cuda.memory(b"abc")
        cuda.cuStreamBeginCapture_v2(first, 0)
        cuda.cuEventRecord(event, first)
        cuda.cuStreamWaitEvent(second, event, 0)
        cuda.cuMemsetD8Async(address, 1, 1, second)
        found = [cuda.get("cuStreamIsCapturing", second, first=False, kind=ctypes.c_int)]
        if join:
            cuda.cuEventRecord(event, second)
            cuda.cuStreamWaitEvent(first, event, 0)
        found.append(cuda.code("cuStreamEndCapture", first, ctypes.byref(ctypes.c_void_p())))
        return [*found, cuda.get("cuStreamIsCapturing", second, first=False, kind=ctypes.c_int)]

    assert simulator(fork, join).value == [1, code, 0]


@pytest.mark.parametrize(("mode", "own", "other"), [(0, 900, 900), (1, 900, 0), (2, 0, 0)])
def test_the_mode_says_which_threads_are_restricted(simulator: Simulator, mode: int, own: int, other: int) -> None:
    def restricted(cuda: Driver, mode: int, where: str) -> list[int]:
        context = cuda.start()
        stream, found = cuda.stream(), []
        cuda.cuStreamBeginCapture_v2(stream, mode)

        def allocate() -> None:
            cuda.cuCtxSetCurrent(context)
            found.append(cuda.code("cuMemAlloc_v2", ctypes.byref(ctypes.c_uint64()), 10))

        if where == "other":
            thread = threading.Thread(target=allocate)
            thread.start()
            thread.join()
        else:
            if where == "exchanged":
                relaxed = ctypes.c_int(2)
                cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(relaxed))
            allocate()
        return found

    assert simulator(restricted, mode, "own").value == [own]
    assert simulator(restricted, mode, "other").value == [other]
    assert simulator(restricted, mode, "exchanged").value == [0]


def test_a_capture_ends_where_it_began(simulator: Simulator) -> None:
    def ends(cuda: Driver) -> list[int]:
        context = cuda.start()
        stream, codes, out = cuda.stream(), [], ctypes.byref(ctypes.c_void_p())
        codes.append(cuda.code("cuStreamEndCapture", stream, out))
        codes.append(cuda.code("cuStreamBeginCapture_v2", 0, 0))
        cuda.cuStreamBeginCapture_v2(stream, 0)
        codes.append(cuda.code("cuStreamBeginCapture_v2", stream, 0))

        def end() -> None:
            cuda.cuCtxSetCurrent(context)
            codes.append(cuda.code("cuStreamEndCapture", stream, out))

        thread = threading.Thread(target=end)
        thread.start()
        thread.join()
        return [*codes, cuda.code("cuStreamEndCapture", stream, out)]

    assert simulator(ends).value == [401, 900, 401, 908, 0]
