"""The codecs top_k and random_k once more, in NumPy and in Python's integers. The others have a reference in Rust."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
F = np.float32


def to_bits(values: Floats, dtype: str) -> npt.NDArray[Any]:
    """Values as elements: bits of float32, float16 or bfloat16, half to even."""
    if dtype == "float32":
        return values.astype(F).view(np.uint32)
    if dtype == "float16":
        return values.astype(np.float16).view(np.uint16)
    bits = values.astype(F).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), bits >> 16 | 0x40, rounded).astype(np.uint16)


def to_values(bits: npt.NDArray[Any], dtype: str) -> Floats:
    """Elements as float32."""
    if dtype == "float32":
        return bits.view(F)
    if dtype == "float16":
        return bits.view(np.float16).astype(F)
    return (bits.astype(np.uint32) << 16).view(F)


def bits_of(raw: bytes | Bytes, dtype: str) -> npt.NDArray[Any]:
    """Bytes as elements."""
    return np.frombuffer(bytes(raw), np.uint32 if dtype == "float32" else np.uint16)


def padded(*parts: npt.NDArray[Any] | bytes) -> bytes:
    """Parts one after the other, zeros up to a multiple of 32."""
    joined = b"".join(part if isinstance(part, bytes) else part.tobytes() for part in parts)
    return joined + bytes(-len(joined) % 32)


class Sparse:
    """What top_k and random_k have in common."""

    def __init__(self, k: float) -> None:
        self._k = k

    def kept(self, count: int) -> int:
        return math.ceil(self._k * count) if isinstance(self._k, float) else min(self._k, count)

    def write(self, bits: npt.NDArray[Any], places: list[int]) -> bytes:
        return padded(np.array(places, np.uint32), bits[places])

    def decode(self, record: bytes, count: int, dtype: str) -> Floats:
        kept = self.kept(count)
        values = np.zeros(count, F)
        if kept:
            bits = bits_of(record[4 * kept :], dtype)[:kept]
            values[np.frombuffer(record, np.uint32, kept)] = to_values(bits, dtype)
        return values


class TopK(Sparse):
    """top_k."""

    def __init__(self, k: float = 0.01) -> None:
        super().__init__(k)

    def chosen(self, x: Floats) -> list[int]:
        """The places of the largest magnitudes."""
        order = sorted(range(x.size), key=lambda at: (not np.isnan(x[at]), -np.abs(x[at]), at))
        return sorted(order[: self.kept(x.size)])

    def encode(self, bits: npt.NDArray[Any], dtype: str) -> bytes:
        return self.write(bits, self.chosen(to_values(bits, dtype)))


class ChunkedTopK(TopK):
    """top_k with chunks."""

    def __init__(self, k: float = 0.01, chunk: int = 4096, bits: int = 2) -> None:
        super().__init__(k)
        self._chunk = chunk

    def encode(self, bits: npt.NDArray[Any], dtype: str) -> bytes:
        values = to_values(bits, dtype)
        parts = []
        for begin in range(0, values.size, self._chunk):
            x = values[begin : begin + self._chunk]
            places = self.chosen(x)
            magnitudes = [abs(float(x[at])) for at in places]
            scale, weights = self._scale(magnitudes)
            codes = [
                0 if math.isnan(scale) else int(x[at] < 0) | w - 1 << 1 for at, w in zip(places, weights, strict=True)
            ]
            parts.append(np.array([scale], F).tobytes())
            parts.append(self._packed(places, 12))
            parts.append(self._packed(codes, 2))
        return padded(*parts)

    @staticmethod
    def _scale(magnitudes: list[float]) -> tuple[float, list[int]]:
        mean = 0.0
        for magnitude in magnitudes:
            mean += magnitude
        mean /= len(magnitudes)
        if not math.isfinite(mean):
            return math.nan, [1] * len(magnitudes)
        weights = [2 if magnitude > 1.5 * mean else 1 for magnitude in magnitudes]
        total = 0.0
        for weight, magnitude in zip(weights, magnitudes, strict=True):
            total += weight * magnitude
        scale = total / sum(weight * weight for weight in weights)
        return min(scale, max(magnitudes) / 2) if 2 in weights else scale, weights

    @staticmethod
    def _packed(numbers: list[int], bits: int) -> bytes:
        joined = sum(number << i * bits for i, number in enumerate(numbers))
        return joined.to_bytes(-(-len(numbers) * bits // 8), "little")

    def decode(self, record: bytes, count: int, dtype: str) -> Floats:
        values, at = np.zeros(count, F), 0
        for begin in range(0, count, self._chunk):
            x = values[begin : begin + self._chunk]
            kept = self.kept(x.size)
            scale = np.frombuffer(record, F, 1, at)[0]
            middle, end = at + 4 + -(-kept * 12 // 8), at + 4 + -(-kept * 12 // 8) + -(-kept * 2 // 8)
            places, codes = (int.from_bytes(part, "little") for part in (record[at + 4 : middle], record[middle:end]))
            for i in range(kept):
                code = codes >> 2 * i & 3
                x[places >> 12 * i & 4095] = (-scale if code & 1 else scale) * F(1 + (code >> 1))
            at = end
        return values


class RandomK(Sparse):
    """random_k; counts its calls as the codec does."""

    def __init__(self, k: float = 0.01, seed: int = 1) -> None:
        super().__init__(k)
        self._seed, self._draw = seed, 0

    def encode(self, bits: npt.NDArray[Any], dtype: str) -> bytes:
        x = to_values(bits, dtype)
        generator = SplitMix64(SplitMix64(SplitMix64(self._seed).number() + self._draw).number())
        self._draw += 1 << 32
        places: set[int] = set()
        for j in range(x.size - self.kept(x.size), x.size):
            t = generator.below(j + 1)
            places.add(j if t in places else t)
        if not np.isfinite(x).all():
            bits = to_bits(np.full(x.size, np.nan, F), dtype)
        return self.write(bits, sorted(places))


class SplitMix64:
    """Steele, Lea and Flood's generator, and Lemire's numbers below a bound."""

    def __init__(self, state: int) -> None:
        self._state = state % 2**64

    def number(self) -> int:
        self._state = (self._state + 0x9E3779B97F4A7C15) % 2**64
        z = self._state
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return z ^ z >> 31

    def below(self, bound: int) -> int:
        while True:
            product = self.number() * bound
            if product % 2**64 >= 2**64 % bound:
                return product >> 64


ORACLES: dict[str, Any] = {
    "top_k": lambda **options: (ChunkedTopK if options.keys() & {"chunk", "bits"} else TopK)(**options),
    "random_k": RandomK,
}
