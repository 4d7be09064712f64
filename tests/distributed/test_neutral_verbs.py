"""Every verb on arrays against a float64 NumPy oracle, in one run of processes per world of one to four ranks."""

from __future__ import annotations

import array
import gc
import hashlib
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import numpy as np
import pytest

import bagua
from bagua.extension import DTYPES
from tests.groups import on_ranks
from tests.immutable_arrays import IMMUTABLE

SIZES = (0, 1, 7, 1023, (1 << 20) + 3)
FLOATS = ("float16", "float32", "float64")
COMPLEX = ("complex64", "complex128")
INTEGERS = tuple(name for name in DTYPES if name.startswith(("int", "uint")))
OPS: dict[str, Callable[..., Any]] = {
    "sum": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "bor": np.bitwise_or,
    "band": np.bitwise_and,
    "bxor": np.bitwise_xor,
}


class OtherOp(IntEnum):
    """Operations of another library, with numbers of its own: these are "product" and "max" here."""

    AVERAGE = 1
    MIN = 3


def data(seed: int, shape: int | tuple[int, ...], dtype: str, world: int) -> list[np.ndarray]:
    """Returns the values of every rank. Each rank computes all of them, and so knows the expected result."""
    made = []
    for rank in range(world):
        random = np.random.default_rng([seed, rank])
        if dtype == "bool":
            made.append(random.integers(0, 2, shape).astype(bool))
        elif dtype in INTEGERS:
            info = np.iinfo(dtype)
            made.append(random.integers(info.min, info.max, shape, dtype, endpoint=True))
            # Their sums and products wrap around, and the order of extremes depends on the sign.
            made[-1].flat[:1] = info.max
            made[-1].flat[1:2] = (info.min, info.max)[rank % 2]
        elif dtype in COMPLEX:
            made.append((random.uniform(0.5, 1.5, shape) + 1j * random.uniform(-1, 1, shape)).astype(dtype))
        else:
            made.append(random.uniform(0.5, 1.5, shape).astype(dtype))
    return made


def expected(inputs: list[np.ndarray], op: str) -> np.ndarray:
    """In float64 or complex128; integers in the type itself, wrapping around."""
    name = "sum" if op == "avg" else op
    wider = {"f": np.float64, "c": np.complex128}
    wide = [x.astype(wider.get(x.dtype.kind, x.dtype)) for x in inputs]
    total = wide[0]
    for x in wide[1:]:
        total = np.asarray(OPS[name](total, x)).astype(wide[0].dtype)
    return total / len(inputs) if op == "avg" else total


def close(result: np.ndarray, inputs: list[np.ndarray], op: str) -> bool:
    oracle = expected(inputs, op)
    if result.dtype.kind not in "fc" or op in ("min", "max"):
        return bool((result == oracle.astype(result.dtype)).all())
    eps = float(np.finfo(result.dtype).eps)
    if result.dtype.kind == "c":
        # Parts of a sum may cancel, and a product of two has four products and two sums.
        sizes = np.array([np.abs(x) for x in inputs], np.float64)
        bound = 4 * len(inputs) * eps * (sizes.prod(0) if op == "product" else sizes.sum(0))
        return bool((np.abs(result.astype(np.complex128) - oracle) <= bound).all())
    return bool((np.abs(result.astype(np.float64) - oracle) <= len(inputs) * eps * np.abs(oracle)).all())


def allowed(op: str, dtype: str) -> bool:
    if dtype in COMPLEX:
        return op in ("sum", "avg", "product")
    if op == "avg":
        return dtype in FLOATS
    if op in ("bor", "band", "bxor"):
        return dtype not in FLOATS
    return not (op == "sum" and dtype == "bool")


def reductions(group: bagua.Group, note: Callable[[np.ndarray], None]) -> None:
    rank, world = group.rank, group.size
    for dtype in (*FLOATS, *COMPLEX, *INTEGERS, "bool"):
        for op in (*OPS, "avg"):
            if not allowed(op, dtype):
                continue
            for size in SIZES[:4] if (dtype, op) != ("float32", "sum") else SIZES:
                inputs = data(size, size, dtype, world)
                x = inputs[rank].copy()
                assert bagua.all_reduce(x, op) is x
                assert close(x, inputs, op), (dtype, op, size)
                note(x)
    inputs = data(3, (4, 5), "float32", world)
    x, out = inputs[rank].copy(), np.empty((4, 5), np.float32)
    assert group.all_reduce(x, out=out) is out
    assert (x == inputs[rank]).all()
    assert close(out, inputs, "sum")
    again = np.empty_like(out)
    group.all_reduce(x, out=again)
    assert again.tobytes() == out.tobytes()
    strided = np.zeros((4, 10), np.float32)[:, ::2]
    strided[...] = inputs[rank]
    group.all_reduce(strided, out=again)
    assert again.tobytes() == out.tobytes()
    scalar = np.array(float(rank + 1))
    group.all_reduce(scalar, "max")
    assert scalar.shape == ()
    assert scalar == world
    for root in range(world):
        x = inputs[rank].copy()
        result = group.reduce(x, root)
        if rank == root:
            assert result is x
            assert close(x, inputs, "sum")
        else:
            assert result is None
            assert (x == inputs[rank]).all()
        result = group.reduce(inputs[rank], root, "max", out=np.empty((4, 5), np.float32))
        assert (result is not None) == (rank == root)
        assert result is None or close(result, inputs, "max")
    inputs = data(4, (2 * world, 3), "float64", world)
    part = slice(2 * rank, 2 * rank + 2)
    given = inputs[rank].copy()
    result = group.reduce_scatter(given, "avg")
    assert result.shape == (2, 3)
    assert close(result, [x[part] for x in inputs], "avg")
    assert (given == inputs[rank]).all()
    assert group.reduce_scatter(given, "avg", out=given[part]) is not None
    assert (given[part] == result).all()
    note(group.all_gather(result))
    x = np.full(3, rank, np.int32)
    assert (group.all_reduce(x, OtherOp.MIN) == 0).all()


def movements(group: bagua.Group) -> None:
    rank, world = group.rank, group.size
    for size in SIZES:
        inputs = data(size, size, "int32", world)
        for root in {0, world - 1}:
            x = inputs[rank].copy()
            assert group.broadcast(x, root) is x
            assert (x == inputs[root]).all()
            frozen, out = inputs[rank].copy(), np.empty(size, np.int32)
            frozen.flags.writeable = False
            assert group.broadcast(frozen, root, out=out) is out
            assert (out == inputs[root]).all()
            gathered = group.gather(inputs[rank], root)
            assert (gathered is None) == (rank != root)
            assert gathered is None or (gathered == np.stack(inputs)).all()
            row = np.empty(size, np.int32)
            rows = np.stack([x + root for x in inputs])
            scattered = group.scatter(rows, root) if rank == root else group.scatter(src=root, out=row)
            assert (scattered == inputs[rank] + root).all()
        assert (group.all_gather(inputs[rank]) == np.stack(inputs)).all()
        whole = np.zeros((world, size), np.int32)
        whole[rank] = inputs[rank]
        assert group.all_gather(whole[rank], out=whole) is whole
        assert (whole == np.stack(inputs)).all()
        table = np.stack([inputs[rank] + to for to in range(world)])
        turned = np.stack([inputs[sender] + rank for sender in range(world)])
        out = np.empty_like(table)
        assert group.all_to_all(table, out=out) is out
        assert (out == turned).all()
        assert group.all_to_all(table) is table
        assert (table == turned).all()
    rows = np.arange(world * 2.0).reshape(world, 2)
    if rank == 0:
        group.scatter(rows, 0, out=rows[0])
    else:
        assert (group.scatter(src=0, out=np.empty(2)) == rows[rank]).all()
    if world > 1:
        around, before = (rank + 1) % world, (rank - 1) % world
        x, got = np.full(1000, rank, np.int64), np.empty(1000, np.int64)
        sent = group.send(x, around, async_op=True) if rank % 2 else group.send(x, around) if rank < world - 1 else None
        if rank == world - 1 and not rank % 2:
            group.recv(got, before)
            group.send(x, around)
        else:
            assert group.recv(got, before) is got
        if sent is not None:
            assert sent.wait() is None
        assert (got == before).all()
    group.barrier()


def messages(group: bagua.Group) -> None:
    """all_to_all_v and exchange: what rank s sends to rank r is s * 10 + r, as many times as both know."""
    rank, world = group.rank, group.size
    for dtype in ("float32", "int64", "bool"):

        def part(sender: int, receiver: int, dtype: str = dtype) -> np.ndarray:
            return np.full((sender + 2 * receiver) % 3, sender * 10 + receiver).astype(dtype)

        sends, wanted = [part(rank, r) for r in range(world)], [part(r, rank) for r in range(world)]
        counts, expected_counts = [len(x) for x in sends], [len(x) for x in wanted]
        result = group.all_to_all_v(np.concatenate(sends), counts, expected_counts)
        assert result.tolist() == np.concatenate(wanted).tolist()
        # Parts backwards, and a gap before each of them in the result.
        displs = [sum(counts[r + 1 :]) for r in range(world)]
        gaps = [sum(expected_counts[:r]) + r + 1 for r in range(world)]
        out = np.full(sum(expected_counts) + world, 7).astype(dtype)
        handle = bagua.all_to_all_v(
            np.concatenate(sends[::-1]),
            counts,
            expected_counts,
            send_displs=displs,
            recv_displs=gaps,
            out=out,
            async_op=True,
        )
        assert handle.wait() is out
        for r, x in enumerate(wanted):
            assert out[gaps[r] - 1] == np.array(7).astype(dtype)
            assert (out[gaps[r] : gaps[r] + len(x)] == x).all()
        peers = [r for r in range(world) if r != rank]
        recvs = [(r, np.empty(3, dtype)) for r in peers for _ in range(2)]
        given = [(r, np.array([rank, r, n]).astype(dtype)) for r in peers for n in range(2)]
        got = group.exchange(given, recvs)
        assert all(x is y for x, (_, y) in zip(got, recvs, strict=True))
        for (r, x), n in zip(recvs, [0, 1] * len(peers), strict=True):
            assert x.tolist() == np.array([r, rank, n]).astype(dtype).tolist()
        assert group.exchange([], [], async_op=True).wait() == []
    if world > 1:
        # A message of an exchange is one like any other.
        x = np.full(2, rank)
        if rank == 0:
            bagua.exchange([(1, x)], [])
        elif rank == 1:
            assert group.recv(np.empty(2, x.dtype), 0).tolist() == [0, 0]


def objects(group: bagua.Group) -> None:
    """Short ones, long ones of about one size, and one long one among short ones."""
    rank, world = group.rank, group.size
    for lengths in (range(world), range(1 << 17, (1 << 17) + world), [*range(world - 1), 1 << 18]):
        every = [("x" * length, None, {each: {length}}) for each, length in enumerate(lengths)]
        mine = every[rank]
        assert bagua.all_gather_object(mine) == every
        for root in range(world):
            sent = bagua.broadcast_object(mine, root)
            assert sent == every[root]
            assert (sent is mine) == (rank == root)
            assert bagua.gather_object(mine, root) == (every if rank == root else None)
            scattered = bagua.scatter_object(every if rank == root else None, root)
            assert scattered == mine
            assert scattered is not mine
    assert group.all_gather_object(None) == [None] * world
    assert group.broadcast_object(b"") == b""
    array = np.arange(3) + rank
    copy = group.all_gather_object(array)[rank]
    assert copy is not array
    assert (copy == array).all()


def other_arrays(group: bagua.Group) -> None:
    rank, world = group.rank, group.size
    numbers = array.array("i", [rank, 1])
    assert group.all_reduce(numbers) is numbers
    assert list(numbers) == [sum(range(world)), world]
    text = bytearray(b"rank %d" % rank)
    group.broadcast(memoryview(text), world - 1)
    assert text == b"rank %d" % (world - 1)
    out = bytearray(3)
    group.all_reduce(bytes([rank, 1, 2]), "max", out=out)
    assert out == bytes([world - 1, 1, 2])


def asynchronous(group: bagua.Group) -> None:
    rank, world = group.rank, group.size
    x = np.full(5000, 1.0)
    handles = [group.all_reduce(x, async_op=True) for _ in range(10)]
    y = np.full(3, float(rank))
    last = group.all_reduce(y, "max", async_op=True)
    # Blocking verbs come after what was submitted before.
    z = np.full(3, float(rank))
    group.all_reduce(z, "min")
    assert all(handle.is_completed() for handle in [*handles, last])
    assert handles[3].wait() is x
    assert last.wait(timeout=30) is y
    assert (x == float(world) ** 10).all()
    assert (y == world - 1).all()
    assert (z == 0).all()
    temporary = [group.all_gather(np.full(1000, i), async_op=True) for i in range(5)]
    assert all((handle.wait() == i).all() for i, handle in enumerate(temporary))
    assert group.barrier(async_op=True).wait() is None


def refusals(group: bagua.Group) -> None:
    """Each is raised before anything is sent: the other ranks are not affected, and the group stays usable."""
    rank, world = group.rank, group.size
    floats, frozen = np.zeros(3, np.float32), np.zeros(3, np.float32)
    frozen.flags.writeable = False
    cases: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (TypeError, "avg of int32", lambda: group.all_reduce(np.zeros(3, np.int32), "avg")),
        (TypeError, "sum of bool", lambda: group.all_reduce(np.zeros(3, bool))),
        (TypeError, "bor of float32", lambda: group.all_reduce(floats, "bor")),
        (ValueError, "op must be one of .* got 'mean'", lambda: group.all_reduce(floats, "mean")),
        (ValueError, "op must be one of .* got 5", lambda: group.all_reduce(floats, 5)),
        (ValueError, "op must be one of .* got .*AVERAGE", lambda: group.all_reduce(floats, OtherOp.AVERAGE)),
        (TypeError, "op=1.5 is a float", lambda: group.all_reduce(floats, 1.5)),  # type: ignore[arg-type]
        (TypeError, "op=True is a bool", lambda: group.all_reduce(floats, True)),
        (TypeError, "src=0.5 is not an integer", lambda: group.broadcast(floats, 0.5)),  # type: ignore[arg-type]
        (TypeError, "src='0' is not an integer", lambda: group.broadcast(floats, "0")),  # type: ignore[arg-type]
        (TypeError, "tag=1.5", lambda: group.exchange([], [], tag=1.5)),  # type: ignore[call-overload]
        (TypeError, "send_counts=0.5", lambda: group.all_to_all_v(floats, [0.5] * world, [0] * world)),  # type: ignore[list-item]
        (TypeError, "min of complex64", lambda: group.all_reduce(np.zeros(3, np.complex64), "min")),
        (TypeError, "bxor of complex128", lambda: group.all_reduce(np.zeros(3, np.complex128), "bxor")),
        (TypeError, "complex256", lambda: group.all_reduce(np.zeros(3, np.clongdouble))),
        (TypeError, "a list.*numpy.asarray.*gather_object", lambda: group.all_reduce([1.0])),  # type: ignore[arg-type]
        (TypeError, "a float.*numpy.asarray.*gather_object", lambda: group.broadcast(1.0)),  # type: ignore[arg-type]
        (ValueError, "src=9 is not a rank", lambda: group.broadcast_object(None, 9)),
        (ValueError, "dst=-1 is not a rank", lambda: group.gather_object(None, -1)),
        (ValueError, f"{world + 1} objects for {world} ranks", lambda: group.scatter_object([0] * (world + 1), rank)),
        (ValueError, f"no objects for {world} ranks", lambda: group.scatter_object(src=rank)),
        (ValueError, "read-only: pass out=", lambda: group.all_reduce(frozen)),
        (ValueError, "not contiguous", lambda: group.all_reduce(np.zeros((3, 4)).T)),
        (ValueError, "out has shape", lambda: group.all_reduce(floats, out=np.zeros(4, np.float32))),
        (TypeError, "out has elements", lambda: group.all_reduce(floats, out=np.zeros(3))),
        (ValueError, "out is read-only", lambda: group.all_reduce(floats, out=frozen)),
        (ValueError, "src=9 is not a rank", lambda: group.broadcast(floats, 9)),
        (ValueError, "dst=-1 is not a rank", lambda: group.reduce(floats, -1)),
        (ValueError, "this rank itself", lambda: group.send(floats, rank)),
        (
            ValueError,
            "cannot be divided",
            lambda: group.reduce_scatter(np.zeros(world * 2 + 1)) if world > 1 else oops(),
        ),
        (ValueError, "cannot be divided", lambda: group.all_to_all(np.array(1.0))),
        (ValueError, "needs an array", lambda: group.scatter(src=rank)),
        (ValueError, "send_counts", lambda: group.all_to_all_v(floats, [3] * (world + 1), [3] * world)),
        (ValueError, "none of them negative", lambda: group.all_to_all_v(floats, [1] * world, [-1] * world)),
        (ValueError, "not within", lambda: group.all_to_all_v(floats, [4] * world, [4] * world)),
        (ValueError, "recv_displs", lambda: group.all_to_all_v(floats, [0] * world, [0] * world, recv_displs=[])),
        (ValueError, "this rank itself", lambda: group.exchange([(rank, floats)], [])),
        (ValueError, "overlap", lambda: group.all_reduce(floats[:2], out=floats[1:])),
        (ValueError, "timeout is -1", lambda: group.barrier(timeout=-1)),
    ]

    def oops() -> None:
        raise ValueError("cannot be divided: one rank divides everything")

    for kind, words, call in cases:
        with pytest.raises(kind, match=words):
            call()
    if world > 1:
        peer = (rank + 1) % world
        with pytest.raises(TypeError, match="different element types: float32, int64"):
            group.exchange([(peer, floats), (peer, np.zeros(1, np.int64))], [])
    x = np.ones(2)
    group.all_reduce(x)
    assert (x == world).all()


@pytest.mark.parametrize("kind", IMMUTABLE)
@on_ranks(2)
def test_nothing_writes_into_an_immutable_array(group: bagua.Group, kind: str) -> None:
    memory, peer, codec = np.arange(2, dtype=np.float32), 1 - group.rank, bagua.Codec("bf16")
    x: Any = IMMUTABLE[kind](memory)
    plain, row = np.ones(2, np.float32), np.ones((2, 2), np.float32)
    one = np.float32(1)
    bucket = bagua.Bucket("plain", {"w": plain})
    engine = bagua.Engine(group=group)
    engine.register([bucket])
    written: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: group.all_reduce(x),
        "all_reduce out": lambda: group.all_reduce(plain, out=x),
        "async all_reduce": lambda: group.all_reduce(x, async_op=True),
        "reduce": lambda: group.reduce(x, group.rank),
        "broadcast": lambda: group.broadcast(x, peer),
        "all_gather": lambda: group.all_gather(one, out=x),
        "gather": lambda: group.gather(one, group.rank, out=x),
        "reduce_scatter": lambda: group.reduce_scatter(np.ones(4, np.float32), out=x),
        "scatter on the source": lambda: group.scatter(row, group.rank, out=x),
        "scatter": lambda: group.scatter(src=peer, out=x),
        "all_to_all": lambda: group.all_to_all(x),
        "all_to_all_v": lambda: group.all_to_all_v(plain, [1, 1], [1, 1], out=x),
        "recv": lambda: group.recv(x, peer),
        "recv_any": lambda: group.recv_any(x),
        "exchange": lambda: group.exchange([], [(peer, x)]),
        "the default group": lambda: bagua.all_reduce(x),
        "a bucket": lambda: bagua.Bucket("b", {"w": x}),
        "a bucket's other array": lambda: bucket.attach("error", x),
        "a gradient elsewhere": lambda: engine.mark_ready("w", x),
        "decode": lambda: codec.decode(codec.encode(plain), x),
    }
    for name, write in written.items():
        with pytest.raises(ValueError, match=r"is read-only: pass (out= with )?an array that can be written"):
            write()
        assert memory.tolist() == [0, 1], name
    # Every verb may read it.
    result = np.zeros(2, np.float32)
    assert group.all_reduce(x, out=result) is result
    assert result.tolist() == [0, 2]
    assert group.all_gather(x).tolist() == [[0, 1]] * 2
    group.exchange([(peer, x)], [(peer, result)])
    assert result.tolist() == memory.tolist() == [0, 1]


def subgroups(group: bagua.Group) -> None:
    rank, world = group.rank, group.size
    members = [r for r in range(world) if r != 0] or [0]
    part = group.new_group(members)
    assert (part is not None) == (rank in members)
    if part is not None:
        assert (part.rank, part.size, part.ranks) == (members.index(rank), len(members), members)
        x = np.array([float(rank)])
        part.all_reduce(x)
        assert x[0] == sum(members)
        part.broadcast(x, part.size - 1)
        assert part.all_gather_object(rank) == members
        assert part.name in bagua.stats()["groups"]
        second = group.subgroup(members)
        assert second is not None
        assert second.name != part.name
        second.barrier()
        # A handle keeps its group.
        handles = [part.new_group(range(part.size)).all_reduce(np.ones(5000), async_op=True) for _ in range(3)]
        gc.collect()
        assert all((handle.wait() == part.size).all() for handle in handles)
    group.barrier()


def everything(rank: int) -> dict[str, Any]:
    group = bagua.init(timeout=60)
    assert (group.rank, group.size, group.ranks) == (rank, group.size, list(range(group.size)))
    with pytest.raises(bagua.BaguaError, match="already"):
        bagua.init()
    digest = hashlib.sha256()
    reductions(group, lambda x: digest.update(x.tobytes()))
    movements(group)
    messages(group)
    objects(group)
    other_arrays(group)
    asynchronous(group)
    refusals(group)
    subgroups(group)
    stats = bagua.stats()["groups"]["world"]
    bagua.shutdown()
    bagua.shutdown()
    return {"digest": digest.hexdigest(), "stats": stats, "hosts": group.local_world_size}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_verb_equals_the_oracle_and_shm_equals_tcp(world: Callable[..., Any], size: int) -> None:
    near = world(size).run(everything)
    assert len({result["digest"] for result in near}) == 1
    assert {result["stats"]["collective"] for result in near} == {"solo" if size == 1 else "shm"}
    for result in near:
        ops = result["stats"]["ops"]
        assert ops["all_reduce"]["calls"] > 100
        assert ops["all_reduce"]["payload_bytes"] > 4 << 20
        # Messages travel by sockets, also on one host.
        assert all(ops[op]["wire_bytes_sent"] == 0 for op in ops.keys() - {"send/recv", "exchange"})
    if size == 1:
        return
    far = world(size, env={"BAGUA_TRANSPORT": "tcp"}).run(everything)
    assert {result["digest"] for result in far} == {near[0]["digest"]}
    for rank, result in enumerate(far):
        others = [name for to, name in result["stats"]["transports"].items() if to != rank]
        assert others == ["tcp"] * (size - 1)
        assert result["stats"]["ops"]["all_reduce"]["wire_bytes_sent"] > 0


@pytest.mark.slow
def test_two_hosts_of_two_ranks_add_inside_the_hosts_first(world: Callable[..., Any]) -> None:
    results = world(4, hosts=[[0, 1], [2, 3]]).run(everything)
    assert {result["stats"]["collective"] for result in results} == {"hier"}
    assert len({result["digest"] for result in results}) == 1
    assert results[0]["stats"]["transports"] == {0: "self", 1: "shm", 2: "tcp", 3: "tcp"}
    assert [result["hosts"] for result in results] == [2, 2, 2, 2]
