"""Values come back from their stored form as they were, and nothing in a stored form is ever run."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch is not installed: make setup")
pytest.importorskip("msgpack", reason="msgpack is not installed: make setup")
pytest.importorskip("xxhash", reason="xxhash is not installed: make setup")

from bagua.torch_api.contrib.cache_loader import CacheLoader  # noqa: E402
from bagua.torch_api.contrib.utils.memory_store import MemoryStore  # noqa: E402
from bagua.torch_api.contrib.utils.serialization import Serializer  # noqa: E402
from tests.unit.cached_values import Point, same  # noqa: E402

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.binary()
)
keys = st.integers() | st.text() | st.tuples(st.integers(), st.text())
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.sets(st.integers(), max_size=4)
        | st.frozensets(st.text(), max_size=4)
    ),
    max_leaves=12,
)


@given(values)
def test_plain_values_come_back_with_their_types(value: Any) -> None:
    form = Serializer("d")
    assert same(form.loads("k", form.dumps("k", value)), value)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6, dtype=torch.int64).reshape(2, 3),
        torch.randn(3, 4).t(),
        torch.tensor(3.5),
        torch.zeros(0, 5),
        torch.tensor([1.5, float("nan"), -0.0], dtype=torch.float64),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j], dtype=torch.complex64).conj(),
        torch.arange(5, dtype=torch.uint8)[::2],
    ],
    ids=lambda tensor: f"{tensor.dtype}{tuple(tensor.shape)}",
)
def test_tensors_come_back_bitwise(tensor: Any) -> None:
    form = Serializer("d")
    back = form.loads("k", form.dumps("k", [tensor, {"again": (tensor,)}]))
    assert same(back[0], tensor.resolve_conj())
    assert same(back[1]["again"][0], tensor.resolve_conj())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint16])
def test_types_that_numpy_lacks_come_back_bitwise(dtype: Any) -> None:
    tensor = torch.arange(16, dtype=torch.uint8).view(dtype)
    form = Serializer("d")
    back = form.loads("k", form.dumps("k", tensor))
    assert back.dtype == dtype
    assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.asfortranarray(np.random.default_rng(0).random((3, 4))),
        np.array("2020-01-01", dtype="M8[D]"),
        np.zeros((0, 2), dtype=np.float16),
        np.array(["a", "bcd"]),
        np.float32(1.5),
        np.bool_(True),
    ],
    ids=lambda array: f"{type(array).__name__}-{array.dtype}",
)
def test_arrays_and_their_scalars_come_back_with_their_types(array: Any) -> None:
    form = Serializer("d")
    back = form.loads("k", form.dumps("k", (array, 1)))[0]
    assert same(back, array)


@pytest.mark.parametrize(
    "value",
    [
        Point(1, 2),
        OrderedDict(a=1),
        object(),
        np.array([object()]),
        torch.nn.Parameter(torch.zeros(1)),
        torch.zeros(1, requires_grad=True),
        torch.eye(2).to_sparse(),
        {"deep": [Point(1, 2)]},
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_would_come_back_as_something_else_is_refused_with_its_type(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot be cached"):
        Serializer("d").dumps("k", value)


def test_a_pickle_is_read_only_with_the_secret_it_was_signed_with_and_under_its_own_key() -> None:
    writer = Serializer("d", allow_pickle=True, secret=b"ours")
    raw = writer.dumps("k", Point(1, 2))
    assert writer.loads("k", raw) == Point(1, 2)
    for reader, key in (
        (Serializer("d", allow_pickle=True, secret=b"theirs"), "k"),
        (Serializer("d"), "k"),
        (writer, "another"),
    ):
        with pytest.raises(ValueError, match="pickle"):
            reader.loads(key, raw)


def test_a_planted_pickle_never_runs(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "exploded"),)

    planted = Serializer("d", allow_pickle=True, secret=b"theirs").dumps("d_k", Bomb())
    store = MemoryStore()
    for raw in (planted, pickle.dumps(Bomb()), planted[:-1] + b"x"):
        store.set("d_k", raw)
        loader = CacheLoader("memory", "d", allow_pickle=True)
        loader.store = store
        assert loader.get("k", lambda key: 7) == 7
    assert not (tmp_path / "exploded").exists()


@given(st.binary(max_size=60), st.integers(0, 200), st.integers(0, 255))
def test_damaged_bytes_are_unreadable_and_nothing_worse(junk: bytes, place: int, byte: int) -> None:
    form = Serializer("d")
    whole = form.dumps("k", (torch.arange(9), np.arange(4.0), [1, "x", {2: b"y"}]))
    damaged = bytearray(whole)
    damaged[place % len(whole)] = byte
    for raw in (junk, whole[:place], whole + junk[:1], bytes(damaged)):
        # A changed byte inside a buffer or a number is another value; everything else is noticed.
        try:
            form.loads("k", raw)
        except ValueError:
            continue
        assert len(raw) == len(whole)
