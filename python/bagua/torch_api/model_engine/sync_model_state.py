"""Makes the ranks equal: compares their models, then copies rank 0's parameters, buffers and optimizer state."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch

from bagua.errors import MismatchError

from .. import devices
from ..process_group import Communicator
from ..utils import unflatten

#: Bytes per broadcast of parameters: enough for full speed, and small compared with a large model.
_PIECE = 64 << 20

#: Alignment in bytes of each dtype's elements in a packed message.
ALIGN = 16


def require_equal(communicator: Communicator, lines: Sequence[str], failure: Exception | None = None) -> None:
    """Raises MismatchError on every rank, with the first line that differs from rank 0's, unless all lines are equal.

    ``failure`` is an error in this rank's own arguments. This rank raises it, and the other ranks raise MismatchError
    with its text. The group stays usable.
    """
    said = ["agreed", *lines] if failure is None else ["refused", f"{type(failure).__name__}: {failure}"]
    digests = communicator.allgather_object(hashlib.sha256(repr(said).encode()).digest())
    if failure is None and len(set(digests)) == 1:
        return
    everybody = communicator.allgather_object(said)
    if failure is not None:
        raise failure
    for rank, (verdict, *theirs) in enumerate(everybody):
        if verdict == "refused":
            raise MismatchError(f"rank {rank} cannot wrap its model: {theirs[0]}")
    reference = everybody[0][1:]
    for rank, (_, *theirs) in enumerate(everybody):
        for i in range(max(len(reference), len(theirs))):
            first, other = (side[i] if i < len(side) else "nothing more" for side in (reference, theirs))
            if first != other:
                raise MismatchError(f"the ranks' models differ: rank 0 has {first}, rank {rank} has {other}")


def describe(kind: str, name: str, tensor: torch.Tensor) -> str:
    """Returns a text with the properties of a parameter or buffer that must be equal on all ranks."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    strides = "" if tensor.is_contiguous() else f" with strides {list(tensor.stride())}"
    frozen = "" if tensor.requires_grad or kind == "buffer" else "frozen "
    place = "" if tensor.device.type == "cpu" else f" on {tensor.device.type}"
    return f"{frozen}{kind} {name!r} {dtype}{list(tensor.shape)}{strides}{place}"


def pack(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Returns memory for the bytes of tensors of any dtypes on one device, and a view in it for each tensor."""
    runs = [list(run) for _, run in groupby(tensors, key=lambda tensor: tensor.dtype)]
    starts, end = [], 0
    for run in runs:
        starts.append(end)
        size = sum(tensor.numel() for tensor in run) * run[0].element_size()
        end += size + -size % ALIGN
    room = torch.empty(end, dtype=torch.uint8, device=tensors[0].device)
    windows: list[torch.Tensor] = []
    for start, run in zip(starts, runs, strict=True):
        size = sum(tensor.numel() for tensor in run) * run[0].element_size()
        windows += unflatten(room[start : start + size].view(run[0].dtype), run)
    return room, windows


def broadcast_tensors(broadcast: Any, rank: int, tensors: Iterable[torch.Tensor], root: int = 0) -> None:
    """Copies the root's values to all ranks, for any dtypes. ``broadcast(tensor)`` sends bytes from the root.

    Does not change version counters, because autograd may have saved a buffer for a later backward.
    """

    def at_once(room: torch.Tensor) -> Callable[[], None]:
        broadcast(room)
        return _nothing

    for batch in _batches(tensors):
        _start_batch(at_once, rank == root, batch)()


def start_broadcast(
    start: Callable[[torch.Tensor], Callable[[], None]], rank: int, tensors: Iterable[torch.Tensor]
) -> Callable[[], None]:
    """Starts :func:`broadcast_tensors` from rank 0, and returns a function that waits for it and then writes the
    tensors.

    ``start(tensor)`` starts sending bytes from rank 0, and returns the wait for them.
    """
    waits = [_start_batch(start, rank == 0, batch) for batch in _batches(tensors)]

    def wait() -> None:
        for each in waits:
            each()

    return wait


def _batches(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yields the non-empty tensors in batches of about :data:`_PIECE` bytes, each on one device."""
    # Device -> the batch that is being filled: its bytes and tensors. Devices may have other numbers on other ranks,
    # but come in the same order.
    filling: dict[torch.device, tuple[int, list[torch.Tensor]]] = {}
    for tensor in tensors:
        devices.check_place(tensor, "a parameter, buffer or optimizer state")
        if tensor.numel() == 0:
            continue
        size, batch = filling.pop(tensor.device, (0, []))
        size += tensor.numel() * tensor.element_size()
        batch.append(tensor.data)
        if size >= _PIECE:
            yield batch
        else:
            filling[tensor.device] = size, batch
    for _, batch in filling.values():
        yield batch


def _start_batch(
    start: Callable[[torch.Tensor], Callable[[], None]], sends: bool, batch: list[torch.Tensor]
) -> Callable[[], None]:
    room, windows = pack(batch)
    if sends:
        torch._foreach_copy_(windows, batch)
    wait = start(room)

    def finish() -> None:
        wait()
        if not sends:
            torch._foreach_copy_(batch, windows)

    return finish


def _nothing() -> None:
    """Waits for nothing."""


class _Slot:
    """A placeholder for a tensor in a pickled state."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype
        #: The device itself differs between ranks.
        self.on_device = tensor.device.type == "cuda"

    def tensor(self, device: torch.device) -> torch.Tensor:
        """Returns a tensor to receive into, on the host or on ``device``."""
        return torch.empty(self.shape, dtype=self.dtype, device=device if self.on_device else None)


def is_sharded(optimizer: torch.optim.Optimizer) -> bool:
    """Returns True if each rank has a part of the optimizer's state, as with torch's ZeroRedundancyOptimizer."""
    return hasattr(optimizer, "consolidate_state_dict")


def broadcast_optimizer(
    communicator: Communicator,
    broadcast: Any,
    optimizer: torch.optim.Optimizer,
    own: Sequence[torch.Tensor] = (),
    root: int = 0,
) -> None:
    """Gives every rank's optimizer the root's state and hyperparameters.

    The root announces its tensors first, so ranks with an empty or longer state do not wait for messages that never
    come. ``own`` are parameters that are not communicated, whose state each rank keeps. Not for an optimizer that
    :func:`is_sharded`.
    """
    apart = {id(param) for param in own}
    params = (param for group in optimizer.param_groups for param in group["params"])
    place = next((param.device for param in params if param.is_cuda), torch.device("cuda"))
    leaves: list[torch.Tensor] = []

    def take_out(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            leaves.append(value.detach())
            return _Slot(value)
        return _rebuilt(value, take_out)

    def put_in(value: Any) -> Any:
        if isinstance(value, _Slot):
            leaves.append(value.tensor(place))
            return leaves[-1]
        return _rebuilt(value, put_in)

    rank = communicator.rank()
    if rank == root:
        state = optimizer.state_dict()
        for number, param in _numbered(optimizer, state):
            if id(param) in apart:
                state["state"].pop(number, None)
        communicator.broadcast_object(take_out(state), root)
        broadcast_tensors(broadcast, rank, leaves, root)
    else:
        state = put_in(communicator.broadcast_object(None, root))
        broadcast_tensors(broadcast, rank, leaves, root)
        kept = {param: entry for param, entry in optimizer.state.items() if id(param) in apart}
        optimizer.load_state_dict(state)
        restore_types(optimizer, state)
        optimizer.state.update(kept)


def restore_types(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Converts the tensors of an optimizer that has loaded ``state`` back to the dtypes in ``state``.

    ``load_state_dict`` converts everything except "step" to the parameter's dtype. The rank that sent the state keeps
    the original dtypes (NAdam's ``mu_product``, a float32 copy of a bfloat16 weight). Without this function the ranks'
    weights would drift apart.
    """
    for number, param in _numbered(optimizer, state):
        loaded, received = optimizer.state.get(param), state["state"].get(number)
        if not (isinstance(loaded, dict) and isinstance(received, dict)):
            continue
        for key, value in received.items():
            now = loaded.get(key)
            if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and now.dtype is not value.dtype:
                loaded[key] = value.to(now.device)


def _numbered(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yields number in the optimizer's state_dict, and parameter."""
    for theirs, group in zip(state["param_groups"], optimizer.param_groups, strict=True):
        yield from zip(theirs["params"], group["params"], strict=True)


def _rebuilt(value: Any, change: Any) -> Any:
    if isinstance(value, dict):
        return {key: change(entry) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(change(entry) for entry in value)
    return value
