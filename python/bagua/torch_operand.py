"""Operands of torch's tensors.

For a plain tensor on a recent torch, the bindings (`extension.TensorReader`) read address, count and dtype in one call.
All other tensors, and all errors, go through the tensor's Python attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bagua import extension, verbs
from bagua.operand import Operand

__all__ = [
    "DTYPES",
    "Adapter",
    "check_kinds",
    "check_on_cpu",
    "check_pair",
    "check_place",
    "divide_integers",
    "dtype_code",
    "operation",
    "reader",
    "require_dtype",
    "silent_reader",
    "will_change",
]

#: The dtypes that can be communicated, and their codes in the core.
DTYPES: dict[torch.dtype, int] = {getattr(torch, name): code for name, code in extension.DTYPES.items()}

_BYTES = extension.DTYPES["uint8"]

_flatten: Callable[[Sequence[torch.Tensor]], torch.Tensor] = torch._utils._flatten_dense_tensors
_unflatten: Callable[[torch.Tensor, Sequence[torch.Tensor]], Sequence[torch.Tensor]]
_unflatten = torch._utils._unflatten_dense_tensors


def _changed(tensor: tuple[torch.Tensor]) -> None:
    torch.autograd.graph.increment_version(tensor[0])


def _version_counter() -> Callable[[tuple[torch.Tensor]], None]:
    count: Callable[[tuple[torch.Tensor]], None] = getattr(torch._C, "_increment_version", _changed)
    try:
        # Call the C function directly: its Python wrapper doubles the cost. An older torch does not take a tuple.
        count((torch.empty(0),))
    except TypeError:
        return _changed
    return count


def _is_lazy(tensor: torch.Tensor) -> bool:
    return tensor.is_neg() or tensor.is_conj()


def _new_reader(
    changed: Callable[[tuple[torch.Tensor]], None] | None = None, *, compares_shapes: bool = True
) -> extension.TensorReader:
    # The lazy negative and conjugate flags of a tensor. Tensor.is_neg releases the GIL, and another thread may keep it.
    lazy_flags = getattr(torch._C, "_get_tensor_metadata", _is_lazy)
    try:
        classes = [torch.Tensor, torch.nn.Parameter]
        return extension.TensorReader(classes, lazy_flags, changed, compares_shapes=compares_shapes)
    except (AttributeError, TypeError):  # torch before 2.10 does not export a tensor's address to C
        return extension.TensorReader([], lazy_flags)


# Increments a tensor's version counter, by which autograd detects that a saved tensor was written.
_count_version = _version_counter()

#: Reads address, count and dtype of torch's tensors.
reader = _new_reader(_count_version)
#: Reads them for torch.distributed, whose in-place collectives neither increment version counters nor compare shapes.
silent_reader = _new_reader(compares_shapes=False)


def will_change(operand: Operand) -> None:
    """Increments the version counters of the tensors that an operation will write."""
    for tensor in operand.results:
        try:
            _count_version((tensor,))
        except RuntimeError:
            # A tensor made in inference mode has no counter.
            if not tensor.is_inference():
                raise


def dtype_code(tensor: torch.Tensor, what: str) -> int:
    return require_dtype(tensor.dtype, what)


def require_dtype(dtype: torch.dtype, what: str) -> int:
    """Returns the code of a dtype. Raises TypeError if it cannot be communicated."""
    code = DTYPES.get(dtype)
    if code is None:
        raise TypeError(
            f"{what} has dtype {dtype}, which cannot be communicated; these can: {', '.join(extension.DTYPES)}"
        )
    return code


def divide_integers(tensor: torch.Tensor, divisor: int) -> None:
    """Divides an integer tensor in place, rounding towards zero. `divisor` is positive and less than 2^62."""
    if tensor.dtype.is_signed or tensor.dtype is torch.uint8:
        tensor.div_(divisor, rounding_mode="trunc")
        return
    # torch cannot divide unsigned integers of 16 bits and more. As int64, 2^63 and more are negative, halves are not.
    whole = tensor.to(torch.int64)
    half = (whole >> 1) & (2**63 - 1)
    quotient = half.div_(divisor, rounding_mode="trunc") * 2
    tensor.copy_(quotient + (whole - quotient * divisor >= divisor))


def check_on_cpu(tensor: torch.Tensor, what: str) -> None:
    """Raises NotImplementedError for a tensor outside host memory, or a sparse one."""
    check_place(tensor, what, ("cpu",))


def check_place(tensor: torch.Tensor, what: str, places: Sequence[str] = ("cpu", "cuda")) -> None:
    """Raises NotImplementedError for a tensor on another kind of device than `places`, or a sparse one."""
    if tensor.device.type not in places:
        allowed = " and ".join(place.upper() for place in places)
        raise NotImplementedError(f"{what} is on {tensor.device}: only {allowed} tensors can be communicated here")
    if tensor.layout != torch.strided:
        where = "" if tensor.device.type == "cpu" else f" on {tensor.device}"
        raise NotImplementedError(f"{what} is {tensor.layout}{where}: only dense tensors can be communicated here")


def check_kinds(sent: torch.Tensor, received: torch.Tensor, names: Sequence[str]) -> None:
    """Raises TypeError unless two tensors have the same dtype and device. `names` are their names in errors."""
    one, other = names
    if sent.dtype != received.dtype:
        raise TypeError(f"{one} has dtype {sent.dtype}, {other} {received.dtype}: they must be equal")
    if sent.device != received.device:
        raise TypeError(f"{one} is on {sent.device}, {other} on {received.device}: they must be on the same device")


def check_pair(verb: verbs.Verb, sent: torch.Tensor, received: torch.Tensor, ranks: int, names: Sequence[str]) -> None:
    """Does what `check_kinds` does. Also raises ValueError if the tensors' sizes do not fit the verb."""
    check_kinds(sent, received, names)
    why = verb.misfit(sent.numel(), received.numel(), ranks)
    if why is not None:
        raise ValueError(f"{names[0]} has {sent.numel()} elements, {names[1]} {received.numel()}: {why}")


def operation(
    raw: extension.Communicator, verb: verbs.Verb, src: Operand | None, dst: Operand | None, **options: Any
) -> verbs.Operation:
    """Calls `verbs.operation`, after all checks, and increments the version counters of the tensors it writes."""
    if dst is not None:
        will_change(dst)
    return verbs.operation(raw, verb, src, dst, **options)


@dataclass(frozen=True)
class Adapter:
    """The rules by which a front end makes operands from tensors."""

    #: True if dtypes unknown to the core are sent as bytes. Otherwise they raise TypeError.
    sends_bytes: bool = False
    #: True if a tensor that is not contiguous gets a copy of the result. Otherwise it raises ValueError.
    copies_results: bool = False
    #: True if ranks compare shapes, in verbs that do. Otherwise they compare only sizes.
    compares_shapes: bool = True
    #: See `DeviceHandle.then`.
    then_orders: bool = True

    def check(self, tensor: Any, what: str) -> int:
        """Returns the code of a tensor's dtype, or the code of bytes if `sends_bytes` applies.

        Raises TypeError or NotImplementedError if the tensor cannot be communicated.
        """
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{what} must be a torch.Tensor, not {type(tensor).__name__}")
        check_place(tensor, what)
        if not _has_memory(tensor):
            kind = type(tensor).__name__
            raise TypeError(
                f"{what} is a {kind}, which has no memory of its own: pass the tensor that holds its values"
            )
        return DTYPES.get(tensor.dtype, _BYTES) if self.sends_bytes else dtype_code(tensor, what)

    def read(self, tensor: Any, what: str) -> Operand:
        """Returns an operand to read. Copies a tensor that is not contiguous, or lazily negated or conjugated."""
        found = reader.at(tensor)
        if found is not None:
            address, count, code, dims = found
            return Operand(address, count, code, dims if self.compares_shapes else None, tensor.data)
        code = self.check(tensor, what)
        memory = tensor.detach()
        return self._operand(memory if _is_plain(memory) else _contiguous(memory), code)

    def write(self, tensor: Any, what: str, *, reads: bool = True) -> Operand:
        """Returns an operand to write. `reads`: it is read too, so a copy starts with the tensor's values."""
        found = reader.at(tensor)
        if found is not None:
            address, count, code, dims = found
            dims = dims if self.compares_shapes else None
            return Operand(address, count, code, dims, tensor.data, results=(tensor,))
        code = self.check(tensor, what)
        memory = tensor.detach()
        if _is_plain(memory):
            return self._operand(memory, code, results=(tensor,))
        if not self.copies_results:
            _refuse_to_write(tensor, what)
        memory = _contiguous(memory) if reads else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)

        def finish() -> None:
            with torch.no_grad():
                # `data` has its own version counter. The tensor's counter is incremented by the caller, if at all.
                tensor.data.copy_(memory)

        return self._operand(memory, code, results=(tensor,), finish=finish)

    def joined(self, tensors: Sequence[Any], what: str, *, reads: bool = True, writes: bool = True) -> Operand:
        """Returns one operand for several tensors, one after another. Raises TypeError if dtypes or devices differ."""
        for i, tensor in enumerate(tensors):
            if reader.at(tensor) is None:
                self.check(tensor, f"{what}[{i}]")
        first = tensors[0]
        code = self.check(first, what)
        if len(kinds := {tensor.dtype for tensor in tensors}) > 1:
            raise TypeError(f"{what} of different dtypes cannot be coalesced: {sorted(map(str, kinds))}")
        if len(places := {tensor.device for tensor in tensors}) > 1:
            raise TypeError(f"{what} on different devices cannot be coalesced: {sorted(map(str, places))}")
        if reads:
            refuse_capture(first)
            with torch.no_grad():
                # For a single tensor, torch's flattening may return the same memory.
                memory = _flatten(tensors) if len(tensors) > 1 else torch.cat([first.reshape(-1)])
        else:
            memory = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=first.dtype, device=first.device)
        if not writes:
            return self._operand(memory, code)

        def finish() -> None:
            with torch.no_grad():
                for tensor, piece in zip(tensors, _unflatten(memory, tensors), strict=True):
                    # torch 2.5 gives empty tensors another shape.
                    if piece.numel() > 0:
                        tensor.detach().copy_(piece)

        return self._operand(memory, code, results=tensors, finish=finish)

    def _operand(
        self,
        memory: torch.Tensor,
        code: int,
        results: Sequence[torch.Tensor] = (),
        finish: Callable[[], None] | None = None,
    ) -> Operand:
        count = memory.numel()
        if memory.dtype not in DTYPES:
            count *= memory.element_size()
        dims = tuple(memory.shape) if self.compares_shapes else None
        place = None
        if memory.is_cuda:
            # Not at the top, because importing bagua.cuda decides to which process CUDA belongs.
            from bagua.cuda.tensors import TensorStream

            place = TensorStream(memory.device, self.then_orders)
        return Operand(memory.data_ptr(), count, code, dims, memory, place, finish=finish, results=results)


def _has_memory(tensor: torch.Tensor) -> bool:
    """Returns False for a tensor without memory of its own: a subclass that holds other tensors, a FakeTensor, or a
    tensor inside a transform such as `torch.func.grad`.
    """
    # Asking a FakeTensor for its address only warns.
    if type(tensor) is not torch.Tensor and hasattr(tensor, "fake_mode"):
        return False
    try:
        return tensor.numel() == 0 or tensor.data_ptr() != 0
    except RuntimeError:
        return False


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def _refuse_to_write(tensor: torch.Tensor, what: str) -> None:
    if not tensor.is_contiguous():
        why = f"{what} of shape {list(tensor.shape)} is not contiguous"
    else:
        why = f"{what} is the {'negation' if tensor.is_neg() else 'conjugate'} of another tensor"
    raise ValueError(f"{why}, so results cannot be written into it")


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    refuse_capture(tensor)
    return tensor.resolve_conj().resolve_neg().contiguous()


def refuse_capture(tensor: torch.Tensor) -> None:
    """Raises NotImplementedError while the stream is being captured, because a copy would become part of the graph."""
    if tensor.is_cuda:
        from bagua.cuda import tensors

        tensors.refuse_capture(tensor.device)
