"""The simulated driver's devices, memory and copies: what it refuses, and what it says of it."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import threading

import pytest

from tests.cuda.driver import Driver
from tests.cuda.simulated import ROOT, Simulator, _simulated_driver, simulator

__all__ = ["_simulated_driver", "simulator"]


def test_bagua_finds_two_devices(simulator: Simulator) -> None:
    program = "import json, bagua.cuda as cuda; print(json.dumps([cuda.why_not(), cuda.info()]))"
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=simulator.environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    why, info = json.loads(ended.stdout)
    assert why is None
    assert info["driver"]["path"] == str(simulator.library)
    assert [device["name"] for device in info["devices"]] == ["Pretended GPU"] * 2
    assert len({device["uuid"] for device in info["devices"]}) == 2
    assert info["devices"][0]["capability"] == "9.0"


def test_the_number_of_devices_can_be_chosen(simulator: Simulator) -> None:
    def devices(cuda: Driver) -> list[int]:
        code = cuda.code("cuInit", 0)
        return [code, 0 if code else cuda.get("cuDeviceGetCount", kind=ctypes.c_int)]

    assert simulator(devices, BAGUA_SIM_DEVICES=5).value == [0, 5]


def test_no_device_is_an_error_of_init(simulator: Simulator) -> None:
    program = "import os, ctypes; print(ctypes.CDLL(os.environ['BAGUA_LIBCUDA']).cuInit(0))"
    environment = simulator.environment(BAGUA_SIM_DEVICES=0)
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout == "100\n"


def test_calls_need_init_and_a_context(simulator: Simulator) -> None:
    def calls(cuda: Driver) -> list[int]:
        before = cuda.code("cuMemFree_v2", 4096)
        cuda.cuInit(0)
        without = [cuda.code("cuMemFree_v2", 4096), cuda.code("cuCtxSynchronize"), cuda.code("cuStreamSynchronize", 0)]
        context = cuda.start()
        cuda.cuCtxSynchronize()
        cuda.cuDevicePrimaryCtxRelease_v2(0)
        ended = cuda.code("cuCtxSynchronize")
        assert cuda.get("cuCtxGetCurrent") == context
        return [before, *without, ended]

    assert simulator(calls).value == [3, 201, 201, 201, 709]


def test_contexts_are_a_stack_of_each_thread(simulator: Simulator) -> None:
    def stack(cuda: Driver) -> list[bool]:
        first = cuda.start(0)
        second = cuda.get("cuDevicePrimaryCtxRetain", 1)
        cuda.cuCtxPushCurrent_v2(second)
        on_second = cuda.get("cuCtxGetDevice", kind=ctypes.c_int) == 1
        elsewhere = []
        thread = threading.Thread(target=lambda: elsewhere.append(cuda.get("cuCtxGetCurrent")))
        thread.start()
        thread.join()
        popped = cuda.get("cuCtxPopCurrent_v2") == second
        again = cuda.get("cuCtxGetCurrent") == first
        cuda.cuCtxSetCurrent(0)
        return [on_second, elsewhere == [0], popped, again, cuda.get("cuCtxGetCurrent") == 0]

    assert simulator(stack).value == [True] * 5


def test_new_memory_holds_nan_and_addresses_are_used_once(simulator: Simulator) -> None:
    def fresh(cuda: Driver) -> list[object]:
        cuda.start()
        seen = []
        for _ in range(20):
            address = cuda.memory(1000)
            data = cuda.read(address, 1000)
            seen.append(address)
            cuda.cuMemFree_v2(address)
        first = cuda.pinned(1000)
        place = ctypes.addressof(first)
        pinned = first.raw
        cuda.free_pinned(first)
        second = cuda.pinned(1000)
        other = ctypes.addressof(second)
        cuda.free_pinned(second)
        return [data.hex(), pinned.hex(), len(set(seen)), place != other]

    ended = simulator(fresh)
    data, pinned, addresses, moved = ended.value
    assert data == pinned == "fb7f" * 500
    assert addresses == 20
    assert moved
    assert ended.clean


def test_the_host_cannot_touch_device_memory(simulator: Simulator) -> None:
    def touch(cuda: Driver) -> None:
        cuda.start()
        ctypes.string_at(cuda.memory(64), 1)

    process = simulator.start(touch)
    process.communicate(timeout=120)
    assert process.returncode == -11


def test_memory_is_given_and_found_by_any_of_its_addresses(simulator: Simulator) -> None:
    def ask(cuda: Driver) -> list[object]:
        context = cuda.start(1)
        address = cuda.memory(1000)
        base, size = ctypes.c_uint64(), ctypes.c_uint64()
        cuda.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), address + 999)
        after = cuda.code("cuMemGetAddressRange_v2", 0, 0, address + 1000)
        kind = cuda.get("cuPointerGetAttribute", 2, address + 5, kind=ctypes.c_uint)
        owner = cuda.get("cuPointerGetAttribute", 1, address + 5)
        pinned = cuda.pinned(10)
        place = ctypes.addressof(pinned)
        host = cuda.get("cuPointerGetAttribute", 2, place, kind=ctypes.c_uint)
        mine = ctypes.create_string_buffer(10)
        unknown = cuda.code("cuPointerGetAttribute", ctypes.byref(size), 2, ctypes.addressof(mine))
        values = (ctypes.c_uint * 1)(7), ctypes.c_int(7)
        data = (ctypes.c_void_p * 2)(*map(ctypes.addressof, values))
        cuda.cuPointerGetAttributes(2, (ctypes.c_int * 2)(2, 9), data, address)
        both = [values[0][0], values[1].value]
        cuda.cuMemFree_v2(address)
        cuda.free_pinned(pinned)
        return [base.value == address, size.value, after, kind, owner == context, host, unknown, both]

    ended = simulator(ask)
    assert ended.value == [True, 1000, 500, 2, True, 1, 1, [2, 1]]
    assert ended.clean


def test_memory_has_an_end(simulator: Simulator) -> None:
    def fill(cuda: Driver) -> list[int]:
        cuda.start()
        first = cuda.memory(1 << 20)
        second = cuda.code("cuMemAlloc_v2", ctypes.byref(ctypes.c_uint64()), 1 << 20)
        free, total = ctypes.c_uint64(), ctypes.c_uint64()
        cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
        cuda.cuMemFree_v2(first)
        return [second, free.value, total.value]

    assert simulator(fill, BAGUA_SIM_MEMORY=3 << 19).value == [2, 1 << 19, 3 << 19]


def test_bytes_are_copied_in_every_direction(simulator: Simulator) -> None:
    def copies(cuda: Driver) -> list[bool]:
        cuda.start()
        text = bytes(range(251)) * 40
        size = len(text)
        first, second = cuda.memory(text), cuda.memory(size)
        cuda.cuMemcpyDtoD_v2(second, first, size)
        pinned = cuda.pinned(size)
        place = ctypes.addressof(pinned)
        cuda.cuMemcpy(place, second, size)
        own = ctypes.create_string_buffer(size)
        cuda.cuMemHostRegister_v2(own, size, 0)
        stream = cuda.stream()
        cuda.cuMemcpyDtoHAsync_v2(own, first, size, stream)
        cuda.cuMemsetD32Async(second, 0x01020304, 10, stream)
        cuda.cuMemsetD8Async(second + 40, 9, 3, stream)
        cuda.cuStreamSynchronize(stream)
        filled = cuda.read(second, 44)
        cuda.cuMemHostUnregister(own)
        same = [pinned.raw == text, own.raw == text]
        cuda.cuStreamDestroy_v2(stream)
        cuda.free_pinned(pinned)
        cuda.cuMemFree_v2(first)
        cuda.cuMemFree_v2(second)
        return [*same, filled == b"\x04\x03\x02\x01" * 10 + b"\x09" * 3 + text[43:44]]

    ended = simulator(copies)
    assert ended.value == [True] * 3
    assert ended.clean


@pytest.mark.parametrize(
    ("bytes_copied", "offset", "words"),
    [(101, 0, "pass the end of an allocation of 100 bytes, at 0"), (1, 100, "are not allocated"), (2, 99, "at 99")],
)
def test_a_copy_past_the_end_is_a_fault(simulator: Simulator, bytes_copied: int, offset: int, words: str) -> None:
    def past(cuda: Driver, size: int, offset: int) -> list[int]:
        cuda.start()
        address = cuda.memory(100)
        data = bytes(size)
        code = cuda.code("cuMemcpyHtoD_v2", address + offset, data, size)
        again = cuda.code("cuMemcpyHtoD_v2", address, data[:1], 1)
        cuda.cuMemFree_v2(address)
        return [code, again]

    ended = simulator(past, bytes_copied, offset)
    assert ended.value == [1, 0]
    (fault,) = ended.report["faults"]
    assert words in fault
    assert "cuMemcpyHtoD_v2" in fault


def test_use_after_free_and_freeing_twice_are_faults(simulator: Simulator) -> None:
    def late(cuda: Driver) -> list[int]:
        cuda.start()
        address = cuda.memory(100)
        cuda.cuMemFree_v2(address)
        return [cuda.code("cuMemsetD8_v2", address, 0, 1), cuda.code("cuMemFree_v2", address)]

    ended = simulator(late)
    assert ended.value == [1, 1]
    first, second = ended.report["faults"]
    assert "were freed" in first
    assert "is freed twice" in second


def test_a_device_address_is_no_host_address(simulator: Simulator) -> None:
    def mixed(cuda: Driver) -> list[int]:
        cuda.start()
        address = cuda.memory(100)
        own = ctypes.create_string_buffer(100)
        codes = [
            cuda.code("cuMemcpyHtoD_v2", address, address + 50, 10),
            cuda.code("cuMemcpyDtoD_v2", address, ctypes.addressof(own), 10),
            cuda.code("cuMemHostRegister_v2", address, 100, 0),
        ]
        cuda.cuMemFree_v2(address)
        return codes

    ended = simulator(mixed)
    assert ended.value == [1, 1, 1]
    assert len(ended.report["faults"]) == 2


def test_what_is_never_freed_is_counted(simulator: Simulator) -> None:
    def leak(cuda: Driver, release: bool) -> None:
        cuda.start()
        cuda.memory(10)
        cuda.get("cuMemAllocAsync", 10, cuda.stream())
        cuda.pinned(10)
        cuda.event()
        cuda.cuMemHostRegister_v2(ctypes.create_string_buffer(10), 10, 0)
        if release:
            cuda.cuDevicePrimaryCtxRelease_v2(0)

    for release in (False, True):
        assert simulator(leak, release).report["leaked"] == 6


def test_calls_are_counted_and_fail_when_configured(simulator: Simulator) -> None:
    def calls(cuda: Driver) -> list[int]:
        cuda.start()
        codes = [cuda.code("cuMemAlloc_v2", ctypes.byref(ctypes.c_uint64()), 10) for _ in range(4)]
        return [*codes, cuda.code("cuStreamQuery", 0), cuda.code("cuStreamQuery", 0)]

    ended = simulator(calls, BAGUA_SIM_FAIL="cuMemAlloc:2:2,cuMemAlloc_v2:4:46,cuStreamQuery:*:999")
    assert ended.value == [0, 2, 0, 46, 999, 999]
    calls_made = ended.report["calls"]
    assert calls_made["cuMemAlloc_v2"] == 4
    assert calls_made["cuStreamQuery"] == 2
    assert calls_made["cuInit"] == 1
    assert ended.report["leaked"] == 2


def test_a_sticky_error_stays_until_the_context_ends(simulator: Simulator) -> None:
    def sticky(cuda: Driver) -> list[int]:
        cuda.start()
        address = cuda.memory(10)
        first = cuda.code("cuMemsetD8_v2", address, 0, 1)
        later = [cuda.code("cuMemsetD8_v2", address, 0, 1), cuda.code("cuStreamSynchronize", 0)]
        cuda.cuDevicePrimaryCtxReset_v2(0)
        cuda.start()
        return [first, *later, cuda.code("cuStreamSynchronize", 0)]

    assert simulator(sticky, BAGUA_SIM_FAIL="cuMemsetD8:1:719").value == [719, 719, 719, 0]
    # An error that is none of the device's passes.
    assert simulator(sticky, BAGUA_SIM_FAIL="cuMemsetD8:1:2").value[:2] == [2, 0]


def test_errors_have_names(simulator: Simulator) -> None:
    def names(cuda: Driver) -> list[object]:
        text = ctypes.c_char_p()
        found = []
        for code in (0, 2, 700, 803):
            cuda.cuGetErrorName(code, ctypes.byref(text))
            found.append(text.value.decode())
        cuda.cuGetErrorString(700, ctypes.byref(text))
        found.append(text.value.decode())
        return [*found, cuda.code("cuGetErrorName", 12345, ctypes.byref(text)), text.value]

    assert simulator(names).value == [
        "CUDA_SUCCESS",
        "CUDA_ERROR_OUT_OF_MEMORY",
        "CUDA_ERROR_ILLEGAL_ADDRESS",
        "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
        "illegal address",
        1,
        None,
    ]


def test_functions_are_found_by_name(simulator: Simulator) -> None:
    def find(cuda: Driver) -> list[object]:
        place, status = ctypes.c_void_p(), ctypes.c_int(7)
        cuda.cuGetProcAddress_v2(b"cuMemAlloc", ctypes.byref(place), 12000, 0, ctypes.byref(status))
        expected = ctypes.cast(cuda.library.cuMemAlloc_v2, ctypes.c_void_p).value
        found = [place.value == expected, status.value]
        code = cuda.code("cuGetProcAddress_v2", b"cuNothing", ctypes.byref(place), 12000, 0, ctypes.byref(status))
        table = ctypes.c_void_p(7)
        return [*found, code, status.value, cuda.code("cuGetExportTable", ctypes.byref(table), bytes(16)), table.value]

    assert simulator(find).value == [True, 0, 500, 1, 500, None]


def test_a_forked_child_has_no_driver_and_writes_no_report(simulator: Simulator) -> None:
    def fork(cuda: Driver) -> int:
        cuda.start()
        child = os.fork()
        if child == 0:
            os._exit(cuda.code("cuCtxSynchronize"))
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert simulator(fork).value == 3
    assert len(list(simulator.reports.iterdir())) == 1
