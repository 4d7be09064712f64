"""Kernels compared bit for bit with the core's codecs, and with the core's rules written in NumPy.

Each function checks one case. `python -m tests.cuda.kernel_cases LIBRARY` checks a selection on a library of kernels,
for the sanitizers: this module is run in a process in which they are loaded first.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bagua import extension
from tests.cuda.kernels_on_host import Array, Bytes, Kernels, is_untouched_before, placed, room, sources

U32, U64, F32, F64 = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_float, ctypes.c_double

#: Element types that are encoded: the core's name, and that of elements as integers.
CODED = {"f32": ("float32", np.uint32), "f16": ("float16", np.uint16), "bf16": ("bfloat16", np.uint16)}
#: Which element types become which by conversion: all, but float32 does not become itself.
CONVERSIONS = [(source, target) for source in CODED for target in CODED if (source, target) != ("f32", "f32")]
#: Element types of which there are averages and updates, by the kernels' names: as NumPy holds them.
HELD: dict[str, Any] = {"f16": np.uint16, "bf16": np.uint16, "f32": np.float32, "f64": np.float64}
FLOATS = tuple(HELD)
#: Codecs whose records are elements of their name.
HALVES = ("f16", "bf16")


# --- float16 and bfloat16 ---------------------------------------------------------------------------------------------


def widened(name: str, held: Array) -> Array:
    """Returns elements in the type in which kernels compute: halves as float32, with the bits of NaNs, made quiet."""
    if name == "bf16":
        return (held.astype(np.uint32) << 16).view(np.float32)
    if name != "f16":
        return held
    wide = held.view(np.float16).astype(np.float32).view(np.uint32)
    bits = held.astype(np.uint32)
    nan = (bits & 0x8000) << 16 | 0x7FC00000 | (bits & 0x3FF) << 13
    return np.where((bits & 0x7FFF) > 0x7C00, nan, wide).astype(np.uint32).view(np.float32)


def narrowed(name: str, values: Array) -> Array:
    """The nearest elements, half to even; a NaN keeps its sign and upper bits and becomes quiet."""
    if name not in ("f16", "bf16"):
        return values
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    if name == "bf16":
        rounded = (bits.astype(np.uint64) + 0x7FFF + (bits >> 16 & 1)) >> 16
        return np.where(is_nan, bits >> 16 | 0x40, rounded).astype(np.uint16)
    with np.errstate(all="ignore"):
        rounded = bits.view(np.float32).astype(np.float16).view(np.uint16)
    return np.where(is_nan, bits >> 16 & 0x8000 | 0x7E00 | bits >> 13 & 0x3FF, rounded).astype(np.uint16)


# --- elements to encode -----------------------------------------------------------------------------------------------

KINDS = (
    "normal", "equal", "large equal", "huge", "too large a range", "subnormal", "negative zeros", "ties",
    "one infinity", "one NaN",
)  # fmt: skip


def elements(kind: str, name: str, count: int, seed: int = 0) -> Array:
    """Elements as integers."""
    random = np.random.default_rng(seed)
    most = {"f32": 3.4028235e38, "f16": 65504.0, "bf16": 3.3895314e38}[name]
    values = random.normal(size=count).astype(np.float32)
    values[::17] = -0.0
    if kind == "equal":
        values[:] = 0.3
    elif kind == "large equal":
        values[:] = 30000.0
    elif kind == "huge":
        values = random.uniform(-0.4, 0.4, count).astype(np.float32) * np.float32(most)
    elif kind == "too large a range":
        values = random.uniform(-1, 1, count).astype(np.float32) * np.float32(most)
    elif kind == "subnormal":
        values *= np.float32(1e-40)
    elif kind == "negative zeros":
        values[:] = -0.0
    elif kind == "ties":
        values = random.integers(0, 511, count).astype(np.float32) / 2
    elif kind == "one infinity":
        values[count // 2] = -np.inf
    elif kind == "one NaN":
        values[count - 1] = np.nan
    return values.view(np.uint32) if name == "f32" else narrowed(name, values)


def _address(array: Bytes) -> int:
    return int(array.ctypes.data)


def core_encode(codec: str, name: str, held: Array, chunks: int) -> Bytes:
    """The records that the core makes."""
    raw, code = extension.Codec(codec, {}), extension.DTYPES[CODED[name][0]]
    records = room(raw.encoded_bytes(held.size, code, chunks))
    source = np.ascontiguousarray(held)
    raw.encode(int(source.ctypes.data), source.size, code, chunks, _address(records), records.size)
    return records


def core_decode(codec: str, name: str, records: Bytes, count: int, chunks: int) -> Array:
    """The elements that the core makes of records."""
    raw, code = extension.Codec(codec, {}), extension.DTYPES[CODED[name][0]]
    out = np.empty(count, CODED[name][1])
    raw.decode(_address(records), records.size, int(out.ctypes.data), count, code, chunks)
    return out


# --- minmax_u8 --------------------------------------------------------------------------------------------------------


def check_codec(
    kernels: Kernels,
    name: str,
    held: Array,
    chunks: int = 1,
    *,
    columns: int = 2,
    rows: int = 0,
    offset: int = 0,
    shift: int = 0,
) -> None:
    """Records and decoded elements; elements `offset` elements off 16 bytes, records `shift` bytes off."""
    count, size = held.size // chunks, held.itemsize
    grid = (columns, rows or chunks)
    expected = core_encode("minmax_u8", name, held, chunks)
    source, records = placed(held, offset * size), room(expected.size, shift)
    ranges, nonfinite = room(chunks * columns * 16), placed(np.zeros(1, np.uint32))
    kernels.launch(f"minmax_u8_range_{name}", grid, source, U64(count), U64(chunks), ranges)
    kernels.launch(f"minmax_u8_encode_{name}", grid, source, U64(count), U64(chunks), ranges, records, nonfinite)
    assert np.array_equal(records, expected), f"records differ at {np.flatnonzero(records != expected)[:9]}"
    headers = expected.reshape(chunks, -1)[:, :size].copy().view(CODED[name][1])
    assert nonfinite.view(np.uint32)[0] == np.isnan(widened(name, headers.view(HELD[name]))).sum()
    out = room(held.nbytes, offset * size)
    # 256 threads have four vectors each of a tile.
    tiles = max(1, -(-count * size // (16 * 256 * 4)))
    kernels.launch(f"minmax_u8_decode_{name}", grid[:1], records, U64(count), U64(chunks), U64(tiles), out)
    restored = core_decode("minmax_u8", name, expected, held.size, chunks)
    assert np.array_equal(out, np.frombuffer(restored.tobytes(), np.uint8))
    assert all(map(is_untouched_before, (source, records, out)))


def check_mean(
    kernels: Kernels,
    name: str,
    ranks: list[Array],
    divisor: int,
    *,
    columns: int = 2,
    shift: int = 0,
    keeps: bool = True,
) -> None:
    """The record of the mean of the ranks' records, as compressed all_reduce makes it, and that mean."""
    count, kind = ranks[0].size, CODED[name][1]
    each = [core_encode("minmax_u8", name, held, 1) for held in ranks]
    total = None
    with np.errstate(all="ignore"):
        for record in each:
            values = widened(name, core_decode("minmax_u8", name, record, count, 1).view(HELD[name]))
            total = values if total is None else total + values
        assert total is not None
        mean = narrowed(name, (total / np.float32(divisor)).astype(np.float32)).view(kind)
    expected = core_encode("minmax_u8", name, mean, 1)
    records, number = placed(np.concatenate(each), shift), U32(len(ranks))
    tables, ranges, record = room(len(ranks) * 1024), room(columns * 16), room(expected.size, shift)
    kept, nonfinite = room(mean.nbytes) if keeps else None, placed(np.zeros(1, np.uint32))
    shared = len(ranks) * 1024 if len(ranks) <= 32 else 0
    common = (records, U64(count), number, F32(divisor), tables)
    kernels.launch(f"minmax_u8_tables_{name}", (len(ranks),), records, U64(count), tables)
    kernels.launch(f"minmax_u8_reduce_range_{name}", (columns,), *common, ranges, shared=shared)
    kernels.launch(f"minmax_u8_reduce_{name}", (columns,), *common, ranges, record, kept, nonfinite, shared=shared)
    assert np.array_equal(record, expected), f"the record differs at {np.flatnonzero(record != expected)[:9]}"
    header = expected[: mean.itemsize].copy().view(HELD[name])
    assert nonfinite.view(np.uint32)[0] == int(np.isnan(widened(name, header))[0])
    if kept is not None:
        is_nan = np.isnan(widened(name, mean.view(HELD[name])))
        assert np.array_equal(kept.view(kind)[~is_nan], mean[~is_nan])
        assert np.all(np.isnan(widened(name, kept.view(HELD[name])[is_nan])))
    assert is_untouched_before(record)


# --- conversions ------------------------------------------------------------------------------------------------------


def every_upper_half() -> Array:
    """All 65,536 upper halves of float32, with ties and their neighbours."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    return np.concatenate(
        [upper | low for low in (0, 1, 0x0FFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    )


def check_convert(
    kernels: Kernels,
    source: str,
    target: str,
    held: Array,
    chunks: int = 1,
    *,
    grid: tuple[int, int] = (2, 2),
    offset: int = 0,
    shift: int = 0,
) -> None:
    """Against the core's codecs; elements `offset` elements off 16 bytes, records `shift` bytes off.

    From halves to float32 records become elements, else elements become records.
    """
    count = held.size // chunks
    step = -(-count // 16) * 16
    if target == "f32":
        records = np.zeros((chunks, step), np.uint16)
        records[:, :count] = held.reshape(chunks, count)
        given = placed(records, shift)
        expected = core_decode(source, "f32", placed(records), held.size, chunks)
        out, steps = room(expected.nbytes, offset * 4), (step, count)
    else:
        expected = core_encode(target, source, held, chunks).view(np.uint16)
        given, out, steps = placed(held, offset * held.itemsize), room(expected.nbytes, shift), (count, step)
    kernels.launch(
        f"convert_{source}_{target}", grid, given, U64(steps[0]), out, U64(steps[1]), U64(count), U64(chunks)
    )
    got = np.frombuffer(out.tobytes(), expected.dtype)
    assert np.array_equal(got, expected), f"differs at {np.flatnonzero(got != expected)[:9]}"
    assert is_untouched_before(out)


def check_convert_reduce(
    kernels: Kernels, half: str, name: str, ranks: list[Array], divisor: int, *, columns: int = 2
) -> None:
    """The record of the mean of the ranks' records, as compressed all_reduce makes it through f16 or bf16."""
    count, kind = ranks[0].size, CODED[name][1]
    each = [core_encode(half, name, held, 1) for held in ranks]
    total = None
    with np.errstate(all="ignore"):
        for record in each:
            values = widened(name, core_decode(half, name, record, count, 1).view(HELD[name]))
            total = values if total is None else total + values
        assert total is not None
        mean = narrowed(name, (total / np.float32(divisor)).astype(np.float32)).view(kind)
    expected = core_encode(half, name, mean, 1)
    # The bytes of a record's padding do not count.
    together = np.stack(each)
    together[:, 2 * count :] = 0xA5
    record = room(expected.size)
    kernels.launch(
        f"convert_reduce_{name}_{half}", (columns,), placed(together), U64(expected.size), U64(count),
        U32(len(ranks)), F32(divisor), record,
    )  # fmt: skip
    wrong = np.flatnonzero(record.view(np.uint16) != expected.view(np.uint16))
    assert wrong.size == 0, f"the record differs at {wrong[:9]}"
    assert is_untouched_before(record)


# --- averages and updates ---------------------------------------------------------------------------------------------


def arrays(name: str, number: int, count: int, seed: int = 0) -> list[Array]:
    """Sources of an average. No place has two NaNs: which of them a sum keeps is not defined."""
    random = np.random.default_rng(seed)
    wide: type[np.float32 | np.float64] = np.float64 if name == "f64" else np.float32
    tiny, most = {"f16": (6e-8, 6e4), "f64": (5e-324, 1e308)}.get(name, (1e-45, 3e38))
    special = np.array([0.0, -0.0, np.inf, -np.inf, tiny, -tiny, most, -most, 1.0], wide)
    result: list[Array] = []
    at_nan = random.integers(0, 40, count)
    for k in range(number):
        values = random.normal(size=count).astype(wide)
        chosen = (random.random(count) < 0.1) & (at_nan >= number)
        values[chosen] = random.choice(special, int(chosen.sum()))
        bits = values.view(np.uint64 if wide is np.float64 else np.uint32)
        # A NaN of its own in one source: quiet and signalling ones.
        nan = np.flatnonzero(at_nan == k)
        payload = random.integers(1, 1 << 20, nan.size).astype(bits.dtype)
        infinity = 0x7FF << 52 if wide is np.float64 else 0xFF << 23
        bits[nan] = (
            infinity
            | payload << (29 if wide is np.float64 else 2)
            | (nan % 2).astype(bits.dtype) << (bits.itemsize * 8 - 1)
        )
        result.append(narrowed(name, values))
        if name in ("f16", "bf16"):
            # Rounding made them quiet.
            result[-1][nan[::2]] ^= np.uint16(0x200 if name == "f16" else 0x40)
            result[-1][nan[::2]] |= np.uint16(1)
    return result


def check_average(
    kernels: Kernels,
    name: str,
    number: int,
    count: int,
    *,
    offsets: tuple[int, ...] = (0,),
    in_place: int | None = None,
) -> None:
    """An average of so many sources, the k-th offsets[k] elements off 16 bytes, the result by the last offset."""
    inputs = arrays(name, number, count, seed=count)
    divisor = number if count % 2 else number + 3
    total = widened(name, inputs[0]).copy()
    with np.errstate(all="ignore"):
        for held in inputs[1:]:
            total = total + widened(name, held)
        expected = narrowed(name, total / total.dtype.type(divisor))
    step = expected.itemsize
    given = [placed(held, offsets[k % len(offsets)] * step) for k, held in enumerate(inputs)]
    out = given[in_place] if in_place is not None else room(expected.nbytes, offsets[-1] * step)
    kernels.launch(f"average_{name}", (2,), sources(given), U32(number), out, U64(count), F64(divisor))
    got = np.frombuffer(out.tobytes(), expected.dtype)
    wrong = np.flatnonzero(got.view(f"u{step}") != expected.view(f"u{step}"))
    shown = [[held[i] for held in inputs] for i in wrong[:3]]
    assert wrong.size == 0, f"differs at {wrong[:3]}: {shown} gives {got[wrong[:3]]}, not {expected[wrong[:3]]}"
    assert is_untouched_before(out)


def check_update(kernels: Kernels, name: str, count: int, *, offsets: tuple[int, ...] = (0,)) -> None:
    """Correct; the two of the ring where the type is encoded."""
    inputs = arrays(name, 4, count, seed=count + 1)
    # A third of the weights have not moved since their snapshot.
    inputs[0][::3] = inputs[2][::3]
    step = inputs[0].itemsize
    given = [placed(held, offsets[k % len(offsets)] * step) for k, held in enumerate(inputs)]
    w, a, s, other = (widened(name, held) for held in inputs)
    same = inputs[0].view(f"u{step}") == inputs[2].view(f"u{step}")
    with np.errstate(all="ignore"):
        if name in CODED:
            third, five_thirds = np.float32(1.0) / np.float32(3.0), np.float32(5.0) / np.float32(3.0)
            ring = ((w + a * third) + s * third) - other * five_thirds
            out = room(given[0].size, offsets[-1] * step)
            kernels.launch(f"update_ring_difference_{name}", (2,), *given, out, U64(count))
            # Where a weight has not moved and is NaN, two of the four are.
            twice = np.isnan(w) & np.isnan(s)
            kind = f"u{step}"
            _equal(out.view(kind)[~twice], narrowed(name, ring)[~twice], "ring_difference")
            replica = placed(inputs[1], offsets[0] * step)
            kernels.launch(f"update_ring_take_{name}", (2,), replica, given[3], U64(count))
            _equal(replica, narrowed(name, a + other), "ring_take")
        moved = narrowed(name, w + (a - s))
        kernels.launch(f"update_correct_{name}", (2,), *given[:3], U64(count))
        _equal(given[0], np.where(same, inputs[1].view(f"u{step}"), moved.view(f"u{step}")), "correct")


def check_feedback(kernels: Kernels, name: str, count: int, kind: str = "normal") -> None:
    """Error feedback: what is added, what encoding and the mean lose, and whether the error is kept."""
    kinds = (kind, "normal", "normal")
    held, decoded, mean = (elements(each, name, count, at).view(HELD[name]) for at, each in enumerate(kinds))
    error, older = (np.random.default_rng(seed).normal(size=count).astype(np.float32) for seed in (3, 4))
    data, after, kept = placed(held), room(error.nbytes), placed(older)
    with np.errstate(all="ignore"):
        sums = widened(name, held) + error
        lost = sums - widened(name, decoded)
        again = lost + np.float32(3) * (widened(name, mean) - widened(name, decoded))
    kernels.launch(f"feedback_add_{name}", (2,), data, placed(error), after, U64(count))
    _equal(data, narrowed(name, sums), "data")
    _equal(after, sums, "sum")
    kernels.launch(f"feedback_lose_{name}", (2,), after, placed(decoded), U64(count))
    _equal(after, lost, "loss")
    kernels.launch(f"feedback_lose_mean_{name}", (2,), after, placed(mean), placed(decoded), U64(count), F32(3.0))
    _equal(after, again, "loss of the mean")
    nonfinite = placed(np.zeros(1, np.uint32))
    kernels.launch(f"feedback_look_{name}", (2,), data, U64(count), nonfinite)
    finite = bool(np.isfinite(widened(name, data.view(held.dtype))).all())
    assert (nonfinite.view(np.uint32)[0] == 0) == finite
    kernels.launch("feedback_keep_f32", (2,), kept, after, U64(count), nonfinite)
    _equal(kept, again if finite else older, "error")


def _equal(got: NDArray[Any], expected: Array, what: str) -> None:
    wanted = np.frombuffer(expected.tobytes(), got.dtype)
    assert np.array_equal(got, wanted), f"{what} differs at {np.flatnonzero(got != wanted)[:9]}"


# --- for the sanitizers -----------------------------------------------------------------------------------------------


def check_all(kernels: Kernels) -> int:
    """A selection of all cases, with small arrays that end where their memory ends. Returns how many."""
    done = 0
    for name, kind in itertools.product(CODED, KINDS):
        for count, chunks, offset, shift in ((1, 1, 0, 0), (61, 3, 1, 3), (1000, 2, 0, 0), (2053, 1, 3, 4)):
            check_codec(kernels, name, elements(kind, name, count * chunks), chunks, offset=offset, shift=shift)
            done += 1
    for name, (number, count) in itertools.product(CODED, ((2, 1), (3, 100), (8, 777), (34, 40))):
        check_mean(kernels, name, [elements("normal", name, count, k) for k in range(number)], number, shift=number % 3)
        done += 1
    for source, target in CONVERSIONS:
        for count, chunks, offset, shift in (
            (1, 1, 0, 0),
            (100, 1, 0, 0),
            (117, 1, 1, 2),
            (61, 3, 1, 5),
            (64, 2, 2, 4),
        ):
            held = elements("normal", source, count * chunks)
            check_convert(kernels, source, target, held, chunks, offset=offset, shift=shift)
            done += 1
    for half, name, (number, count) in itertools.product(HALVES, CODED, ((2, 1), (3, 100), (9, 777))):
        # Of the last ranks elements that overflow, and one that is NaN.
        kinds = ["normal"] * (number - 2) + ["too large a range", "one NaN"]
        held = [elements(kind, name, count, rank) for rank, kind in enumerate(kinds)]
        check_convert_reduce(kernels, half, name, held, number)
        done += 1
    sizes = ((1, 1, (0,)), (8, 133, (1,)), (3, 40, (0, 1)), (3, 40, (0, 1, 1)))
    for name, (number, count, place) in itertools.product(FLOATS, sizes):
        check_average(kernels, name, number, count, offsets=place)
        done += 1
    for name, (count, place) in itertools.product(FLOATS, ((1, (0,)), (133, (1,)), (40, (0, 1)))):
        check_update(kernels, name, count, offsets=place)
        done += 1
    for name, count in itertools.product(CODED, (1, 133)):
        check_feedback(kernels, name, count)
        done += 1
    return done


if __name__ == "__main__":
    print(check_all(Kernels(sys.argv[1])), "cases")
