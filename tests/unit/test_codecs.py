"""`bagua.Codec`: records against the golden file of the core, and what it refuses."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bagua
from bagua import extension
from bagua.codecs import raw_codec

GOLDEN = Path(__file__).resolve().parents[2] / "rust/bagua-kernels/src/codec/golden.txt"
NAMES = tuple(extension.CODECS)
DTYPES = ("float32", "float16", "bfloat16")
OPTIONS: list[tuple[str, dict[str, float]]] = [
    *((name, {}) for name in NAMES),
    ("block_i8", {"block": 1}),
    ("block_i8", {"block": 19}),
    ("top_k", {"k": 7}),
    ("top_k", {"k": 0.3}),
    ("top_k", {"k": 64, "chunk": 4096, "bits": 2}),
    ("top_k", {"k": 0.2, "chunk": 97}),
    ("random_k", {"k": 7, "seed": 3}),
    ("random_k", {"k": 0.3}),
]
IDS = [name + "".join(f",{key}={value}" for key, value in options.items()) for name, options in OPTIONS]


def bits_of(raw: bytes, dtype: str) -> np.ndarray[Any, Any]:
    """Bytes as elements."""
    return np.frombuffer(bytes(raw), np.uint32 if dtype == "float32" else np.uint16)


def array_of(bits: np.ndarray[Any, Any], dtype: str) -> Any:
    """Elements as an array that Codec takes; bfloat16 as a tensor of torch, which NumPy has no type for."""
    if dtype != "bfloat16":
        return bits.view(dtype).copy()
    torch = pytest.importorskip("torch", reason="torch is not installed, and NumPy has no bfloat16")
    return torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16)


def golden() -> list[list[str]]:
    lines = GOLDEN.read_text().splitlines()
    return [line.split("|") for line in lines if not line.startswith("#")]


@pytest.mark.parametrize("fields", golden(), ids=lambda fields: f"{fields[0]}-{fields[2]}-{fields[4][:24]}")
def test_records_have_the_bytes_of_the_golden_file(fields: list[str]) -> None:
    name, given, dtype, call, elements, record = fields
    options = {key: float(value) if "." in value else int(value) for key, value in _pairs(given)}
    codec = bagua.Codec(name, **options)
    assert codec.options == options
    bits = bits_of(bytes.fromhex(elements), dtype)
    for _ in range(int(call) + 1):
        data = codec.encode(array_of(bits, dtype))
    assert data.tobytes().hex() == record


def _pairs(text: str) -> list[tuple[str, str]]:
    return [(key, value) for part in text.split(",") if part for key, _, value in [part.partition("=")]]


def test_the_golden_file_has_every_codec_and_type() -> None:
    assert {(fields[0], fields[2]) for fields in golden()} == {(name, dtype) for name in NAMES for dtype in DTYPES}


def test_no_elements_make_no_bytes() -> None:
    for name, options in OPTIONS:
        codec = bagua.Codec(name, **options)
        for chunks in (1, 3):
            data = codec.encode(np.empty((0, 3), np.float32), chunks=chunks)
            assert (data.shape, codec.encoded_bytes(0, chunks=chunks)) == ((0,), 0)
            assert codec.decode(data, np.empty(0, np.float16), chunks=chunks).size == 0


def test_out_is_filled_and_returned() -> None:
    codec, x = bagua.Codec("minmax_u8"), np.linspace(-1, 1, 50, dtype=np.float32)
    expected = codec.encode(x)
    out = np.full(codec.encoded_bytes(50), 0xA5, np.uint8)
    assert codec.encode(x, out=out) is out
    assert (out == expected).all()
    square = np.full((2, expected.size // 2), 0xA5, np.uint8)
    assert (codec.encode(x, out=square).ravel() == expected).all()


def test_torch_tensors_and_other_lenders_of_dlpack_work() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")

    class Lender:
        """Supports DLPack and nothing else."""

        def __init__(self, array: Any) -> None:
            self.array = array

        def __dlpack__(self, **words: object) -> object:
            return self.array.__dlpack__(**words)

        def __dlpack_device__(self) -> Any:
            return self.array.__dlpack_device__()

    codec = bagua.Codec("bf16")
    x = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    data = codec.encode(x)
    out = torch.empty(3, 4)
    assert codec.decode(data, out) is out
    assert torch.equal(out, x)
    assert codec.encode(Lender(x)).tobytes() == data.tobytes() == codec.encode(x.bfloat16()).tobytes()
    filled = np.empty(12, np.float32)
    codec.decode(torch.from_numpy(data), Lender(filled))
    assert (filled == np.arange(12)).all()


@pytest.mark.parametrize("name", ["zip", "", "Minmax_u8"])
def test_an_unknown_name_is_answered_with_the_known_ones(name: str) -> None:
    with pytest.raises(ValueError, match="minmax_u8, f16, bf16, block_i8, top_k, random_k, onebit, int4"):
        bagua.Codec(name)


def test_a_misspelt_name_is_answered_with_the_nearest_one() -> None:
    for misspelt, meant in (("minmaxu8", "minmax_u8"), ("BF16", "bf16"), ("topk", "top_k"), ("1bit", "onebit")):
        with pytest.raises(ValueError, match=f"^no codec '{misspelt}'; did you mean '{meant}'"):
            bagua.Codec(misspelt)
        with pytest.raises(ValueError, match=f"did you mean '{meant}'"):
            raw_codec(misspelt)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("minmax_u8", {"k": 1}),
        ("f16", {"block": 1}),
        ("top_k", {"seed": 1}),
        ("top_k", {"k": "many"}),
        ("top_k", {"k": None}),
        ("block_i8", {"block": 2.0}),
        ("top_k", {"chunk": 8.0}),
        ("random_k", {"seed": 0.5}),
    ],
)
def test_an_unknown_option_or_one_of_another_type_is_a_type_error(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=next(iter(options))):
        bagua.Codec(name, **options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("top_k", {"k": k}) for k in (0, -1, 0.0, -0.1, 1.5, float("nan"))),
        *(("top_k", {"chunk": chunk}) for chunk in (0, 4097)),
        ("top_k", {"bits": 3}),
        ("random_k", {"k": 0}),
        ("random_k", {"seed": -1}),
        ("block_i8", {"block": 0}),
        ("block_i8", {"block": 2**70}),
    ],
)
def test_an_option_out_of_its_range_is_a_value_error(name: str, options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        bagua.Codec(name, **options)


def test_lengths_and_chunks_that_do_not_fit_are_value_errors() -> None:
    codec, x = bagua.Codec("minmax_u8"), np.zeros(10, np.float32)
    for chunks in (0, -1, 3, 20):
        with pytest.raises(ValueError, match="chunks"):
            codec.encode(x, chunks=chunks)
        with pytest.raises(ValueError, match="chunks"):
            codec.encoded_bytes(10, chunks=chunks)
        with pytest.raises(ValueError, match="chunks"):
            codec.decode(bytes(64), x, chunks=chunks)
    for length in (0, 63, 65, 96):
        with pytest.raises(ValueError, match=f"64 bytes, not {length}"):
            codec.decode(bytes(length), x)
        with pytest.raises(ValueError, match=f"64 bytes, not {length}"):
            codec.encode(x, out=np.empty(length, np.uint8))
    for count in (-1, 2**62):
        with pytest.raises(ValueError, match=r"elements (do not fit|cannot be cut)"):
            codec.encoded_bytes(count)
    with pytest.raises(TypeError):
        codec.encode(x, chunks=1.0)  # type: ignore[call-overload]


@pytest.mark.parametrize("dtype", ["float64", "int32", "uint8", "bool", "complex64"])
def test_other_element_types_are_type_errors(dtype: str) -> None:
    codec = bagua.Codec("minmax_u8")
    for call in (
        lambda: codec.encode(np.zeros(4, dtype)),
        lambda: codec.decode(bytes(64), np.zeros(4, dtype)),
        lambda: codec.encoded_bytes(4, dtype),
    ):
        with pytest.raises(TypeError, match=dtype):
            call()


def test_what_is_no_array_or_no_bytes_is_a_type_error() -> None:
    codec, x = bagua.Codec("f16"), np.zeros(16, np.float32)
    wrong: list[Any] = [
        lambda: codec.encode([1.0]),  # type: ignore[call-overload]
        lambda: codec.decode(x, x.copy()),
        lambda: codec.decode("text", x),  # type: ignore[arg-type]
        lambda: codec.decode(bytes(32), None),
        lambda: codec.encode(x, out=np.zeros(8, np.float32)),
        lambda: codec.encoded_bytes(4, "float31"),
        lambda: codec.encoded_bytes(4.0),  # type: ignore[arg-type]
        lambda: bagua.Codec(5),  # type: ignore[arg-type]
    ]
    for call in wrong:
        with pytest.raises(TypeError):
            call()


def test_memory_that_cannot_be_written_is_a_value_error() -> None:
    codec, x = bagua.Codec("f16"), np.zeros(16, np.float32)
    frozen = np.zeros(32, np.uint8)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        codec.encode(x, out=frozen)
    with pytest.raises(ValueError, match="contiguous"):
        codec.encode(x, out=np.zeros(64, np.uint8)[::2])
    with pytest.raises(ValueError, match="contiguous"):
        codec.decode(bytes(32), np.zeros(32, np.float32)[::2])
    with pytest.raises(ValueError, match="overlap"):
        codec.encode(x, out=x.view(np.uint8)[:32])
    with pytest.raises(ValueError, match="overlap"):
        codec.decode(x.view(np.uint8)[32:], x)


@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=IDS)
def test_copies_are_equal_and_shown_as_they_are_made(name: str, options: dict[str, float]) -> None:
    codec = bagua.Codec(name, **options)
    for twin in (pickle.loads(pickle.dumps(codec)), copy.deepcopy(codec), eval(repr(codec), {"bagua": bagua})):
        assert (twin, hash(twin)) == (codec, hash(codec))
        assert (twin.name, twin.options) == (codec.name, codec.options)
    assert codec not in (bagua.Codec("top_k", k=8), name)


def test_names_options_and_defaults_are_shown() -> None:
    codec = bagua.Codec("random_k", k=5)
    assert codec.name == "random_k"
    assert codec.options == {"k": 5, "seed": 1}
    assert repr(codec) == "bagua.Codec('random_k', k=5, seed=1)"
    assert bagua.Codec("MinMaxUInt8") == bagua.Codec("minmax_u8")
    assert bagua.Codec("top_k", k=1) != bagua.Codec("top_k", k=1.0)
    assert bagua.Codec("block_i8").options == {"block": 256}
