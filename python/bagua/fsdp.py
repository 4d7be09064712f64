"""Compressed gradients in torch's FSDP2.

    fully_shard(model)
    bagua.fsdp.compress(model, "minmax_u8")

FSDP2 reduces the gradients of one parameter group after the other. The reduce_scatter becomes an exchange of records:
each rank encodes its gradients in one part per rank and sends part j to rank j, which decodes part j of every rank,
adds them in float32 in rank order, divides if FSDP averages, and rounds once. Nothing is encoded twice.

With `replicas=`, the ranks that have the same shard average it through a codec, after FSDP's own reduce_scatter or a
compressed one. This is HSDP whose slow network transfers records only.

torch.distributed sends the records, on the process groups of FSDP and of the replicas. FSDP calls the reduce_scatter
and the average over replicas on the thread that runs backward, in the same order on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from bagua.codecs import Codec
from bagua.compressed_torch_collectives import TensorExchange, Wire, codec_of

__all__ = ["CompressedShards", "compress"]


def compress(
    module: nn.Module,
    codec: str | Codec | None = "minmax_u8",
    *,
    error_feedback: bool = False,
    replicas: DeviceMesh | dist.ProcessGroup | None = None,
    replica_codec: str | Codec = "minmax_u8",
) -> CompressedShards:
    """Compresses the gradients of a module that went through `fully_shard`, and of the FSDP modules inside it.

    Call it on all ranks after `fully_shard`, before the first forward, when the parameters have their values.

    `codec`: the codec of the reduce_scatter over the module's mesh, a name or a `bagua.Codec`. None leaves the
    reduce_scatter to FSDP.

    `error_feedback`: add what encoding lost to the next gradients. The memory is in host memory. The reduce_scatter
    needs one float32 per element of the unsharded parameters, the average over the replicas one per element of the
    shards. Source: Karimireddy et al., ICML 2019, arXiv:1901.09847.

    `replicas`: a one-dimensional DeviceMesh or a process group of the ranks that have the same shard. Their gradients
    are averaged through `replica_codec`. `compress` gives all replicas the parameters of the first one.

    Returns the state, which has to be saved in checkpoints if there is error feedback.

    Raises ValueError for a module without `fully_shard`, a module whose mesh has a dimension of replicas, a module with
    several parameter groups, and gradients of a type that a codec does not encode. Raises NotImplementedError with a
    torch older than 2.9. A backward whose gradients are multiplied before they are added
    (`set_gradient_divide_factor`) raises NotImplementedError.
    """
    inner = None if codec is None else codec_of(codec)
    outer = None if replicas is None else codec_of(replica_codec)
    if inner is None and outer is None:
        raise ValueError("codec=None without replicas= leaves nothing to compress")
    found = _parameter_groups(module)
    for name, _, group in found:
        _check(name, group, [each for each in (inner, outer) if each is not None])
    across = [] if replicas is None else [_group_of(replicas, [group for _, _, group in found])]
    reduced: dict[str, _Collective] = {}
    for name, fsdp, group in found:
        mesh = group.mesh_info
        if inner is not None:
            groups = [mesh.shard_process_group, *across]
            scatters = _ReduceScatter(name, inner, error_feedback, mesh.shard_mesh_size, groups)
            fsdp.set_custom_reduce_scatter(scatters)
            reduced[f"{name}:reduce_scatter"] = scatters
        if outer is not None:
            averages = _ReplicaAverage(name, outer, error_feedback, mesh.shard_mesh_size, across)
            fsdp.set_all_reduce_hook(averages)
            reduced[f"{name}:replicas"] = averages
            with torch.no_grad():
                for parameter in group.fsdp_params:
                    averages.wires[0].broadcast(parameter.sharded_param.to_local())
    return CompressedShards(reduced, error_feedback)


class CompressedShards:
    """The error memories and call counts of the compressed collectives of a model. `compress` returns it.

    A collective's name is its FSDP module's name in the model, followed by `:reduce_scatter` or `:replicas`.
    """

    def __init__(self, collectives: dict[str, _Collective], error_feedback: bool) -> None:
        self._collectives = collectives
        self._error_feedback = error_feedback

    def state_dict(self) -> dict[str, Any]:
        """Returns the error memory and the numbers of calls, for `torch.save` and `torch.load(weights_only=True)`.

        Call it between two steps. The memory differs by rank: save it on each rank, or call `consolidate` on all ranks
        before. `shards` has the numbers of ranks that shared each module.
        """
        each = self._collectives.items()
        return {
            "errors": {name: one.error.clone() for name, one in each if one.error is not None},
            "calls": {name: one.calls for name, one in each},
            "shards": {name: one.shards for name, one in each},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` has returned, before the first backward or between two steps.

        Raises ValueError if the state has error memory and this one has no error feedback, or if it is of a module with
        other FSDP modules or other numbers of shards. If sizes of parameters differ, the next backward raises it.
        """
        if state["errors"] and not self._error_feedback:
            raise ValueError("the state has error memory, which would be lost: pass error_feedback=True")
        shards = {name: one.shards for name, one in self._collectives.items()}
        if state["shards"] != shards:
            raise ValueError(f"the state has the numbers of shards {state['shards']}, the module {shards}")
        for name, one in self._collectives.items():
            error = state["errors"].get(name)
            one.error = None if error is None else error.clone()
            one.calls = state["calls"][name]

    def consolidate(self) -> None:
        """Replaces the error memory of each rank by the mean over all ranks. Collective; call it between two steps.

        The ranks together owe the same as before. Afterwards, the `state_dict` of any rank serves all ranks of a job
        that is resumed with the same number of shards. The memory of averages over replicas is the mean over the
        replicas and still differs by shard: with `replicas=` of sharded modules, save the `state_dict` of each rank of
        one replica.
        """
        for one in self._collectives.values():
            if one.error is not None:
                for wire in one.wires:
                    wire.average(one.error)


class _Collective:
    """One compressed collective of one FSDP module, with what it keeps from step to step."""

    def __init__(
        self, name: str, codec: Codec, error_feedback: bool, shards: int, groups: Sequence[dist.ProcessGroup]
    ) -> None:
        self._name = name
        self._error_feedback = error_feedback
        #: Number of ranks that share the module.
        self.shards = shards
        #: The ranks exchange records on the first group. The error memories of all groups belong to the same result.
        self.exchange = TensorExchange(codec, groups[0])
        self.wires = [Wire(group) for group in groups]
        #: Number of calls so far, from which codecs that draw at random draw.
        self.calls = 0
        #: The error memory: losses of encoding so far, in host memory. None before the first call, and without error
        #: feedback.
        self.error: torch.Tensor | None = None

    def _next(self, given: torch.Tensor) -> dict[str, Any]:
        """Counts a call, and returns its number and the error memory to use with these gradients."""
        if self._error_feedback and self.error is None:
            self.error = torch.zeros(given.numel())
        if self.error is not None and self.error.numel() != given.numel():
            raise ValueError(
                f"module {self._name!r} has error memory of {self.error.numel()} elements and gradients of "
                f"{given.numel()}: error feedback needs gradients of the same parameters in every step"
            )
        self.calls += 1
        return {"call": self.calls - 1, "error": self.error}


class _ReduceScatter(_Collective):
    """The reduce_scatter of one FSDP module, as torch's `ReduceScatter`."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Stores this rank's part of the combined input in the output."""
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise NotImplementedError(
                f"module {self._name!r}: after set_gradient_divide_factor, FSDP multiplies gradients before it adds "
                "them, which a compressed reduce_scatter does not do; also call set_force_sum_reduction_for_comms(True)"
            )
        average = op == dist.ReduceOp.AVG
        self.exchange.reduce_scatter(output_tensor, input_tensor, average=average, **self._next(input_tensor))


class _ReplicaAverage(_Collective):
    """A hook that FSDP calls after its reduce_scatter. Averages one FSDP module's shard over the replicas."""

    def __call__(self, shard: torch.Tensor) -> None:
        self.exchange.all_reduce(shard, **self._next(shard))


def _parameter_groups(module: nn.Module) -> list[tuple[str, Any, Any]]:
    """Returns the FSDP modules that have parameters of their own: name, module and torch's FSDPParamGroup."""
    kind = getattr(torch.distributed.fsdp, "FSDPModule", None)
    if kind is None or not hasattr(kind, "set_custom_reduce_scatter"):
        raise NotImplementedError(
            f"bagua.fsdp needs torch 2.9 or newer, where FSDP2 accepts a reduce_scatter; this is {torch.__version__}"
        )
    found: list[tuple[str, Any, Any]] = []
    modules = [(name, each) for name, each in module.named_modules() if isinstance(each, kind)]
    if not modules:
        raise ValueError(f"{type(module).__name__} has no FSDP module: call fully_shard on it before compress")
    for name, each in modules:
        state: Any = each._get_fsdp_state()
        # Older releases have one group at most, under another name.
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:
            groups = [group for group in [state._fsdp_param_group] if group is not None]
        if len(groups) > 1:
            raise ValueError(
                f"module {name!r} has {len(groups)} parameter groups (shard_placement_fn); one is supported"
            )
        # Modules that went through fully_shard together share their group.
        found += [(name, each, group) for group in groups if all(group is not other for _, _, other in found)]
    return found


def _check(name: str, group: Any, codecs: Sequence[Codec]) -> None:
    """Raises ValueError for a parameter group whose gradients cannot be compressed."""
    mesh = group.mesh_info
    if mesh.replicate_mesh_dim is not None:
        names = mesh.mesh.mesh_dim_names
        replicate = "replicate" if names is None else names[mesh.replicate_mesh_dim]
        shard, made = "shard", ""
        if mesh.shard_mesh_dim is None:
            made = f'a mesh of the dimensions {replicate!r} and "shard", whose second size is 1, and '
        elif names is not None:
            shard = names[mesh.shard_mesh_dim]
        raise ValueError(
            f"torch averages the gradients of module {name!r} over {replicate!r} before Bagua can compress them. "
            f"Write {made}these two lines instead:\n"
            f'    fully_shard(module, mesh=mesh["{shard}"])\n'
            f'    bagua.fsdp.compress(module, codec=None, replicas=mesh["{replicate}"])'
        )
    trained = [each for each in group.fsdp_params if each.sharded_param.requires_grad]
    reduced = {each.mp_policy.reduce_dtype or each.sharded_param.dtype for each in trained}
    for codec in codecs:
        for dtype in reduced:
            try:
                codec.encoded_bytes(1, str(dtype).removeprefix("torch."))
            except TypeError as error:
                raise ValueError(f"gradients of module {name!r}: {error}") from error


def _group_of(replicas: DeviceMesh | dist.ProcessGroup, groups: Sequence[Any]) -> dist.ProcessGroup:
    """Returns the process group of the replicas. Raises ValueError unless it shares only this rank with each mesh."""
    if isinstance(replicas, DeviceMesh):
        if replicas.ndim != 1:
            raise ValueError(f"replicas must be a DeviceMesh with one dimension, not {replicas.ndim}")
        replicas = replicas.get_group()
    ranks = set(dist.get_process_group_ranks(replicas))
    for group in groups:
        shards = set(dist.get_process_group_ranks(group.mesh_info.shard_process_group))
        if ranks & shards != {dist.get_rank()}:
            raise ValueError(
                f"replicas has the ranks {sorted(ranks)} and the module's mesh {sorted(shards)}: this rank, "
                f"{dist.get_rank()}, must be the only one in both"
            )
    return replicas
