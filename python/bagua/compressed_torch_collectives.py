"""Collectives on tensors of torch through a codec, whose records torch.distributed sends."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch
import torch.distributed as dist

from bagua import extension
from bagua.codecs import Codec
from bagua.torch_operand import DTYPES

__all__ = ["TensorExchange", "Wire", "codec_of", "sending_device"]

#: The tag of messages between ranks, which a user's messages on the same group do not have.
TAG = 24_861


def codec_of(codec: str | Codec) -> Codec:
    """Returns a codec by its name, or the codec itself. Raises TypeError for other objects."""
    if isinstance(codec, str):
        return Codec(codec)
    if not isinstance(codec, Codec):
        raise TypeError(f"codec must be a codec's name or a bagua.Codec, not {type(codec).__name__}")
    return codec


def sending_device(group: dist.ProcessGroup) -> torch.device:
    """Returns where a group sends from. A group that has only NCCL sends from the current device."""
    return torch.device("cpu" if "cpu:" in str(dist.get_backend_config(group)) else torch.cuda.current_device())


class Wire:
    """Sends records and tensors on a process group. The records are in host memory."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._device = sending_device(group)
        self._group: Any = group
        #: True if records are sent as messages. Those of gloo arrive where they belong. Its collectives copy, and took
        #: 1.7 times as long for 8 MB between two ranks at 1 Gbit/s, because the ranks often sent one after the other.
        self.by_messages = "cpu:gloo" in str(dist.get_backend_config(group))
        # Operands of the last operation. A thread of gloo lets go of them late. If it had the last reference, it would
        # need the GIL, and end the process if Python exits meanwhile (github.com/pytorch/pytorch/pull/179291).
        self._operands: tuple[torch.Tensor, ...] = ()
        #: A float64 that travels behind each record of the next exchange of records; None for none.
        self.note: float | None = None
        #: The notes of all ranks, after that exchange.
        self.notes: list[float] = []

    def _noted(self, records: torch.Tensor) -> torch.Tensor:
        """Returns records, one a row, with the note behind each."""
        if self.note is None:
            return records
        note = torch.tensor([self.note], dtype=torch.float64).view(torch.uint8)
        return torch.cat([records, note.expand(len(records), -1)], dim=1)

    def _without_notes(self, records: torch.Tensor, record: int) -> torch.Tensor:
        """Takes the notes off records, one a row."""
        if self.note is not None:
            self.notes = records[:, record:].contiguous().view(torch.float64).flatten().tolist()
            self.note = None
        return records[:, :record]

    def all_to_all(self, sent: int, received: int, record: int) -> None:
        """Sends block j at `sent` to rank j, and stores the block from rank i at place i of `received`."""
        results = self._records(received, record)
        given = self._noted(self._records(sent, record)).to(self._device)
        if self.by_messages:
            there = self._swap(given, results)
        else:
            there = torch.empty_like(given)
            dist.all_to_all_single(there, given, group=self._group)
        self._finish(results, there, given)

    def all_gather(self, blocks: int, record: int) -> None:
        """Fills the memory at `blocks`, which holds this rank's block, with the blocks of all ranks."""
        results = self._records(blocks, record)
        own = self._noted(results[self.rank :][:1])
        if self.by_messages:
            there = self._swap(own.expand(self.size, -1), results)
        else:
            own = own.to(self._device, copy=True)
            there = own.new_empty(self.size, own.numel())
            dist.all_gather_into_tensor(there, own, group=self._group)
        self._finish(results, there, own)

    def _records(self, address: int, record: int) -> torch.Tensor:
        return _bytes(address, self.size * record).view(self.size, record)

    def _finish(self, results: torch.Tensor, there: torch.Tensor, given: torch.Tensor) -> None:
        """Moves what was received to its place."""
        self._operands = there, given
        if there is not results:
            results.copy_(self._without_notes(there.cpu(), results.shape[1]))

    def _swap(self, sent: torch.Tensor, results: torch.Tensor) -> torch.Tensor:
        """Sends row j of `sent` to rank j. Returns the rows from all ranks, in `results` unless they carry notes."""
        there = results if sent.shape == results.shape else torch.empty_like(sent)
        if there is not results:
            there[self.rank] = sent[self.rank]
        works: list[Any] = []
        try:
            for distance in range(1, self.size):
                source, to = (self.rank - distance) % self.size, (self.rank + distance) % self.size
                works.append(self._group.recv([there[source]], source, TAG))
                works.append(self._group.send([sent[to]], to, TAG))
            while works:
                works.pop().wait()
        finally:
            # After an error, a traceback must not keep the other receives, which write into memory that may be freed.
            works.clear()
        return there

    def average(self, tensor: torch.Tensor) -> None:
        """Replaces a tensor by its mean over the ranks."""
        sent = tensor.to(self._device)
        dist.all_reduce(sent, group=self._group)
        self._operands = (sent,)
        tensor.copy_(sent.div_(self.size))

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Replaces a tensor by that of the group's first rank."""
        sent = tensor.to(self._device).contiguous()
        dist.broadcast(sent, dist.get_global_rank(self._group, 0), group=self._group)
        self._operands = (sent,)
        tensor.copy_(sent)


class TensorExchange:
    """Compressed collectives on a process group. Tensors on a device pass through host memory, where the codec runs.

    `call` is the number of the call, equal on all ranks, from which codecs that draw at random draw. `error` is the
    error memory, with one float32 per element of the tensor, or None.
    """

    def __init__(self, codec: Codec, group: dist.ProcessGroup) -> None:
        self.wire = wire = Wire(group)
        self._exchange = extension.CompressedExchange(
            codec._raw, wire.rank, wire.size, wire.all_to_all, wire.all_gather
        )

    def all_reduce(
        self, tensor: torch.Tensor, *, call: int, error: torch.Tensor | None, weight: float | None = None
    ) -> float:
        """Replaces a contiguous tensor by its mean over the ranks. Returns the sum of the ranks' weights.

        With a weight on every rank, the mean is weighted. If all weights are 0, the tensor is only added up.
        """
        if weight == 0:
            tensor.zero_()
        elif weight is not None:
            tensor.mul_(weight)
        self.wire.note, self.wire.notes = weight, [] if weight is None else [weight]
        host, kept = tensor.cpu(), None if error is None else error.cpu()
        place = host.data_ptr(), host.numel(), DTYPES[host.dtype]
        self._exchange.all_reduce(*place, call=call, error=None if kept is None else kept.data_ptr())
        tensor.copy_(host)
        if error is not None and kept is not None:
            error.copy_(kept)
        self.wire.note, total = None, math.fsum(self.wire.notes)
        if weight is None:
            return self.wire.size
        if total > 0:
            tensor.mul_(len(self.wire.notes) / total)
        return total

    def reduce_scatter(
        self, result: torch.Tensor, tensor: torch.Tensor, *, average: bool, call: int, error: torch.Tensor | None
    ) -> None:
        """Stores this rank's part of the sum, or of the average, over the ranks in `result`. Both are contiguous.

        Overwrites `tensor`, which has one part per rank. The error memory must be in host memory.
        """
        host, part = tensor.cpu(), result.cpu()
        place = host.data_ptr(), part.data_ptr(), host.numel(), DTYPES[host.dtype]
        kept = None if error is None else error.data_ptr()
        self._exchange.reduce_scatter(*place, average=average, call=call, error=kept)
        result.copy_(part)


def _bytes(address: int, count: int) -> torch.Tensor:
    """Returns host memory as a tensor of uint8, without a copy."""
    return torch.frombuffer((ctypes.c_uint8 * count).from_address(address), dtype=torch.uint8)
