"""Codecs: compress arrays to fewer bytes, and restore them.

    codec = bagua.Codec("minmax_u8")
    data = codec.encode(x)
    codec.decode(data, y)

The page "Codecs" describes the formats and the error of each codec.
"""

from __future__ import annotations

from typing import Any, TypeVar, overload

import numpy as np
import numpy.typing as npt

from bagua import extension, hints
from bagua.arrays import Array, operand
from bagua.extension import DTYPES
from bagua.operand import Operand, check_beside

__all__ = ["Codec"]

_Out = TypeVar("_Out", bound=Array)


class Codec:
    """Encoder and decoder for float32, float16 and bfloat16. Results are the same on every processor.

    | name | options | bytes per float32 element | decoded value |
    |---|---|---|---|
    | `"minmax_u8"`, `"MinMaxUInt8"` | | 1 | one of 256 levels between the smallest and the largest element |
    | `"f16"`, `"bf16"` | | 2 | the nearest float16 or bfloat16 |
    | `"block_i8"` | `block=256` | 1 + 4 / block | one of 255 levels, scaled by the largest magnitude of each block |
    | `"int4"` | | 17/32 | one of 15 levels, scaled by the largest magnitude of each block of 64 |
    | `"top_k"` | `k=0.01` | 8 k | the k elements of the largest magnitude, 0 elsewhere |
    | `"top_k"` | `k=0.01`, `chunk`, `bits=2` | 1.75 k + 4 / chunk | the same, as one of two magnitudes per chunk |
    | `"random_k"` | `k=0.01`, `seed=1` | 8 k | k elements drawn at random, 0 elsewhere |
    | `"onebit"` | | 1/8 | plus or minus the mean magnitude |

    A float `k` is a fraction of the elements, an int `k` a number of elements (all, if there are fewer). With `chunk`
    (at most 4096), `k` is a fraction or number of the elements of each chunk. `random_k`
    draws new positions at each call of :meth:`encode`: two objects with the same options draw the same positions in the
    same call.

    Sources: minmax_u8 is the compression of the original's ByteGrad; block_i8 follows Dettmers et al. 2021
    (arXiv:2110.02861), top_k Aji and Heafield 2017 (arXiv:1704.05021), its chunks SparseLoCo (arXiv:2508.15706), onebit
    Seide et al. 2014 with the scale of Karimireddy et al. 2019 (arXiv:1901.09847).

    Raises ValueError for an unknown name, listing the known ones, and for an option out of range. Raises TypeError for
    an unknown option, or an option of the wrong type.
    """

    __slots__ = ("_raw",)

    def __init__(self, name: str, **options: float) -> None:
        self._raw = _raw(name, options)

    @property
    def name(self) -> str:
        """The registered name."""
        return self._raw.name

    @property
    def options(self) -> dict[str, float]:
        """All options with their values, including defaults."""
        return self._raw.options

    def encoded_bytes(self, count: int, dtype: str = "float32", *, chunks: int = 1) -> int:
        """Returns the number of bytes that :meth:`encode` writes for `count` elements of a type such as `"bfloat16"`.

        Raises the same errors as :meth:`encode`.
        """
        code = DTYPES.get(dtype)
        if code is None:
            raise TypeError(f"no element type {dtype!r}; known: {', '.join(DTYPES)}")
        return self._raw.encoded_bytes(count, code, chunks)

    @overload
    def encode(
        self, x: Array, *, chunks: int = 1, out: None = None, stream: int | None = None
    ) -> npt.NDArray[np.uint8]: ...
    @overload
    def encode(self, x: Array, *, chunks: int = 1, out: _Out, stream: int | None = None) -> _Out: ...
    def encode(self, x: Array, *, chunks: int = 1, out: Any = None, stream: int | None = None) -> Any:
        """Encodes an array. Returns the bytes as a one-dimensional NumPy array of uint8, or `out`.

        `x` is an array in host memory of any shape, in float32, float16 or bfloat16. It is only read, and copied first
        if it is not contiguous. Its elements, in C order, are cut into `chunks` equal parts that are encoded
        separately. `out` is a contiguous array of uint8 with :meth:`encoded_bytes` bytes.

        With minmax_u8, f16 and bf16, `x` and `out` may be on a CUDA device. Both must then be contiguous, and `out` is
        required. The bytes equal those of the host. `stream` is a CUstream as an integer, in DLPack's numbering; None
        is the legacy stream. The kernels run in the order of that stream, and the host does not wait for them. The
        first use on a device compiles the kernels, which takes seconds unless they are cached.

        Elements that a codec cannot represent, such as infinity, are decoded as NaN.

        Raises ValueError if `chunks` does not divide the number of elements, or if `out` has another length, is
        read-only, is not contiguous or overlaps `x`. Raises TypeError if `x` or `out` is not an array or has another
        element type. For CUDA arrays, also raises NotImplementedError for any other codec and for a stream that is
        being captured into a graph; ValueError if an array is not contiguous; TypeError if `out` is missing or on
        another device; BaguaError without CUDA or NVRTC; and DeviceError.
        """
        memory = self._operand(x, "x", stream)
        expected = self._raw.encoded_bytes(memory.count, memory.dtype, chunks)
        memory = memory.to_read("x")
        if out is None and memory.place is not None:
            raise TypeError(f"x is on {memory.where}: pass out= with an array of uint8 there")
        made = np.empty(expected, np.uint8) if out is None else out
        data = _beside(memory, _bytes(made, "out", stream), "out", "x").to_write("out")
        records = data.address, data.count
        self._raw.encode(memory.address, memory.count, memory.dtype, chunks, *records, **_on_device(memory, data))
        return made

    def decode(self, data: Array, out: _Out, *, chunks: int = 1, stream: int | None = None) -> _Out:
        """Decodes into `out` the bytes that :meth:`encode` wrote with the same number of `chunks`. Returns `out`.

        `data` is an array of uint8, or bytes. `out` is a contiguous array in host memory, in float32, float16 or
        bfloat16, with the element type and the number of elements that were encoded, in any shape. The bytes are
        checked, so data from an attacker cannot do harm. After an error, parts of `out` may have been written.

        Both may be on a CUDA device. They must then be contiguous; `stream` is as in :meth:`encode`.

        Raises ValueError if the bytes have the wrong length or cannot come from the encoder, if `chunks` does not
        divide the number of elements, or if `out` is read-only, is not contiguous or overlaps `data`. Raises TypeError
        if either is not an array or has another element type. For CUDA arrays, also raises the errors of
        :meth:`encode`.
        """
        memory = self._operand(out, "out", stream).to_write("out")
        records = _beside(memory, _bytes(data, "data", stream), "data", "out").to_read("data")
        elements = memory.address, memory.count, memory.dtype
        self._raw.decode(records.address, records.count, *elements, chunks, **_on_device(memory, records))
        return out

    def _operand(self, x: Array, what: str, stream: int | None) -> Operand:
        """Returns the operand of an array. Raises NotImplementedError on a device if the codec has no kernels."""
        memory = operand(x, what, stream)
        if memory.place is not None:
            self._raw.check_device()
        return memory

    def __repr__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"bagua.Codec({self.name!r}{options})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Codec):
            return NotImplemented
        return repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the name and options. An unpickled random_k starts again with its first draw."""
        return _named, (self.name, self.options)


def _named(name: str, options: dict[str, float]) -> Codec:
    return Codec(name, **options)


def _raw(name: str, options: dict[str, float]) -> extension.Codec:
    """Returns the extension's codec. Raises ValueError for an unknown name, suggesting a similar one."""
    try:
        return extension.Codec(name, options)
    except ValueError:
        if name in extension.CODECS:
            raise
        raise ValueError(hints.unknown_name("codec", name, extension.CODECS)) from None


def _beside(one: Operand, other: Operand, what: str, beside: str) -> Operand:
    check_beside(one, other, what, beside)
    return other


def _on_device(elements: Operand, records: Operand) -> dict[str, Any]:
    """Returns the further arguments that the extension needs for device memory; empty for host memory."""
    if elements.place is None:
        return {}
    call = elements.place.call_alone([elements.place, records.place])
    return {"call": call, "keep": (elements, records)}


def _bytes(x: Array, what: str, stream: int | None) -> Operand:
    memory = operand(x, what, stream)
    if memory.dtype != DTYPES["uint8"]:
        raise TypeError(f"{what} has elements of type {memory.dtype_name}; it must have uint8")
    return memory


#: A user's choice of compression: a codec, the name of a codec, or None.
Compression = str | Codec | None


def raw_codec(compression: Compression) -> extension.Codec | None:
    """Returns the extension's codec, or None for None.

    Raises ValueError for an unknown name, and TypeError for anything but a codec or a name.
    """
    if compression is None:
        return None
    if isinstance(compression, str):
        return _raw(compression, {})
    if not isinstance(compression, Codec):
        raise TypeError(f"a compression is a codec's name, a bagua.Codec or None, not {type(compression).__name__}")
    return compression._raw
