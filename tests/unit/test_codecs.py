"""`bagua.Codec`: records and values against an oracle in NumPy, and what it refuses."""

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
from tests.unit.codec_oracle import ORACLES, bits_of, to_bits, to_values

GOLDEN = Path(__file__).resolve().parents[2] / "rust/bagua-kernels/src/codec/golden.txt"
NAMES = tuple(extension.CODECS)
DTYPES = ("float32", "float16", "bfloat16")
OPTIONS: list[tuple[str, dict[str, float]]] = [
    *((name, {}) for name in NAMES),
    ("block_i8", {"block": 1}),
    ("block_i8", {"block": 19}),
    ("top_k", {"k": 7}),
    ("top_k", {"k": 0.3}),
    ("random_k", {"k": 7, "seed": 3}),
    ("random_k", {"k": 0.3}),
]
IDS = [name + "".join(f",{key}={value}" for key, value in options.items()) for name, options in OPTIONS]


def array_of(bits: np.ndarray[Any, Any], dtype: str) -> Any:
    """Elements as an array that Codec takes; bfloat16 as a tensor of torch, which NumPy has no type for."""
    if dtype != "bfloat16":
        return bits.view(dtype).copy()
    torch = pytest.importorskip("torch", reason="torch is not installed, and NumPy has no bfloat16")
    return torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16)


def raw_bits(array: Any, dtype: str) -> np.ndarray[Any, Any]:
    """The reverse."""
    if dtype != "bfloat16":
        return bits_of(array.tobytes(), dtype)
    return array.view(__import__("torch").int16).numpy().view(np.uint16)


def ordinary(count: int, dtype: str, seed: int = 0) -> np.ndarray[Any, Any]:
    """Bits of ordinary elements: normal, some of them zeros or equal."""
    values = np.random.default_rng(seed).normal(size=count).astype(np.float32)
    values[::17] = 0
    values[5::23] = -0.0
    values[7::29] = 1.25
    return to_bits(values, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=IDS)
def test_records_and_values_are_those_of_the_oracle(name: str, options: dict[str, float], dtype: str) -> None:
    codec, oracle = bagua.Codec(name, **options), ORACLES[name](**options)
    for count in (7, 8, 31, 100, 257, 1000):
        bits = ordinary(count, dtype, seed=count)
        data = codec.encode(array_of(bits, dtype))
        expected = oracle.encode(bits, dtype)
        assert (data.dtype, data.shape) == (np.dtype(np.uint8), (len(expected),))
        assert data.tobytes() == expected, count
        assert codec.encoded_bytes(count, dtype) == len(expected)
        out = array_of(np.full_like(bits, 0x3C3C), dtype)
        assert codec.decode(data, out) is out
        assert (raw_bits(out, dtype) == to_bits(oracle.decode(expected, count, dtype), dtype)).all(), count


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=IDS)
def test_what_is_not_finite_is_treated_as_the_oracle_does(
    name: str, options: dict[str, float], dtype: str, bad: float
) -> None:
    codec, oracle = bagua.Codec(name, **options), ORACLES[name](**options)
    for at in (0, 100, 256, 299):
        bits = ordinary(300, dtype)
        bits[at] = to_bits(np.array([bad], np.float32), dtype)[0]
        data = codec.encode(array_of(bits, dtype))
        assert data.tobytes() == oracle.encode(bits, dtype)
        out = array_of(np.zeros_like(bits), dtype)
        back = to_values(raw_bits(codec.decode(data, out), dtype), dtype)
        assert np.array_equal(
            back, to_values(to_bits(oracle.decode(data.tobytes(), 300, dtype), dtype), dtype), equal_nan=True
        )
        if name != "random_k":
            assert not np.isfinite(back[at])
        assert not np.isfinite(back).all()


def golden() -> list[list[str]]:
    lines = GOLDEN.read_text().splitlines()
    return [line.split("|") for line in lines if not line.startswith("#")]


@pytest.mark.parametrize("fields", golden(), ids=lambda fields: f"{fields[0]}-{fields[2]}-{fields[4][:24]}")
def test_records_have_the_bytes_of_the_golden_file(fields: list[str]) -> None:
    name, given, dtype, call, elements, record = fields
    options = {key: float(value) if "." in value else int(value) for key, value in _pairs(given)}
    codec, oracle = bagua.Codec(name, **options), ORACLES[name](**options)
    assert codec.options == options
    bits = bits_of(bytes.fromhex(elements), dtype)
    for _ in range(int(call) + 1):
        data, expected = codec.encode(array_of(bits, dtype)), oracle.encode(bits, dtype)
    assert data.tobytes().hex() == record
    assert expected.hex() == record


def _pairs(text: str) -> list[tuple[str, str]]:
    return [(key, value) for part in text.split(",") if part for key, _, value in [part.partition("=")]]


def test_the_golden_file_has_every_codec_and_type() -> None:
    assert {(fields[0], fields[2]) for fields in golden()} == {(name, dtype) for name in NAMES for dtype in DTYPES}


def test_minmax_u8_is_within_half_a_level_and_block_i8_within_half_a_step() -> None:
    x = np.random.default_rng(1).normal(size=10_000).astype(np.float32)
    back = np.empty_like(x)
    bagua.Codec("MinMaxUInt8").decode(bagua.Codec("minmax_u8").encode(x), back)
    assert np.abs(x - back).max() <= np.ptp(x) / 510 * 1.0001
    codec = bagua.Codec("block_i8", block=100)
    codec.decode(codec.encode(x), back)
    steps = np.repeat(np.abs(x.reshape(-1, 100)).max(1) / 127, 100)
    assert (np.abs(x - back) <= steps * 0.50001).all()
    assert np.abs(x - back).max() > 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=IDS)
def test_chunks_have_a_record_each(name: str, options: dict[str, float], dtype: str) -> None:
    codec, bits = bagua.Codec(name, **options), ordinary(120, dtype)
    data = codec.encode(array_of(bits, dtype), chunks=4)
    assert data.size == codec.encoded_bytes(120, dtype, chunks=4) == 4 * codec.encoded_bytes(30, dtype)
    out = array_of(np.zeros_like(bits), dtype)
    codec.decode(data, out, chunks=4)
    parts = np.split(data, 4)
    for part, values in zip(parts, np.split(raw_bits(out, dtype), 4), strict=True):
        alone = array_of(np.zeros(30, bits.dtype), dtype)
        assert (raw_bits(codec.decode(part, alone), dtype) == values).all()
    if name == "random_k":
        places = [part[: 4 * ORACLES[name](**options).kept(30)].tobytes() for part in parts]
        assert len(set(places)) > 1
    else:
        assert parts[1].tobytes() == codec.encode(array_of(bits[30:60], dtype)).tobytes()


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


def test_arrays_of_any_framework_and_form_are_read() -> None:
    codec = bagua.Codec("top_k", k=1.0)
    x = np.arange(24, dtype=np.float32).reshape(4, 6) - 11
    expected = codec.encode(x).tobytes()
    frozen = x.copy()
    frozen.flags.writeable = False
    assert codec.encode(frozen).tobytes() == expected
    assert codec.encode(np.asfortranarray(x)).tobytes() == expected
    assert codec.encode(memoryview(x)).tobytes() == expected  # type: ignore[arg-type]
    unaligned = np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view(np.float32)
    assert not unaligned.flags.aligned
    assert codec.encode(unaligned).tobytes() == expected
    for data in (expected, bytearray(expected), np.frombuffer(expected, np.uint8)):
        assert (codec.decode(data, np.empty((4, 6), np.float32)) == x).all()
    spread = np.zeros(2 * len(expected), np.uint8)[::2]
    spread[:] = np.frombuffer(expected, np.uint8)
    assert (codec.decode(spread, np.empty((4, 6), np.float32)) == x).all()


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


def test_random_k_draws_anew_at_each_call_and_the_same_in_every_object() -> None:
    x = np.ones(1000, np.float32)
    first, second = bagua.Codec("random_k", k=20), bagua.Codec("random_k", k=20)
    draws = [first.encode(x).tobytes() for _ in range(3)]
    with pytest.raises(ValueError, match="chunks"):
        second.encode(x, chunks=3)
    with pytest.raises(ValueError, match="bytes"):
        second.encode(x, out=np.empty(5, np.uint8))
    assert [second.encode(x).tobytes() for _ in range(3)] == draws
    assert len(set(draws)) == 3
    assert bagua.Codec("random_k", k=20, seed=2).encode(x).tobytes() not in draws


@pytest.mark.parametrize("name", ["zip", "", "Minmax_u8"])
def test_an_unknown_name_is_answered_with_the_known_ones(name: str) -> None:
    with pytest.raises(ValueError, match="minmax_u8, f16, bf16, block_i8, top_k, random_k, onebit"):
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
        ("random_k", {"k": 0}),
        ("random_k", {"seed": -1}),
        ("block_i8", {"block": 0}),
        ("block_i8", {"block": 2**70}),
    ],
)
def test_an_option_out_of_its_range_is_a_value_error(name: str, options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        bagua.Codec(name, **options)


@pytest.mark.parametrize("name", ["top_k", "random_k"])
def test_where_there_are_fewer_elements_than_shall_be_kept_all_are(name: str) -> None:
    codec = bagua.Codec(name, k=6)
    x = np.arange(1, 11, dtype=np.float32)
    for chunks in (2, 5):
        assert codec.encoded_bytes(10, chunks=chunks) == bagua.Codec(name, k=1.0).encoded_bytes(10, chunks=chunks)
        assert np.array_equal(codec.decode(codec.encode(x, chunks=chunks), np.empty_like(x), chunks=chunks), x)


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


def test_places_that_no_encoder_writes_are_a_value_error() -> None:
    codec = bagua.Codec("top_k", k=2)
    for places in ([3, 3], [4, 1], [0, 10], [0, 2**32 - 1]):
        record = np.zeros(32, np.uint8)
        record[:8] = np.array(places, "<u4").view(np.uint8)
        with pytest.raises(ValueError, match="place"):
            codec.decode(record, np.zeros(10, np.float32))


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


def test_threads_share_a_codec() -> None:
    from concurrent.futures import ThreadPoolExecutor

    codec = bagua.Codec("top_k", k=0.1)
    arrays = [np.random.default_rng(seed).normal(size=5000).astype(np.float32) for seed in range(8)]
    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(lambda x: codec.encode(x).tobytes(), arrays * 10))
    assert made == [codec.encode(x).tobytes() for x in arrays] * 10
