"""A communication hook for torch's DistributedDataParallel: gradients are averaged through a codec.

    from bagua.hooks import CompressedState, compressed_hook

    model = DistributedDataParallel(net)  # torch's, on gloo, NCCL or "bagua"
    model.register_comm_hook(CompressedState("minmax_u8"), compressed_hook)

The hook works as the algorithm `bytegrad` with `hierarchical=False` does, and gives the same bits for the same buckets.
Each rank encodes a bucket in one part per rank and sends part j to rank j, which decodes part j of every rank, adds
them in float32 in rank order, divides by the number of ranks, and sends the encoded result to all ranks. Codecs that
keep a few elements only (`top_k`, `random_k`, `onebit`) send one record of the whole bucket to all ranks instead.
Source: Gan et al., VLDB 2021, arXiv:2107.01499.

torch.distributed sends everything: messages between ranks on gloo, `all_to_all_single` and `all_gather_into_tensor` on
other backends. The hook sends on process groups of its own, with a thread for each that takes its buckets in their
order. DDP's own collectives and other buckets cannot come between the two steps on one rank only, which would make
ranks wait for each other for ever.
"""

# Without `from __future__ import annotations`: torch compares the annotations of a hook with its classes.

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from bagua.codecs import Codec
from bagua.compressed_torch_collectives import TensorExchange, codec_of, sending_device
from bagua.weight import checked_weight

__all__ = ["CompressedState", "compressed_hook"]


class CompressedState:
    """The state of `compressed_hook`, for one model.

    `codec`: a codec's name or a `bagua.Codec`.

    `error_feedback`: add what encoding lost to the next gradient of the same parameter. This costs one float32 per
    element of the parameters. Source: Karimireddy et al., ICML 2019, arXiv:1901.09847.

    `process_group`: the group that DistributedDataParallel was given; None is the default group.

    `weight`: the rank's weight in the average, which becomes sum(weight * gradient) / sum(weight). None is the plain
    mean. Either all ranks have a weight or none has. Set the attribute `weight` before a backward to change it. If the
    weight of every rank is 0, the backward raises on all ranks; torch makes a RuntimeError of the ValueError.

    Raises ValueError or TypeError for a codec that `bagua.Codec` refuses. A gradient of a type that the codec does not
    encode, such as float64, raises TypeError in the backward of each rank, before anything is sent.
    """

    def __init__(
        self,
        codec: str | Codec = "minmax_u8",
        *,
        error_feedback: bool = False,
        process_group: dist.ProcessGroup | None = None,
        weight: float | None = None,
    ) -> None:
        self.weight = weight
        self.codec = codec_of(codec)
        self.error_feedback = error_feedback
        self._given_group = process_group
        self._sender: _Sender | None = None
        self._memory = _ErrorMemory()
        # Number of calls by index of the bucket, from which codecs that draw at random draw.
        self._calls: dict[int, int] = {}

    @property
    def weight(self) -> float | None:
        """The rank's weight from the next backward on. Raises ValueError unless it is finite and not negative."""
        return self._weight

    @weight.setter
    def weight(self, weight: float | None) -> None:
        self._weight = None if weight is None else checked_weight(weight)

    def state_dict(self) -> dict[str, Any]:
        """Returns the error memory and the number of calls, for `torch.save` and `torch.load(weights_only=True)`.

        Call it between two steps. The memory differs by rank: save it on each rank, or call `consolidate` on all ranks
        before. `errors` has one float32 tensor for each parameter, in the order in which the first backward reduced
        them.
        """
        return {"errors": [error.clone() for error in self._memory.errors], "calls": dict(self._calls)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` has returned, before the first backward or between two steps.

        Raises ValueError if the state has error memory and this one has no error feedback, or if number or sizes of the
        parameters differ. Before the first backward, the first backward raises it.
        """
        if state["errors"] and not self.error_feedback:
            raise ValueError("the state has error memory, which would be lost: pass error_feedback=True")
        self._memory.load(state["errors"])
        self._calls = dict(state["calls"])

    def consolidate(self) -> None:
        """Replaces the error memory of each rank by the mean over all ranks. Collective; call it between two steps.

        The ranks together owe the same as before. Afterwards the `state_dict` of any rank serves all ranks of a job
        that is resumed, with any number of ranks.
        """
        if self.error_feedback and self._memory.buckets:
            wire = self._started().exchanges[0].wire
            for errors in self._memory.buckets.values():
                wire.average(errors)

    def _started(self) -> "_Sender":
        if self._sender is None:
            self._sender = _Sender(self._given_group, self.codec)
        return self._sender

    def _begin(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        # Call encoded_bytes here only for its errors: a wrong element type or count then raises on this thread, not on
        # the sending thread.
        self.codec.encoded_bytes(buffer.numel(), str(buffer.dtype).removeprefix("torch."))
        sender = self._started()
        error = self._memory.error_of(bucket) if self.error_feedback else None
        call = self._calls.get(bucket.index(), 0)
        self._calls[bucket.index()] = call + 1
        return sender.begin_all_reduce(bucket.index(), buffer, call, error, self.weight)


def compressed_hook(state: CompressedState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket of gradients through the codec of `state`. Pass it to `register_comm_hook`.

    Returns a future of the bucket's buffer, which then has the mean over the ranks, equal to the bit on all of them.
    Raises TypeError for gradients of a type that the codec does not encode, and what torch.distributed raises.
    """
    return state._begin(bucket)


class _ErrorMemory:
    """The losses of encoding each parameter's gradient, one float32 per element.

    The memory of a bucket is one flat tensor. DDP rebuilds its buckets after the first step, so the memory follows each
    parameter into its new bucket. A parameter's place is its number in the order of the first backward.
    """

    def __init__(self) -> None:
        #: By index of the bucket.
        self.buckets: dict[int, torch.Tensor] = {}
        # Parameters of each bucket, by id.
        self._members: dict[int, list[int]] = {}
        #: The part of each parameter, by place.
        self.errors: list[torch.Tensor] = []
        # The place of each parameter, by id. The parameters are kept, so that no other object gets the id of one.
        self._places: dict[int, int] = {}
        self._parameters: list[torch.Tensor] = []
        # Number of parameters in a state that was loaded before the first backward, which checks it.
        self._loaded = 0

    def error_of(self, bucket: GradBucket) -> torch.Tensor:
        """Returns the error memory of a bucket, on the bucket's device."""
        index, buffer, parameters = bucket.index(), bucket.buffer(), bucket.parameters()
        known = self.buckets.get(index)
        ids = [id(parameter) for parameter in parameters]
        # The buckets of a rank that has left a `Join` context early have no parameters.
        if known is not None and known.numel() == buffer.numel() and ids in ([], self._members[index]):
            return known
        made = torch.zeros(buffer.numel(), dtype=torch.float32, device=buffer.device)
        begin = 0
        for parameter in parameters:
            part = made[begin : begin + parameter.numel()]
            begin += parameter.numel()
            self._place(parameter, part)
        if parameters:
            self.buckets[index], self._members[index] = made, ids
        if bucket.is_last() and self._loaded:
            self._check_number(self._loaded)
            self._loaded = 0
        return made

    def _place(self, parameter: torch.Tensor, part: torch.Tensor) -> None:
        """Makes ``part`` the error memory of a parameter, with the values of its earlier part or of a loaded state."""
        place = self._places.get(id(parameter))
        if place is None:
            place = self._places[id(parameter)] = len(self._parameters)
            self._parameters.append(parameter)
        if place == len(self.errors):
            self.errors.append(part)
            return
        self._copy(self.errors[place], part, place)
        self.errors[place] = part

    def load(self, errors: Sequence[torch.Tensor]) -> None:
        if not self._parameters:
            self.errors = [error.clone() for error in errors]
            self._loaded = len(errors)
            return
        self._check_number(len(errors))
        for place, (error, part) in enumerate(zip(errors, self.errors, strict=True)):
            self._copy(error, part, place)

    def _check_number(self, loaded: int) -> None:
        if loaded != len(self._parameters):
            raise ValueError(f"the state has error memory of {loaded} parameters, the model {len(self._parameters)}")

    @staticmethod
    def _copy(error: torch.Tensor, part: torch.Tensor, place: int) -> None:
        if error.numel() != part.numel():
            raise ValueError(
                f"the error memory of parameter {place}, in the order of the first backward, has {error.numel()} "
                f"elements in the state and {part.numel()} in the model"
            )
        part.copy_(error.reshape(-1))


class _Sender:
    """Reduces buckets, on gloo two at the same time: while one is sent, the other is encoded or decoded.

    Each of the two has a thread and a process group, and takes the buckets of even or of odd indices. So each group has
    the same buckets in the same order on all ranks.
    """

    def __init__(self, given: dist.ProcessGroup | None, codec: Codec) -> None:
        self.exchanges = [TensorExchange(codec, _own_group(given))]
        if self.exchanges[0].wire.by_messages:
            self.exchanges.append(TensorExchange(codec, _own_group(given)))
        self._threads = [ThreadPoolExecutor(1, thread_name_prefix="bagua-hook") for _ in self.exchanges]
        # The first error. After it, the ranks may no longer be at the same bucket.
        self._failure: BaseException | None = None

    def begin_all_reduce(
        self, index: int, buffer: torch.Tensor, call: int, error: torch.Tensor | None, weight: float | None
    ) -> torch.futures.Future[torch.Tensor]:
        """Returns a future of the buffer of bucket `index` with the mean."""
        stream = torch.cuda.current_stream(buffer.device) if buffer.is_cuda else None
        begins: torch.futures.Future[None] = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
        line = index % len(self.exchanges)

        def reduce(_: Any) -> torch.Tensor:
            if self._failure is not None:
                raise RuntimeError(f"an earlier bucket of gradients failed: {self._failure}") from self._failure
            try:
                # On a device, the copies follow the gradients, and DDP's next work follows the copies.
                with torch.cuda.stream(stream):
                    total = self.exchanges[line].all_reduce(buffer, call=call, error=error, weight=weight)
            except BaseException as failure:
                self._failure = failure
                raise
            if total == 0:
                raise ValueError("the weight of every rank is 0, so there is no average of the gradients")
            return buffer

        # DDP's C++ code raises what a `then` has raised, but not what `set_exception` was given.
        result = begins.then(reduce)
        self._threads[line].submit(begins.set_result, None)
        return result


def _own_group(given: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Returns a new group of the same ranks, which sends in the same way."""
    group = dist.group.WORLD if given is None else given
    if group is None or dist.get_rank(group) < 0:
        raise ValueError("compressed_hook needs an initialized process group that this rank is in")
    own = dist.new_group(
        dist.get_process_group_ranks(group),
        timeout=group._get_backend(sending_device(group)).options._timeout,
        backend=None if given is None else str(dist.get_backend_config(group)),
        use_local_synchronization=True,
    )
    # Ranks outside of a new group get a number instead.
    assert not isinstance(own, int)
    return own
