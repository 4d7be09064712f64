"""torch on the simulated driver, without a GPU.

After `install()`, device="cuda", `.cuda()`, autograd, modules, optimizers, torch.cuda's streams and torch.futures work
in this process. Ranks call it first, as `joined` does:

    @on_ranks(2, in_torch)
    def test_it_works() -> None:
        x = torch.ones(5, device="cuda")
        api.allreduce_inplace(x)
        assert x.tolist() == [2.0] * 5

A tensor on "cuda" is a `CudaTensor`: to torch's C++ it is a tensor of the CPU whose storage is the simulated device's
memory, which the host cannot address; views, `.data`, `set_` and lifetimes are therefore torch's own. Python sees
`device`, `is_cuda` and `data_ptr()` as they are on a GPU. An operation reads its operands in the order of the current
stream, computes on the CPU, and enqueues the copy of its results on that stream, where it happens late: when a call
waits for it. A copy inside a device is enqueued as a whole. What forgets to order a stream after another one reads NaNs
or old values, or is a fault. So is what writes to an operand before the stream has come to the operation that reads it:
the stream reads it a second time, late, and finds something else.

Random numbers are those of the CPU's generator. Not there: autocast, graphs, pinned memory, torch.compile, sparse
tensors. The backward pass runs on the thread that calls it.
"""

from __future__ import annotations

import atexit
import ctypes
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from bagua.c10d import dispatch
from tests.cuda import device_arrays, pretended_futures, torch_streams
from tests.cuda.torch_streams import Runtime

_DLPACK = {
    torch.float16: (2, 16),
    torch.float32: (2, 32),
    torch.float64: (2, 64),
    torch.bfloat16: (4, 16),
    torch.uint8: (1, 8),
    torch.int8: (0, 8),
    torch.uint16: (1, 16),
    torch.int16: (0, 16),
    torch.uint32: (1, 32),
    torch.int32: (0, 32),
    torch.uint64: (1, 64),
    torch.int64: (0, 64),
    torch.bool: (6, 8),
    torch.complex64: (5, 64),
    torch.complex128: (5, 128),
}

_make: Callable[..., Any] = torch.Tensor._make_subclass
_runtime: Runtime


class CudaTensor(torch.Tensor):
    """A tensor on the simulated device."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", _place(self))

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    def get_device(self) -> int:
        return _place(self)

    def record_stream(self, stream: torch_streams.Stream) -> None:
        """The memory is not given back before the work that `stream` has then."""
        _runtime.allocations[self.untyped_storage().data_ptr()].used_by.add(stream)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError(f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first.")
        return self.detach().cpu().numpy()

    __array__ = numpy

    def new_tensor(self, data: Any, **options: Any) -> torch.Tensor:
        return torch.tensor(data, **({"dtype": self.dtype, "device": self.device} | options))

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) in memo:
            return memo[id(self)]
        copied = self.detach().clone()
        if isinstance(self, torch.nn.Parameter):
            copied._is_param = True
        copied.__dict__.update(self.__dict__)
        if self.grad is not None:
            copied.grad = self.grad.__deepcopy__(memo)
        memo[id(self)] = copied.requires_grad_(self.requires_grad)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As the tensor on the CPU."""
        return self.detach().cpu().requires_grad_(self.requires_grad).__reduce_ex__(protocol)

    def __repr__(self, **_: Any) -> str:
        return f"{self.detach().cpu()!r} on {self.device}"

    def __format__(self, form: str) -> str:
        return self.detach().cpu().__format__(form)

    def __dlpack_device__(self) -> tuple[int, int]:  # type: ignore[override]
        return 2, _place(self)

    def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Any:  # type: ignore[override]
        current = torch_streams.current_stream(self.device)
        if stream is not None and stream != (current.cuda_stream or device_arrays.LEGACY):
            torch_streams.external_stream(stream, self.device).wait_stream(current)
        shape, strides = ((ctypes.c_int64 * self.dim())(*each) for each in (self.shape, self.stride()))
        code, bits = _DLPACK[self.dtype]
        exported = device_arrays._Tensor(
            self.data_ptr(), 2, _place(self), self.dim(), code, bits, 1, shape, strides, 0, None, None
        )
        # As long as the tensor, which the borrower keeps.
        self.__dict__.setdefault("_exported", []).append((exported, shape, strides))
        return device_arrays._new_capsule(ctypes.addressof(exported), b"dltensor", None)


def _place(tensor: CudaTensor) -> int:
    return _runtime.allocations[tensor.untyped_storage().data_ptr()].device


# --- memory -----------------------------------------------------------------------------------------------------------


def _extent(size: Any, stride: Any) -> int:
    """Elements from the first to the last."""
    return 0 if 0 in size else 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))


def _runs(size: Any, stride: Any) -> Iterator[tuple[int, int]]:
    """Stretches of elements that follow each other: offset and number."""
    if 0 in size:
        return
    dims = sorted((step, n) for n, step in zip(size, stride, strict=True) if n > 1 and step)
    count = 1
    while dims and dims[0][0] == count:
        count *= dims.pop(0)[1]
    offsets = [0]
    for step, n in reversed(dims):
        offsets = [offset + i * step for offset in offsets for i in range(n)]
    for offset in offsets:
        yield offset, count


def _dense(tensor: torch.Tensor) -> bool:
    return tensor.numel() == _extent(tensor.shape, tensor.stride())


def _on_device(size: Any, stride: Any, dtype: torch.dtype, device: int) -> CudaTensor:
    """New memory."""
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        plain = torch.frombuffer(_runtime.allocate(_extent(size, stride) * dtype.itemsize, device), dtype=torch.uint8)
        if plain.numel() < dtype.itemsize:  # no element: only the place counts
            plain = torch.frombuffer(_runtime.allocate(dtype.itemsize, device), dtype=torch.uint8)
        return _make(
            CudaTensor,
            plain[: plain.numel() // dtype.itemsize * dtype.itemsize].view(dtype).as_strided(size, stride, 0),
        )


def _upload(cpu: torch.Tensor, device: int) -> CudaTensor:
    """A new tensor with these values and strides, written by the current stream."""
    cpu = cpu.detach().resolve_conj().resolve_neg()
    made = _on_device(cpu.shape, cpu.stride(), cpu.dtype, device)
    _runtime.write([(made.data_ptr(), cpu.data_ptr(), _extent(cpu.shape, cpu.stride()) * cpu.itemsize)], device)
    return made


def _shadow(tensor: torch.Tensor) -> torch.Tensor:
    """Memory of the CPU like a device tensor's.

    As far from a multiple of 64, too: by that, libraries choose in which order they add.
    """
    extent = _extent(tensor.shape, tensor.stride()) * tensor.itemsize
    shift = tensor.data_ptr() % 64 if extent else 0
    memory = torch.empty(extent + 64, dtype=torch.uint8)[shift : shift + extent]
    cpu = memory.view(tensor.dtype).as_strided(
        tensor.shape, tensor.stride(), memory.storage_offset() // tensor.itemsize
    )
    cpu = torch._conj(cpu) if tensor.is_conj() else cpu
    return torch._neg_view(cpu) if tensor.is_neg() else cpu


def _lazy(tensor: torch.Tensor) -> bool:
    """Its memory has not the values: torch has not conjugated or negated it yet."""
    return tensor.is_conj() or tensor.is_neg()


def _read(pairs: list[tuple[CudaTensor, torch.Tensor]], *, again: bool = True) -> None:
    """Fills shadows, in the order of the current stream of each device. `again`: see `Runtime.read`."""
    by_device: dict[int, list[tuple[int, int, int]]] = {}
    for tensor, cpu in pairs:
        if tensor.numel():
            by_device.setdefault(_place(tensor), []).extend(_ranges(tensor, cpu))
    for device, ranges in by_device.items():
        _runtime.read(ranges, device, again=again)


def _write(tensor: CudaTensor, cpu: torch.Tensor) -> None:
    """Enqueues a copy of a shadow to its tensor."""
    _runtime.write(_ranges(tensor, cpu), _place(tensor))


def _ranges(tensor: CudaTensor, cpu: torch.Tensor) -> list[tuple[int, int, int]]:
    """Address on the device and in the shadow, and bytes: of a tensor's elements only, not of what is between them."""
    there, here, size = tensor.data_ptr(), cpu.data_ptr(), tensor.itemsize
    return [(there + at * size, here + at * size, n * size) for at, n in _runs(tensor.shape, tensor.stride())]


def _download(tensor: CudaTensor) -> torch.Tensor:
    """A tensor of the CPU with these values, for the program."""
    _runtime.reads_to_the_host += 1
    cpu = _shadow(tensor)
    _read([(tensor, cpu)], again=False)
    return cpu.clone()


# --- operations -------------------------------------------------------------------------------------------------------


class _Form(NamedTuple):
    """What an operation does with memory."""

    #: Its results are views of its operands.
    views: bool
    #: It changes sizes and strides of an operand only.
    metadata: bool
    #: Positions and names of operands that it writes.
    writes: tuple[tuple[int, str], ...]
    #: It does not read what it writes.
    overwrites: bool


_forms: dict[Any, _Form] = {}

#: These say nothing of what they write in their schemas.
_ALSO_WRITE = {"aten::native_batch_norm": (3, 4)}
_OVERWRITE = (
    "zero_",
    "fill_",
    "normal_",
    "uniform_",
    "random_",
    "bernoulli_",
    "exponential_",
    "geometric_",
    "log_normal_",
    "cauchy_",
)
#: New memory like an operand's, which they do not read.
_EMPTY = ("aten::empty_like", "aten::new_empty", "aten::new_empty_strided")
#: What they return is the host's, so that they wait for the device.
_TO_HOST = ("aten::_local_scalar_dense", "aten::equal")
#: Operands on the CPU may be indices.
_INDEXED = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index")


def _form(func: Any) -> _Form:
    found = _forms.get(func)
    if found is None:
        schema = func._schema
        writes = [
            (i, argument.name)
            for i, argument in enumerate(schema.arguments)
            if (argument.alias_info is not None and argument.alias_info.is_write)
            or i in _ALSO_WRITE.get(schema.name, ())
        ]
        returned = [each.alias_info for each in schema.returns if each.alias_info is not None]
        name = schema.name.removeprefix("aten::")
        found = _forms[func] = _Form(
            bool(returned) and not any(each.is_write for each in returned),
            torch.Tag.inplace_view in func.tags and not name.startswith("resize"),
            tuple(writes),
            name in _OVERWRITE or schema.name in _EMPTY,
        )
    return found


def _dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    form = _form(func)
    if form.views or form.metadata:
        with torch._C._DisableTorchDispatch():
            out = func(*args, **kwargs)
        return args[0] if form.metadata else tree_map(_as_cuda, out)
    name = func._schema.name
    if name == "aten::copy_":
        return _copy(*args[:2])
    if (
        name == "aten::clone"
        and _dense(args[0])
        and not _lazy(args[0])
        and kwargs.get("memory_format") in (None, torch.preserve_format)
    ):
        made = _on_device(args[0].shape, args[0].stride(), args[0].dtype, _place(args[0]))
        return _copy(made, args[0])
    return _compute(func, form, args, kwargs)


def _as_cuda(x: Any) -> Any:
    return _make(CudaTensor, x) if isinstance(x, torch.Tensor) else x


def _compute(func: Any, form: _Form, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """On the CPU."""
    name = func._schema.name
    wanted = kwargs.get("device")
    if name == "aten::_to_copy" and wanted is not None and torch.device(wanted).type == "cpu":
        # From torch's C++, to which the tensor is one of the CPU; programs come through `_to`.
        kwargs, wanted = kwargs | {"device": None}, None
    if wanted is not None:
        kwargs = kwargs | {"device": torch.device("cpu")}
    flat, form_of = tree_flatten((args, kwargs))
    device = _common_device(name, flat)
    shadows: dict[int, tuple[CudaTensor, torch.Tensor]] = {}
    for x in flat:
        if isinstance(x, CudaTensor) and id(x) not in shadows:
            shadows[id(x)] = x, _shadow(x)
    written = [x for i, key in form.writes for x in tree_flatten(args[i] if i < len(args) else kwargs.get(key))[0]]
    skipped = {id(args[0])} if form.overwrites else set()
    _runtime.reads_to_the_host += name in _TO_HOST
    _read([pair for key, pair in shadows.items() if key not in skipped], again=name not in _TO_HOST)
    on_cpu = tree_unflatten([shadows[id(x)][1] if isinstance(x, CudaTensor) else x for x in flat], form_of)
    before = {id(x): x.shape for x in written if isinstance(x, CudaTensor)}
    out = func(*on_cpu[0], **on_cpu[1])
    for x in written:
        if isinstance(x, CudaTensor):
            cpu = shadows[id(x)][1]
            if cpu.shape != before[id(x)]:
                _resize(x, cpu)
            _write(x, cpu)
    back = {id(cpu): tensor for tensor, cpu in shadows.values()}
    if wanted is not None:
        wanted = torch.device(wanted)
        if wanted.type != "cuda":
            return out
        device = _runtime.device(wanted)

    def returned(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        if id(x) in back:
            return back[id(x)]
        if name in _EMPTY:
            return _on_device(x.shape, x.stride(), x.dtype, device)
        return _upload(x, device)

    return tree_map(returned, out)


def _common_device(name: str, flat: list[Any]) -> int:
    """The operands' device. RuntimeError where torch would refuse them."""
    tensors = [x for x in flat if isinstance(x, torch.Tensor)]
    places = {x.device for x in tensors if isinstance(x, CudaTensor) or (x.dim() and name not in _INDEXED)}
    if len(places) > 1:
        found = " and ".join(sorted(map(str, places)))
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {found}! ({name})"
        )
    return int(places.pop().index)


def _resize(tensor: CudaTensor, cpu: torch.Tensor) -> None:
    """New memory for a tensor that an operation gave another size."""
    made = _on_device(cpu.shape, cpu.stride(), cpu.dtype, _place(tensor))
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        tensor.set_(made.untyped_storage(), 0, made.shape, made.stride())


def _copy(to: torch.Tensor, from_: torch.Tensor) -> torch.Tensor:
    """`copy_`; inside a device, where nothing is converted, the device's own."""
    if not isinstance(to, CudaTensor):
        assert isinstance(from_, CudaTensor)
        return to.copy_(_download(from_))
    place = _place(to)
    if not isinstance(from_, CudaTensor):
        values = from_
    else:
        same = (to.dtype, to.shape, place) == (from_.dtype, from_.shape, _place(from_))
        if same and to.stride() == from_.stride() and _dense(to) and not _lazy(to) and not _lazy(from_):
            if to.numel() and to.data_ptr() != from_.data_ptr():
                _runtime.copy(to.data_ptr(), from_.data_ptr(), to.numel() * to.itemsize, place)
            return to
        values = _shadow(from_)
        _read([(from_, values)])
    cpu = _shadow(to)
    cpu.copy_(values)
    _write(to, cpu)
    return to


# --- between the host and the device ----------------------------------------------------------------------------------


def _moved(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    if isinstance(x, CudaTensor):
        if device.type == "cpu":
            return _download(x)
        cpu = _shadow(x)
        _read([(x, cpu)])
        return _upload(cpu, _runtime.device(device))
    return _upload(x.detach() if _dense(x) else x.detach().contiguous(), _runtime.device(device))


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, device: torch.device) -> torch.Tensor:
        ctx.place = x.device
        return _moved(x, device)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _moved(grad, ctx.place), None


_tensor_to = torch.Tensor.to


def _to(self: torch.Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> torch.Tensor:
    """`Tensor.to`."""
    other = kwargs.get("other", args[0] if args else None)
    if isinstance(other, torch.Tensor):
        device, dtype, layout = other.device, other.dtype, None
    else:
        device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
    if device is not None and device.type == "cuda":
        device = torch.device("cuda", _runtime.device(device))
    if device is None or device == self.device:
        options = {name: value for name, value in (("dtype", dtype), ("memory_format", layout)) if value is not None}
        return _tensor_to(self, copy=copy, **options) if options or copy else self
    if {device.type, self.device.type} != {"cpu", "cuda"} and device.type != self.device.type:
        return _tensor_to(self, *args, copy=copy, **kwargs)
    if dtype is not None:
        self = _tensor_to(self, dtype)
    moved = _Move.apply(self, device) if self.requires_grad and torch.is_grad_enabled() else _moved(self, device)
    return moved if layout in (None, torch.preserve_format) else moved.contiguous(memory_format=layout)


def _cuda(
    self: torch.Tensor, device: Any = None, non_blocking: bool = False, memory_format: Any = None
) -> torch.Tensor:
    place = torch.device("cuda", _runtime.device(device))
    return _to(self, place) if memory_format is None else _to(self, place, memory_format=memory_format)


def _cpu(self: torch.Tensor, memory_format: Any = None) -> torch.Tensor:
    place = torch.device("cpu")
    return _to(self, place) if memory_format is None else _to(self, place, memory_format=memory_format)


# --- factories --------------------------------------------------------------------------------------------------------


def _empty(
    size: Any,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> CudaTensor:
    like = torch.empty(size, device="meta", memory_format=memory_format or torch.contiguous_format)
    return _on_device(like.shape, like.stride(), dtype or torch.get_default_dtype(), _runtime.device(device))


def _empty_strided(
    size: Any, stride: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> CudaTensor:
    return _on_device(size, stride, dtype or torch.get_default_dtype(), _runtime.device(device))


_tensor = torch.tensor


def _new_tensor(data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False) -> torch.Tensor:
    """`torch.tensor`, whose C++ would copy to the device by itself."""
    made = _tensor(data, dtype=dtype)
    return (made if device is None else _to(made, torch.device(device))).requires_grad_(requires_grad)


_module_apply = torch.nn.Module._apply


def _apply(self: torch.nn.Module, fn: Callable[..., Any], recurse: bool = True) -> torch.nn.Module:
    """Parameters stay the same objects when they move, as on a GPU."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return _module_apply(self, fn, recurse)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


_attention = torch.nn.functional.scaled_dot_product_attention


def _attend(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> torch.Tensor:
    """With a mask that is on the device, where torch's C++ would make it on the CPU."""
    if isinstance(query, CudaTensor) and is_causal and attn_mask is None:
        fused = torch._fused_sdp_choice(query, key, value, None, dropout_p, True, scale=options.get("scale"))
        if not fused:
            is_causal = False
            attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    return _attention(query, key, value, attn_mask, dropout_p, is_causal, **options)


_library: list[torch.library.Library] = []


def install() -> Runtime:
    """Makes torch.cuda work in this process, on the driver that BAGUA_LIBCUDA names. Idempotent.

    What torch holds of the driver is given back at the end of the process. On a true driver torch.cuda stays as it is.
    """
    global _runtime
    if not _library and not torch_streams.Driver().simulated:
        return torch_streams.on_true_driver()
    if not _library:
        _runtime = torch_streams.start()
        pretended_futures.install()
        atexit.register(_runtime.close)
        library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            # That something is replaced, where torch is too old for the argument that allows it.
            warnings.simplefilter("ignore")
            options = {"allow_override": True} if "allow_override" in signature(library.impl).parameters else {}
            library.impl("empty.memory_format", _empty, "CUDA", **options)
            library.impl("empty_strided", _empty_strided, "CUDA", **options)
        _library.append(library)
        # A true CUDA tensor has no class of its own.
        dispatch.PLAIN += (CudaTensor,)
        tensor: Any = torch.Tensor
        tensor.to, tensor.cuda, tensor.cpu = _to, _cuda, _cpu
        tensor.type_as = _to
        factories: Any = torch
        factories.tensor = _new_tensor
        module: Any = torch.nn.Module
        module._apply = _apply
        functional: Any = torch.nn.functional
        functional.scaled_dot_product_attention = _attend
    return _runtime


@contextmanager
def joined(device: int = 0) -> Iterator[Runtime]:
    """torch on the simulated driver (or a true one), on one of its devices, in the process group of all ranks."""
    from bagua import torch_api

    runtime = install()
    torch.cuda.set_device(device)
    torch_api.init_process_group()
    yield runtime
    # Not after an exception: it is reported to the others when the process ends.
    torch_api.destroy_process_group()


@contextmanager
def in_torch() -> Iterator[dict[str, Any]]:
    """What a scenario in the process group of all ranks may take; for `tests.cuda.ranks.on_ranks`."""
    with joined() as runtime:
        yield {"runtime": runtime}


@contextmanager
def installed() -> Iterator[dict[str, Any]]:
    """What a scenario without a group may take."""
    yield {"runtime": install()}
