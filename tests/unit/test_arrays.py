"""Objects that count as arrays, and their memory."""

from __future__ import annotations

import array
import mmap
from typing import Any

import numpy as np
import pytest

from bagua import dlpack
from bagua.arrays import on_host, operand
from bagua.extension import DTYPES
from bagua.operand import empty_like
from tests.immutable_arrays import IMMUTABLE, Flagged

NUMPY_TYPES = [name for name in DTYPES if name != "bfloat16"]


@pytest.mark.parametrize("name", NUMPY_TYPES)
def test_every_numpy_type_that_travels_has_its_code(name: str) -> None:
    x = np.zeros((2, 3), dtype=name)
    memory = on_host(x)
    assert (memory.dtype, memory.dtype_name, memory.count, memory.shape) == (DTYPES[name], name, 6, (2, 3))
    assert memory.address == x.ctypes.data


@pytest.mark.parametrize("code", ["l", "q", "i", "h", "b", "L", "Q", "I", "H", "B", "d", "f"])
def test_array_array_is_used_without_a_copy(code: str) -> None:
    x = array.array(code, [1, 2, 3])
    memory = on_host(x).to_write("x")
    assert memory.address == x.buffer_info()[0]
    memory.owner[1] = 7
    assert x[1] == 7


def test_bytearrays_and_memoryviews_are_bytes() -> None:
    x = bytearray(b"abc")
    assert on_host(x).dtype == DTYPES["uint8"]
    assert on_host(memoryview(x)).to_write("x").address == on_host(x).address


def test_empty_and_zero_dimensional_arrays_are_arrays() -> None:
    assert on_host(np.empty((0, 3), np.float32)).count == 0
    scalar = on_host(np.array(2.0))
    assert (scalar.count, scalar.shape) == (1, ())


@pytest.mark.parametrize("dtype", ["datetime64[s]", "U3", "O", "longdouble"])
def test_types_that_cannot_travel_are_named(dtype: str) -> None:
    with pytest.raises(TypeError, match=r"supported are float16, bfloat16"):
        on_host(np.zeros(2, dtype=dtype))


def test_the_byte_order_of_another_machine_is_refused() -> None:
    with pytest.raises(TypeError, match="byte order"):
        on_host(np.zeros(2, dtype=np.dtype(np.float32).newbyteorder()))


@pytest.mark.parametrize("x", [1, 2.5, [1.0, 2.0], "text", None, object()])
def test_what_is_no_array_is_refused_by_its_type(x: object) -> None:
    with pytest.raises(TypeError, match=type(x).__name__):
        on_host(x)


def test_read_only_memory_can_be_read_and_not_written() -> None:
    frozen = np.arange(3.0)
    frozen.flags.writeable = False
    for x in (frozen, b"abc", np.float32(3), mmap.mmap(-1, 16, prot=mmap.PROT_READ)):
        on_host(x).to_read()
        with pytest.raises(ValueError, match="x is read-only: pass an array"):
            on_host(x).to_write("x")


def test_strided_memory_is_copied_to_be_read_and_refused_to_be_written() -> None:
    x = np.arange(12.0).reshape(3, 4)[:, ::2]
    memory = on_host(x)
    assert memory.to_read().owner.flags.c_contiguous
    assert (memory.to_read().owner == x).all()
    with pytest.raises(ValueError, match="not contiguous"):
        memory.to_write("x")


class Lender:
    """Another framework: exports NumPy memory by DLPack and has no other interface."""

    def __init__(self, x: np.ndarray, device: int = 1, versioned: bool = True) -> None:
        self.x = x
        self.device = device
        self.versioned = versioned

    def __dlpack__(self, **words: Any) -> object:
        if not self.versioned:
            if words:
                raise TypeError("an old framework knows no max_version")
            return self.x.__dlpack__()
        return self.x.__dlpack__(**words)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self.device, 0)


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize("name", NUMPY_TYPES)
def test_dlpack_is_used_without_a_copy(name: str, versioned: bool) -> None:
    x = np.ones((2, 3), dtype=name)
    memory = on_host(Lender(x, versioned=versioned)).to_write("x")
    assert (memory.address, memory.dtype_name, memory.shape) == (x.ctypes.data, name, (2, 3))
    memory.owner[0, 1] = 0
    assert x[0, 1] == 0


def test_dlpack_strides_and_offsets_are_kept() -> None:
    x = np.arange(24.0).reshape(4, 6)
    memory = on_host(Lender(x[1:, ::3]))
    assert (memory.owner == x[1:, ::3]).all()
    assert not memory.owner.flags.c_contiguous


def test_dlpack_that_says_read_only_is_not_written() -> None:
    x = np.arange(3.0)
    x.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        on_host(Lender(x)).to_write("x")


@pytest.mark.parametrize("kind", IMMUTABLE)
def test_immutable_arrays_are_read_and_not_written(kind: str) -> None:
    x = IMMUTABLE[kind](np.arange(3, dtype=np.float32))
    assert on_host(x).to_read().owner.tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="x is read-only: pass out= with an array"):
        on_host(x).to_write("x", has_out=True)


def test_an_array_whose_flags_allow_it_is_written() -> None:
    on_host(Flagged(np.zeros(3, np.float32), flags=0)).to_write("x")


def test_other_devices_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match="is on CUDA; only host memory"):
        on_host(Lender(np.zeros(2), device=2))


def test_dlpack_memory_is_valid_as_long_as_it_is_held() -> None:
    memory = on_host(Lender(np.full(100_000, 3.0)))
    assert (memory.owner == 3.0).all()


def test_torch_tensors_come_by_dlpack_bfloat16_included() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    for dtype, name in ((torch.bfloat16, "bfloat16"), (torch.float32, "float32"), (torch.bool, "bool")):
        x = torch.ones(2, 3, dtype=dtype)
        memory = on_host(x).to_write("x")
        assert (memory.address, memory.dtype_name, memory.shape) == (x.data_ptr(), name, (2, 3))
    with pytest.raises(TypeError, match="does not export its memory"):
        on_host(torch.ones(2, requires_grad=True))


def test_a_plain_torch_tensor_is_read_without_a_capsule(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", minversion="2.10", reason="this torch exports no addresses to C")

    def export(x: Any, what: str) -> Any:
        raise AssertionError("a capsule was made")

    monkeypatch.setattr(dlpack, "export", export)
    for name in DTYPES:
        x = torch.ones(2, 3).to(getattr(torch, name))
        memory = operand(x)
        assert (memory.address, memory.shape, memory.dtype_name) == (x.data_ptr(), (2, 3), name)
        assert memory.contiguous
        assert memory.to_write("x") is memory
        x.data = torch.zeros(2, 3).to(x.dtype)
        # The first memory is kept.
        assert memory.owner.data_ptr() == memory.address
        assert memory.owner.flatten().tolist() == [1] * 6
    for other in (torch.ones(2, 3).T, torch.ones(2, requires_grad=True)):
        with pytest.raises(AssertionError, match="a capsule was made"):
            operand(other)


def test_a_torch_view_that_negates_its_memory_is_refused() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    x = torch.tensor([1 + 2j]).conj().imag
    assert x.is_neg()
    with pytest.raises(TypeError, match="is a lazily negated view"):
        on_host(x)
    assert on_host(x.resolve_neg()).to_read().owner.tolist() == [-2.0]


def test_a_new_array_has_the_type_asked_for() -> None:
    assert empty_like(on_host(np.zeros(2, np.float16)), (3, 2)).dtype == np.float16


def test_a_new_bfloat16_array_needs_a_numpy_type_for_it() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    memory = on_host(torch.ones(2, dtype=torch.bfloat16))
    try:
        import ml_dtypes
    except ImportError:
        with pytest.raises(TypeError, match="pass out="):
            empty_like(memory, (2,))
    else:
        made = empty_like(memory, (2,))
        assert made.dtype == ml_dtypes.bfloat16
        assert on_host(made).dtype == DTYPES["bfloat16"]
