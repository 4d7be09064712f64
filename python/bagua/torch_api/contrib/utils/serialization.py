"""How samples become bytes: MessagePack and raw buffers, never a pickle unless the user asks for it.

A cache server holds bytes that others may have written. Unpickling them would run whatever they say, so values are
written by a schema (https://github.com/msgpack/msgpack/blob/master/spec.md): numbers, text, bytes, containers, arrays
and tensors. With ``allow_pickle=True`` other values are pickled, and then carry an HMAC-SHA256 (RFC 2104) by the
job's secret over key and pickle; one that does not match is not unpickled.

One value: ``"bg", kind, 8 bytes of the data set, length of the structure``, the structure, then the raw buffers of
arrays and tensors in the order in which the structure names them, so that a large tensor is copied once when it is
written, and once when it is read.
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
# The header's last number: the length of the structure.
_SIZE = struct.Struct("<I")
_SIZE_AT = _HEADER.size - _SIZE.size

# Extension types of the structure.
_TUPLE, _SET, _FROZENSET, _INTEGER, _COMPLEX, _ARRAY, _SCALAR, _TENSOR = range(8)

#: The tensor types that are written, by name.
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
    """Bytes that are no value of this data set: foreign, cut off, damaged, or a pickle without the right HMAC."""


class Serializer:
    """Turns values of one data set into bytes and back; see the module for the form.

    What is read is always new: changing it changes nothing in the cache. Everything comes back as the type that it was,
    but for a bytearray, which comes back as bytes. ``secret`` is needed with ``allow_pickle``.
    ImportError without the package ``msgpack``.
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
        # "a_b" + "_" + "c" and "a" + "_" + "b_c" are one key: the data set in the value distinguishes them.
        self._tag = hashlib.sha256(dataset_name.encode()).digest()[:8]
        self._allow_pickle = allow_pickle
        self._secret = hashlib.sha256(b"bagua cache pickle\0" + secret).digest() if secret else b""
        # Samples that are one array or tensor: by header and structure, type, shape and whole length. The samples of a
        # data set have few of them, and this takes 1.2 us instead of 2.3 for 4 KiB.
        self._lone: dict[bytes, tuple[Any, Any, int]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_msgpack": None, "_lone": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        import msgpack

        self._msgpack = msgpack

    def dumps(self, key: str, value: Any) -> bytes:
        """The value as bytes. TypeError names a type that cannot be written without ``allow_pickle``."""
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
        """The value that :meth:`dumps` wrote under this key. UnreadableError for anything else."""
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
        # A damaged value raises an error of any type; each means that it is computed again.
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
            # strict_types: only exact built-in types arrive as themselves, so no subclass loses what it adds.
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
    """A tensor that owns these bytes."""
    kind = _NUMPY[dtype]
    if kind is not None:
        # A detour that saves a view() of 1.7 us.
        return torch.from_numpy(np.ndarray(shape, kind, content))
    return torch.frombuffer(content, dtype=dtype).view(shape) if content else torch.empty(shape, dtype=dtype)


def _put_array(array: np.ndarray[Any, Any], buffers: list[Any]) -> list[Any]:
    if array.dtype.hasobject or array.dtype.names is not None:
        raise TypeError(f"a NumPy array of {array.dtype} cannot be cached without allow_pickle=True")
    buffers.append(array.tobytes())
    return [array.dtype.str, list(array.shape)]


class _Reader:
    """Reads one structure, and takes the buffers after it in order."""

    def __init__(self, msgpack: Any, raw: memoryview, place: int) -> None:
        self._msgpack = msgpack
        self._raw = raw
        #: Where the next buffer begins.
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

    # The samples of a data set have few forms among them, so each is read once.

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
    # Where samples have a thousand shapes, remembering does not help.
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
