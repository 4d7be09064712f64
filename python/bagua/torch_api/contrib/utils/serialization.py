"""Encodes samples as bytes: MessagePack and raw buffers, and pickles only if the user asks for them.

Others may have written the bytes on a cache server, and unpickling foreign bytes runs arbitrary code. Values are
therefore written by a schema (https://github.com/msgpack/msgpack/blob/master/spec.md): numbers, text, bytes,
containers, arrays and tensors. With ``allow_pickle=True`` other values are pickled, with an HMAC-SHA256 (RFC 2104) by
the job's secret over key and pickle. A pickle whose HMAC does not match is not loaded.

Format of a value: ``"bg"``, kind, 8 bytes that identify the data set, length of the structure, the structure, then the
raw buffers of arrays and tensors in the order in which the structure names them. A large tensor is copied once when it
is written and once when it is read.
"""

from __future__ import annotations

import hashlib
import hmac
import pickle
import struct
from functools import lru_cache
from math import prod
from typing import Any

import msgpack
import numpy as np
import torch

__all__ = ["Serializer"]

_HEADER = struct.Struct("<2sB8sI")
_MAGIC = b"bg"
_SCHEMA, _PICKLE = 1, 2
_DIGEST = 32


class _Extension:
    TUPLE, SET, FROZENSET, INTEGER, COMPLEX, ARRAY, SCALAR, TENSOR = range(8)


#: The supported tensor dtypes by name.
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.uint16,
        torch.int16,
        torch.uint32,
        torch.int32,
        torch.uint64,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    )
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Serializer:
    """Encodes and decodes values of one data set. The module describes the format.

    Each decoded value is new, so changing it does not change the cache. A value keeps its type, except that a bytearray
    becomes bytes. ``allow_pickle`` requires ``secret``.
    """

    def __init__(self, dataset_name: str, *, allow_pickle: bool = False, secret: bytes = b"") -> None:
        if allow_pickle and not secret:
            raise ValueError("allow_pickle=True needs a secret: set BAGUA_JOB_SECRET, the same on all ranks")
        # Data set "a_b" with key "c" and data set "a" with key "b_c" share a store key. This tag tells them apart.
        self._tag = hashlib.sha256(dataset_name.encode()).digest()[:8]
        self._allow_pickle = allow_pickle
        self._secret = hashlib.sha256(b"bagua cache pickle\0" + secret).digest() if secret else b""

    def dumps(self, key: str, value: Any) -> bytes:
        """Returns the value as bytes. Raises TypeError for a type that cannot be written without ``allow_pickle``."""
        buffers: list[Any] = []
        try:
            body = self._pack(value, buffers)
        except TypeError:
            if not self._allow_pickle:
                raise
            text = pickle.dumps(value, protocol=5)
            return _HEADER.pack(_MAGIC, _PICKLE, self._tag, _DIGEST) + self._sign(key, text) + text
        head = _HEADER.pack(_MAGIC, _SCHEMA, self._tag, len(body))
        return b"".join([head, body, *buffers])

    def loads(self, key: str, raw: bytes) -> Any:
        """Returns the value that :meth:`dumps` wrote under this key. Raises ValueError for anything else: foreign,
        truncated or damaged bytes, or a pickle without a valid HMAC.
        """
        if len(raw) < _HEADER.size:
            raise ValueError("too short for a cached value")
        magic, kind, tag, size = _HEADER.unpack_from(raw)
        end = _HEADER.size + size
        if magic != _MAGIC or tag != self._tag:
            raise ValueError("the bytes are not a cached value of this data set")
        if kind == _PICKLE:
            return self._unpickle(key, raw[_HEADER.size : end], raw[end:])
        if kind != _SCHEMA or end > len(raw):
            raise ValueError("the cached value is cut off, or was written by another version")
        reader = _Reader(memoryview(raw), end)
        try:
            value = reader.unpack(raw[_HEADER.size : end])
        # Damaged bytes may raise any error. The cache then computes the value again.
        except Exception as failure:
            raise ValueError(f"damaged: {failure}") from failure
        if reader.place != len(raw):
            raise ValueError("damaged: the buffers have another length than the structure says")
        return value

    def _sign(self, key: str, text: bytes) -> bytes:
        name = key.encode()
        return hmac.digest(self._secret, struct.pack("<I", len(name)) + name + self._tag + text, "sha256")

    def _unpickle(self, key: str, digest: bytes, text: bytes) -> Any:
        if not self._allow_pickle:
            raise ValueError("a pickle, and allow_pickle is not set")
        if not hmac.compare_digest(digest, self._sign(key, text)):
            raise ValueError("a pickle that was not signed with this job's secret")
        return pickle.loads(text)

    def _pack(self, value: Any, buffers: list[Any]) -> bytes:
        extension = msgpack.ExtType

        def write(code: int, content: Any) -> Any:
            return extension(code, msgpack.packb(content, default=other, strict_types=True))

        def other(item: Any) -> Any:
            # strict_types passes only exact built-in types, so that no attributes of a subclass are lost.
            kind = type(item)
            if kind is tuple:
                return write(_Extension.TUPLE, list(item))
            if kind is torch.Tensor:
                return write(_Extension.TENSOR, _put_tensor(item, buffers))
            if kind is np.ndarray:
                return write(_Extension.ARRAY, _put_array(item, buffers))
            if isinstance(item, np.generic):
                return write(_Extension.SCALAR, _put_array(np.asarray(item), buffers))
            if kind is int:
                return extension(_Extension.INTEGER, str(item).encode())
            if kind is complex:
                return extension(_Extension.COMPLEX, struct.pack("<dd", item.real, item.imag))
            if kind is set or kind is frozenset:
                return write(_Extension.SET if kind is set else _Extension.FROZENSET, list(item))
            raise TypeError(
                f"a sample with a {kind.__module__}.{kind.__qualname__} cannot be cached; cached are numbers, text,"
                " bytes, None, lists, tuples, dictionaries, sets, NumPy arrays and tensors, and everything that can be"
                " pickled with allow_pickle=True"
            )

        packed: bytes = msgpack.packb(value, default=other, strict_types=True)
        return packed


def _put_tensor(tensor: torch.Tensor, buffers: list[Any]) -> list[Any]:
    if tensor.dtype not in _NAMES or tensor.layout is not torch.strided or tensor.is_quantized:
        raise TypeError(f"a {tensor.layout} tensor of {tensor.dtype} cannot be cached without allow_pickle=True")
    if tensor.requires_grad:
        raise TypeError("a tensor that requires gradients cannot be cached: detach() it in the data set")
    plain = tensor.cpu().resolve_conj().resolve_neg().contiguous()
    raw: Any = plain.reshape(-1).view(torch.uint8).numpy()
    buffers.append(memoryview(raw))
    return [_NAMES[tensor.dtype], list(tensor.shape), str(tensor.device)]


def _put_array(array: np.ndarray[Any, Any], buffers: list[Any]) -> list[Any]:
    if array.dtype.hasobject or array.dtype.names is not None:
        raise TypeError(f"a NumPy array of {array.dtype} cannot be cached without allow_pickle=True")
    buffers.append(array.tobytes())
    return [array.dtype.str, list(array.shape)]


class _Reader:
    """Decodes one structure, and takes the buffers that follow it in order."""

    def __init__(self, raw: memoryview, place: int) -> None:
        self._raw = raw
        #: Offset of the next buffer.
        self.place = place

    def unpack(self, body: bytes) -> Any:
        return msgpack.unpackb(body, ext_hook=self._extension, strict_map_key=False)

    def _extension(self, code: int, body: bytes) -> Any:
        match code:
            case _Extension.TENSOR:
                dtype, shape, size, device = _tensor_form(body)
                content = self._take(size)
                tensor = (
                    torch.frombuffer(content, dtype=dtype).view(shape) if content else torch.empty(shape, dtype=dtype)
                )
                return tensor if device == "cpu" else tensor.to(device)
            case _Extension.ARRAY | _Extension.SCALAR:
                kind, shape, size = _array_form(body)
                array: np.ndarray[Any, Any] = np.ndarray(shape, kind, self._take(size))
                return array if code == _Extension.ARRAY else array[()]
            case _Extension.TUPLE:
                return tuple(self.unpack(body))
            case _Extension.SET:
                return set(self.unpack(body))
            case _Extension.FROZENSET:
                return frozenset(self.unpack(body))
            case _Extension.INTEGER:
                return int(body)
            case _Extension.COMPLEX:
                return complex(*struct.unpack("<dd", body))
        raise ValueError(f"no extension type {code}")

    def _take(self, count: int) -> bytearray:
        if self.place + count > len(self._raw):
            raise ValueError("cut off")
        taken = bytearray(self._raw[self.place : self.place + count])
        self.place += count
        return taken


# The samples of a data set have few dtypes and shapes. Decoding each of them once halves the time of a small sample.
@lru_cache(1024)
def _tensor_form(body: bytes) -> tuple[torch.dtype, list[int], int, str]:
    name, shape, device = msgpack.unpackb(body)
    return _DTYPES[name], shape, _count(shape) * _DTYPES[name].itemsize, device


@lru_cache(1024)
def _array_form(body: bytes) -> tuple[np.dtype[Any], list[int], int]:
    name, shape = msgpack.unpackb(body)
    dtype = np.dtype(name)
    if dtype.hasobject:
        raise ValueError("an array of objects")
    return dtype, shape, _count(shape) * dtype.itemsize


def _count(shape: list[int]) -> int:
    if any(length < 0 for length in shape):
        raise ValueError("a negative length")
    return prod(shape)
