"""What the strict libnccl does, and which mistakes of a caller it reports."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.cuda.driver import until
from tests.cuda.simulated import Simulator, _simulated_driver, simulator

__all__ = ["_simulated_driver", "simulator"]

#: The scenarios see tests/cuda/driver.py, and import tests/cuda/nccl_calls.py; `cuda` is what they are given.


def keeps_the_rules(cuda: Any) -> Any:
    import struct

    from tests.cuda.nccl_calls import IN_PROGRESS, SUCCESS, Nccl

    cuda.start()
    nccl = Nccl(cuda)
    stream, event = cuda.stream(), cuda.event()
    x, y = cuda.memory(struct.pack("4f", 1, 2, 3, 4)), cuda.memory(16)
    communicator = nccl.alone()
    codes = [nccl.all_reduce(communicator, stream, x, y, 4), nccl.state(communicator)]
    assert codes == [IN_PROGRESS, IN_PROGRESS]
    assert nccl.settle(communicator) == [SUCCESS]
    cuda.cuEventRecord(event, stream)
    # The work is late, as that of the driver.
    assert cuda.code("cuEventQuery", event) == 600
    cuda.cuEventSynchronize(event)
    found = struct.unpack("4f", cuda.read(y, 16))
    nccl.end(communicator)
    cuda.cuMemFree_v2(x)
    cuda.cuMemFree_v2(y)
    cuda.cuStreamDestroy_v2(stream)
    cuda.cuEventDestroy_v2(event)
    return found


def test_a_caller_that_keeps_the_rules_has_no_fault_and_leaks_nothing(simulator: Simulator) -> None:
    ended = simulator(keeps_the_rules)
    assert ended.value == [1.0, 2.0, 3.0, 4.0]
    assert ended.clean


def breaks_a_rule(cuda: Any, rule: str) -> Any:
    import threading

    from tests.cuda.nccl_calls import IN_PROGRESS, Id, Nccl

    cuda.start()
    nccl = Nccl(cuda)
    stream = cuda.stream()
    x, y = cuda.memory(64), cuda.memory(64)
    if rule.startswith("config "):
        name = rule.split()[1]
        value = {"size": 56, "magic": 1, "version": 21800, "blocking": 1, "cga": 4}[name]
        return nccl.begin(1, nccl.id(), 0, **{name: value})[0]
    if rule == "no id":
        return nccl.begin(1, Id(), 0)[0]
    if rule == "rank":
        return nccl.begin(2, nccl.id(), 2)[0]
    if rule == "no context":
        unique, codes = nccl.id(), []
        thread = threading.Thread(target=lambda: codes.append(nccl.begin(1, unique, 0)[0]))
        thread.start()
        thread.join()
        return codes[0]
    if rule == "id twice":
        unique = nccl.id()
        nccl.settle(nccl.begin(1, unique, 0)[1])
        return nccl.begin(1, unique, 0)[0]
    if rule == "not ready":
        return nccl.all_reduce(nccl.begin(1, nccl.id(), 0)[1], stream, x, y, 4)
    if rule == "group end":
        return nccl.code("ncclGroupEnd")
    communicator = nccl.alone()
    if rule == "leaked":
        return 0
    if rule == "event before polling":
        nccl.all_reduce(communicator, stream, x, y, 4)
        event = cuda.event()
        code = cuda.code("cuEventRecord", event, stream)
        nccl.settle(communicator)
        return code
    if rule == "next call before polling":
        assert nccl.all_reduce(communicator, stream, x, y, 4) == IN_PROGRESS
        nccl.state(communicator)
        return nccl.all_reduce(communicator, stream, x, y, 4)
    if rule == "other stream":
        nccl.all_reduce(communicator, stream, x, y, 4)
        nccl.settle(communicator)
        return nccl.all_reduce(communicator, cuda.stream(), x, y, 4)
    if rule == "overlap":
        return nccl.all_reduce(communicator, stream, x, x + 4, 4)
    if rule == "alignment":
        return nccl.all_reduce(communicator, stream, x + 2, y, 4)
    if rule == "host memory":
        nccl.all_reduce(communicator, stream, 4096, y, 4)
        return nccl.settle(communicator)[0]
    if rule == "too long":
        nccl.all_reduce(communicator, stream, x, y, 17)
        return nccl.settle(communicator)[0]
    if rule == "root":
        return nccl.code("ncclBroadcast", x, y, 4, 7, 1, communicator, stream)
    if rule == "type":
        return nccl.code("ncclAllReduce", x, y, 4, 12, 0, communicator, stream)
    if rule == "messages overlap":
        nccl.code("ncclGroupStart")
        nccl.code("ncclSend", x, 4, 7, 0, communicator, stream)
        nccl.code("ncclRecv", x + 12, 4, 7, 0, communicator, stream)
        return nccl.code("ncclGroupEnd")
    if rule == "finalize inside a group":
        nccl.code("ncclGroupStart")
        return nccl.code("ncclCommFinalize", communicator)
    if rule == "after finalize":
        nccl.code("ncclCommFinalize", communicator)
        nccl.settle(communicator)
        return nccl.all_reduce(communicator, stream, x, y, 4)
    if rule == "destroy at once":
        return nccl.code("ncclCommDestroy", communicator)
    if rule == "destroy before polling":
        nccl.code("ncclCommFinalize", communicator)
        return nccl.code("ncclCommDestroy", communicator)
    if rule == "after destroy":
        nccl.end(communicator)
        return nccl.all_reduce(communicator, stream, x, y, 4)
    if rule == "after abort":
        nccl.code("ncclCommAbort", communicator)
        return nccl.code("ncclCommAbort", communicator)
    raise AssertionError(rule)


@pytest.mark.parametrize(
    ("rule", "fault"),
    [
        ("config size", "ncclCommInitRankConfig: size 56"),
        ("config magic", "the magic"),
        ("config version", "version 21800"),
        ("config blocking", "blocking 1"),
        ("config cga", "a field"),
        ("no id", "no unique id"),
        ("rank", "rank 2 of 2"),
        ("no context", "without a current context"),
        ("id twice", "the unique id was used before"),
        ("not ready", "ncclAllReduce on a communicator that is not ready"),
        ("group end", "ncclGroupEnd without ncclGroupStart"),
        ("event before polling", "cuEventRecord: 1 call(s) of NCCL have not put their work on the stream yet"),
        ("next call before polling", "ncclAllReduce while ncclAllReduce is in progress and was not polled to its end"),
        ("other stream", "on another stream than before"),
        ("overlap", "overlap"),
        ("alignment", "not aligned"),
        ("host memory", "are no device memory"),
        ("too long", "pass the end of an allocation"),
        ("root", "root 1"),
        ("type", "element type 12"),
        ("messages overlap", "received where another is sent from"),
        ("finalize inside a group", "ncclCommFinalize inside a group"),
        ("after finalize", "ncclAllReduce after ncclCommFinalize"),
        ("destroy at once", "ncclCommDestroy before ncclCommFinalize was polled to its end"),
        ("destroy before polling", "ncclCommDestroy before ncclCommFinalize was polled to its end"),
        ("after destroy", "on no communicator, or one that was ended"),
        ("after abort", "ncclCommAbort on no communicator, or one that was ended"),
    ],
)
def test_a_caller_that_breaks_a_rule_is_reported(simulator: Simulator, rule: str, fault: str) -> None:
    ended = simulator(breaks_a_rule, rule)
    assert any(fault in text for text in ended.report["faults"]), ended.report["faults"]
    if "event" not in rule and "destroy at" not in rule and "destroy before" not in rule:
        assert ended.value not in (0, 7)


def test_a_communicator_that_is_not_ended_is_leaked(simulator: Simulator) -> None:
    # The stream and the two arrays are leaked, too.
    assert simulator(breaks_a_rule, "leaked").report["leaked"] == 4


def two_ranks(cuda: Any, second: int, peer: int) -> Any:
    from tests.cuda.nccl_calls import FLOAT32, SUM, Nccl

    contexts = [cuda.start(device) for device in (0, 1)]
    nccl, unique = Nccl(cuda), None
    unique = nccl.id()
    made, streams, memory = [], [], []
    for rank in (0, 1):
        cuda.cuCtxSetCurrent(contexts[rank])
        made.append(nccl.begin(2, unique, rank)[1])
        streams.append(cuda.stream())
        memory.append(cuda.memory(64))
    assert nccl.settle(*made) == [0, 0]
    for rank in (0, 1):
        cuda.cuCtxSetCurrent(contexts[rank])
        count = 4 if rank == 0 else second
        if peer:
            name = "ncclSend" if rank == 0 else "ncclRecv"
            nccl.code(name, memory[rank], count, FLOAT32, 1 - rank, made[rank], streams[rank])
        else:
            nccl.code("ncclAllReduce", memory[rank], memory[rank], count, FLOAT32, SUM, made[rank], streams[rank])
    assert nccl.settle(*made) == [0, 0]
    done = []
    for rank in (0, 1):
        cuda.cuCtxSetCurrent(contexts[rank])
        event = cuda.event()
        cuda.cuEventRecord(event, streams[rank])
        done.append(event)
    if os.environ.get("BAGUA_SIM_NCCL_HANG"):
        # Nothing is done until the communicators are aborted.
        found = [cuda.code("cuEventQuery", event) for event in done]
        for communicator in made:
            nccl.code("ncclCommAbort", communicator)
        until(lambda: all(cuda.code("cuEventQuery", event) == 0 for event in done))
        return found
    until(lambda: all(cuda.code("cuEventQuery", event) == 0 for event in done))
    for communicator in made:
        nccl.end(communicator)
    return "done"


def test_ranks_that_agree_are_done(simulator: Simulator) -> None:
    for peer in (0, 1):
        ended = simulator(two_ranks, 4, peer)
        assert (ended.value, ended.report["faults"]) == ("done", [])


@pytest.mark.parametrize("peer", [0, 1], ids=["collective", "message"])
def test_ranks_that_disagree_are_a_fault_or_wait_for_ever(simulator: Simulator, peer: int) -> None:
    text = " ".join(simulator(two_ranks, 5, peer).report["faults"])
    assert "4 elements" in text
    assert "5" in text
    ended = simulator(two_ranks, 5, peer, BAGUA_SIM_NCCL_HANG=1)
    assert (ended.value, ended.report["faults"]) == ([600, 600], [])
