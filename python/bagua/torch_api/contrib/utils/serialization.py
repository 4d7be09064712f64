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
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from .cache_state import cache_state

__all__ = ["Serializer", "UnreadableError"]

_HEADER = struct.Struct("<2sB8sI")
_MAGIC = b"bg"
_SCHEMA, _PICKLE = 1, 2
_DIGEST = 32
# The last field of the header: the length of the structure.
_SIZE = struct.Struct("<I")
_SIZE_AT = _HEADER.size - _SIZE.size

# Extension types of the structure.
_TUPLE, _SET, _FROZENSET, _INTEGER, _COMPLEX, _ARRAY, _SCALAR, _TENSOR = range(8)

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


def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any] | None:
    try:
        return torch.empty(0, dtype=dtype).numpy().dtype
    except TypeError:
        return None


_NUMPY = {dtype: _numpy_dtype(dtype) for dtype in _NAMES}


class UnreadableError(ValueError):
    """Bytes that are not a value of this data set: foreign, truncated, damaged, or a pickle without a valid HMAC."""


class Serializer:
    """Encodes and decodes values of one data set. The module describes the format.

    Each decoded value is new, so changing it does not change the cache. A value keeps its type, except that a bytearray
    becomes bytes. ``allow_pickle`` requires ``secret``. Raises ImportError if the package ``msgpack`` is not installed.
    """

    def __init__(self, dataset_name: str, *, allow_pickle: bool = False, secret: bytes = b"") -> None:
        try:
            import msgpack
        except ImportError as absent:
            raise ImportError(
                'the cache needs the package msgpack, which is not installed: pip install "msgpack>=1"'
            ) from absent
        if allow_pickle and not secret:
            raise ValueError("allow_pickle=True needs a secret: set BAGUA_JOB_SECRET, the same on all ranks")
        self._msgpack: Any = msgpack
        # Data set "a_b" with key "c" and data set "a" with key "b_c" share a store key. This tag tells them apart.
        self._tag = hashlib.sha256(dataset_name.encode()).digest()[:8]
        self._allow_pickle = allow_pickle
        self._secret = hashlib.sha256(b"bagua cache pickle\0" + secret).digest() if secret else b""
        # Header and structure -> dtype, shape and total length, for samples that are a single array or tensor. The
        # samples of a data set have few of these. Decoding 4 KiB takes 1.2 us with this memo and 2.3 us without.
        self._lone: dict[bytes, tuple[Any, Any, int]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_msgpack": None, "_lone": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        import msgpack

        self._msgpack = msgpack

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
        """Returns the value that :meth:`dumps` wrote under this key. Raises UnreadableError for anything else."""
        try:
            (size,) = _SIZE.unpack_from(raw, _SIZE_AT)
        except struct.error:
            raise UnreadableError("too short for a cached value") from None
        end = _HEADER.size + size
        head = raw[:end]
        lone = self._lone.get(head)
        if lone is not None and len(raw) == lone[2]:
            content = bytearray(memoryview(raw)[end:])
            dtype, shape, _ = lone
            return _tensor(content, dtype, shape) if type(dtype) is torch.dtype else np.ndarray(shape, dtype, content)
        magic, kind, tag, _ = _HEADER.unpack_from(raw)
        if magic != _MAGIC or tag != self._tag:
            raise UnreadableError("not a value of this data set")
        if kind == _PICKLE:
            return self._unpickle(key, raw[_HEADER.size : end], raw[end:])
        if kind != _SCHEMA or end > len(raw):
            raise UnreadableError("cut off, or written by another version")
        reader = _Reader(self._msgpack, memoryview(raw), end)
        try:
            value = reader.unpack(raw[_HEADER.size : end])
        # A damaged value may raise any error. In each case it is computed again.
        except Exception as failure:
            raise UnreadableError(f"damaged: {failure}") from failure
        if reader.place != len(raw):
            raise UnreadableError("damaged: the buffers have another length than the structure says")
        if type(value) is np.ndarray or (type(value) is torch.Tensor and value.device.type == "cpu"):
            _remember(self._lone, head, (value.dtype, value.shape, len(raw)))
        return value

    def _sign(self, key: str, text: bytes) -> bytes:
        name = key.encode()
        return hmac.digest(self._secret, struct.pack("<I", len(name)) + name + self._tag + text, "sha256")

    def _unpickle(self, key: str, digest: bytes, text: bytes) -> Any:
        if not self._allow_pickle:
            raise UnreadableError("a pickle, and allow_pickle is not set")
        if not hmac.compare_digest(digest, self._sign(key, text)):
            raise UnreadableError("a pickle that was not signed with this job's secret")
        return pickle.loads(text)

    def _pack(self, value: Any, buffers: list[Any]) -> bytes:
        pack, extension = self._msgpack.packb, self._msgpack.ExtType

        def write(code: int, content: Any) -> Any:
            return extension(code, pack(content, default=other, strict_types=True))

        def other(item: Any) -> Any:
            # strict_types passes only exact built-in types, so that no attributes of a subclass are lost.
            kind = type(item)
            if kind is tuple:
                return write(_TUPLE, list(item))
            if kind is torch.Tensor:
                return write(_TENSOR, _put_tensor(item, buffers))
            if kind is np.ndarray:
                return write(_ARRAY, _put_array(item, buffers))
            if isinstance(item, np.generic):
                return write(_SCALAR, _put_array(np.asarray(item), buffers))
            if kind is int:
                return extension(_INTEGER, str(item).encode())
            if kind is complex:
                return extension(_COMPLEX, struct.pack("<dd", item.real, item.imag))
            if kind is set or kind is frozenset:
                return write(_SET if kind is set else _FROZENSET, list(item))
            raise TypeError(
                f"a sample with a {kind.__module__}.{kind.__qualname__} cannot be cached; cached are numbers, text,"
                " bytes, None, lists, tuples, dictionaries, sets, NumPy arrays and tensors, and everything that can be"
                " pickled with allow_pickle=True"
            )

        packed: bytes = pack(value, default=other, strict_types=True)
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


def _tensor(content: bytearray, dtype: torch.dtype, shape: Any) -> torch.Tensor:
    """Returns a tensor that owns these bytes."""
    kind = _NUMPY[dtype]
    if kind is not None:
        # Faster than a view() by 1.7 us.
        return torch.from_numpy(np.ndarray(shape, kind, content))
    return torch.frombuffer(content, dtype=dtype).view(shape) if content else torch.empty(shape, dtype=dtype)


def _put_array(array: np.ndarray[Any, Any], buffers: list[Any]) -> list[Any]:
    if array.dtype.hasobject or array.dtype.names is not None:
        raise TypeError(f"a NumPy array of {array.dtype} cannot be cached without allow_pickle=True")
    buffers.append(array.tobytes())
    return [array.dtype.str, list(array.shape)]


class _Reader:
    """Decodes one structure, and takes the buffers that follow it in order."""

    def __init__(self, msgpack: Any, raw: memoryview, place: int) -> None:
        self._msgpack = msgpack
        self._raw = raw
        #: Offset of the next buffer.
        self.place = place

    def unpack(self, body: bytes) -> Any:
        return self._msgpack.unpackb(body, ext_hook=self._extension, strict_map_key=False)

    def _extension(self, code: int, body: bytes) -> Any:
        return _READERS[code](self, body)

    def _take(self, count: int) -> bytearray:
        if count < 0 or self.place + count > len(self._raw):
            raise UnreadableError("cut off")
        taken = bytearray(self._raw[self.place : self.place + count])
        self.place += count
        return taken

    def tensor(self, body: bytes) -> torch.Tensor:
        dtype, shape, count, device = self._tensor_form(body)
        tensor = _tensor(self._take(count * dtype.itemsize), dtype, shape)
        return tensor if device == "cpu" else tensor.to(device)

    def array(self, body: bytes) -> np.ndarray[Any, Any]:
        dtype, shape, count = self._array_form(body)
        return np.ndarray(shape, dtype, self._take(count * dtype.itemsize))

    def _tensor_form(self, body: bytes) -> tuple[torch.dtype, list[int], int, str]:
        form = _tensor_forms.get(body)
        if form is None:
            name, shape, device = self.unpack(body)
            form = _DTYPES[name], shape, _count(shape), device
            _remember(_tensor_forms, body, form)
        return form

    def _array_form(self, body: bytes) -> tuple[np.dtype[Any], list[int], int]:
        form = _array_forms.get(body)
        if form is None:
            name, shape = self.unpack(body)
            dtype = np.dtype(name)
            if dtype.hasobject:
                raise UnreadableError("an array of objects")
            form = dtype, shape, _count(shape)
            _remember(_array_forms, body, form)
        return form

    def scalar(self, body: bytes) -> Any:
        return self.array(body)[()]


_tensor_forms: dict[bytes, tuple[torch.dtype, list[int], int, str]] = cache_state().tensor_forms
_array_forms: dict[bytes, tuple[np.dtype[Any], list[int], int]] = cache_state().array_forms


def _remember(forms: dict[bytes, Any], body: bytes, form: Any) -> None:
    # If samples have a thousand shapes, a memo does not help.
    if len(forms) < 1024:
        forms[body] = form


def _count(shape: list[int]) -> int:
    count = 1
    for length in shape:
        if length < 0:
            raise UnreadableError("a negative length")
        count *= length
    return count


_READERS: dict[int, Callable[[_Reader, bytes], Any]] = {
    _TUPLE: lambda reader, body: tuple(reader.unpack(body)),
    _SET: lambda reader, body: set(reader.unpack(body)),
    _FROZENSET: lambda reader, body: frozenset(reader.unpack(body)),
    _INTEGER: lambda reader, body: int(body),
    _COMPLEX: lambda reader, body: complex(*struct.unpack("<dd", body)),
    _ARRAY: _Reader.array,
    _SCALAR: _Reader.scalar,
    _TENSOR: _Reader.tensor,
}
