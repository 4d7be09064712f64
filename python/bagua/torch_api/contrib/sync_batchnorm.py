"""Batch normalisation over the batches of all ranks (Ioffe and Szegedy, arXiv:1502.03167).

Each rank sends its mean and its sum of squared deviations in float64. They are combined by the pairwise formula of
Chan, Golub and LeVeque (1979), which weights unequal batches correctly and avoids cancellation. A forward needs one
small all_gather and a backward one small all_reduce, each of two numbers per channel.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from .. import env
from ..communication import is_initialized, to_bagua_process_group
from ..process_group import Communicator, ProcessGroup

Group = ProcessGroup | dist.ProcessGroup | None


class _Reference:
    """A process group that copies of a module share and that pickles leave out."""

    def __init__(self, group: Group = None) -> None:
        self.group = group

    def __deepcopy__(self, memo: Any) -> _Reference:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _Reference, ()


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation whose mean and variance in training are computed over the batches of all ranks.

    The input has shape [N, C, ...] with ``num_features`` = C and a floating-point dtype, on any device. N may differ
    between ranks and may be 0 on some. The output has the same shape and dtype. Statistics of CUDA tensors pass through
    host memory, which waits for the device. Evaluation does not communicate.

    ``process_group`` holds the ranks to synchronise with, by default all. The gradients of ``weight`` and ``bias`` are
    this rank's own; ``with_bagua`` averages them. Call :meth:`convert_sync_batchnorm` before ``with_bagua``.

    Raises ValueError if the input has fewer than two dimensions, or if all ranks together have fewer than two values
    per channel.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        process_group: Group = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self._reference = _Reference(process_group)

    @property
    def process_group(self) -> Group:
        """The group to synchronise with; None means all ranks."""
        return self._reference.group

    @process_group.setter
    def process_group(self, group: Group) -> None:
        self._reference = _Reference(group)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm needs input of at least 2 dimensions, not {input.dim()}")
        if input.shape[1] != self.num_features:
            raise ValueError(
                f"SyncBatchNorm of {self.num_features} channels got input of shape {list(input.shape)}, with "
                f"{input.shape[1]}"
            )
        if not input.is_floating_point():
            raise TypeError(f"SyncBatchNorm needs floating-point input, not {input.dtype}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns the normalised input."""
        self._check_input_dim(input)
        communicator = self._communicator() if self.training else None
        if communicator is None:
            plain: torch.Tensor = super().forward(input)
            return plain
        output, mean, variance, count = _SyncBatchNorm.apply(input, self.weight, self.bias, self.eps, communicator)
        if self.track_running_stats:
            self._track(mean, variance, count)
        result: torch.Tensor = output
        return result

    def _communicator(self) -> Communicator | None:
        """Returns the communicator to synchronise with; None if this rank is alone."""
        if self.process_group is None and not is_initialized() and env.get_world_size() == 1:
            return None
        group = to_bagua_process_group(self.process_group)
        communicator = group.get_global_communicator()
        if not isinstance(communicator, Communicator):
            raise ValueError(f"this rank is not in {group}, with which its SyncBatchNorm synchronises")
        return communicator if communicator.nranks() > 1 else None

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: float) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        # With momentum=None, the running statistics are the mean over all batches so far.
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        for running, new in ((self.running_mean, mean), (self.running_var, variance * (count / (count - 1)))):
            running.mul_(1 - share).add_(new.to(running.device, running.dtype), alpha=share)

    @classmethod
    def convert_sync_batchnorm(cls, module: torch.nn.Module, process_group: Group = None) -> torch.nn.Module:
        """Replaces every batch normalisation in ``module`` by a SyncBatchNorm, and returns ``module``.

        If ``module`` is a batch normalisation itself, returns its replacement. A layer that occurs several times gets
        one replacement. Parameters and buffers stay the same objects, so existing optimizers keep working. Raises
        ValueError for a lazy layer without a shape.
        """
        return cls._converted(module, process_group, {})

    @classmethod
    def _converted(
        cls, module: torch.nn.Module, process_group: Group, done: dict[torch.nn.Module, torch.nn.Module]
    ) -> torch.nn.Module:
        if module in done:
            return done[module]
        converted = module
        if isinstance(module, _BatchNorm):
            if any(t is not None and is_lazy(t) for t in (module.weight, module.running_mean)):
                raise ValueError("a lazy batch normalisation has no shape yet: run one forward before converting")
            converted = cls._like(module, process_group)
        done[module] = converted
        # named_children would skip the second name of a child.
        for name, child in list(module._modules.items()):
            if child is not None:
                converted.add_module(name, cls._converted(child, process_group, done))
        return converted

    @classmethod
    def _like(cls, module: _BatchNorm, process_group: Group) -> SyncBatchNorm:
        new = cls(
            module.num_features,
            module.eps,
            module.momentum,
            module.affine,
            module.track_running_stats,
            process_group=process_group,
            device=torch.device("meta"),
        )
        new.weight, new.bias = module.weight, module.bias
        new.running_mean, new.running_var = module.running_mean, module.running_var
        new.num_batches_tracked = module.num_batches_tracked
        new.train(module.training)
        return new


def _along_channels(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns a vector over the channels in a shape that broadcasts over ``like``."""
    return values.view(1, -1, *[1] * (like.dim() - 2))


class _SyncBatchNorm(torch.autograd.Function):
    """The normalisation, with the exact gradient through the common statistics."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        communicator: Communicator,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
        wide = input if input.dtype == torch.float64 else input.float()
        mean, variance, count = _common_statistics(wide, communicator)
        mean, variance = mean.to(wide.device), variance.to(wide.device)
        narrow_mean, invstd = mean.to(wide.dtype), (variance + eps).rsqrt().to(wide.dtype)
        output = (wide - _along_channels(narrow_mean, wide)) * _along_channels(invstd, wide)
        if weight is not None:
            output = output * _along_channels(weight.to(wide.dtype), wide)
        if bias is not None:
            output = output + _along_channels(bias.to(wide.dtype), wide)
        ctx.save_for_backward(input, weight, narrow_mean, invstd)
        ctx.communicator, ctx.count = communicator, count
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.mark_non_differentiable(mean, variance)
        return output.to(input.dtype), mean, variance, count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> Any:
        input, weight, mean, invstd = ctx.saved_tensors
        wide = grad.to(mean.dtype)
        normal = (input.to(mean.dtype) - _along_channels(mean, input)) * _along_channels(invstd, input)
        others = [dim for dim in range(input.dim()) if dim != 1]
        sums = torch.stack([wide.sum(others), (wide * normal).sum(others)])
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_input = None
        if needs_input:
            total = sums.to("cpu", torch.float64, copy=True)
            ctx.communicator.allreduce_inplace(total)
            first, second = (total / ctx.count).to(mean.device, mean.dtype)
            slope = invstd if weight is None else invstd * weight.to(mean.dtype)
            grad_input = (
                (wide - _along_channels(first, input) - normal * _along_channels(second, input))
                * _along_channels(slope, input)
            ).to(input.dtype)
        grad_weight = sums[1].to(weight.dtype) if needs_weight else None
        grad_bias = sums[0].to(ctx.bias_dtype) if needs_bias else None
        return grad_input, grad_weight, grad_bias, None, None


def _common_statistics(input: torch.Tensor, communicator: Communicator) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Returns mean and biased variance per channel over all ranks (float64, CPU), and the values per channel."""
    channels = input.shape[1]
    mine = torch.zeros(2 * channels + 1, dtype=torch.float64)
    count = input.numel() // channels if channels else 0
    if count:
        variance, mean = torch.var_mean(input, [dim for dim in range(input.dim()) if dim != 1], correction=0)
        local = torch.stack([mean, variance]).to("cpu", torch.float64)
        mine[:channels] = local[0]
        mine[channels:-1] = local[1] * count
    mine[-1] = count
    everybody = torch.empty(communicator.nranks() * mine.numel(), dtype=torch.float64)
    communicator.allgather(mine, everybody)
    rows = everybody.view(communicator.nranks(), -1)
    means, deviations, counts = rows[:, :channels], rows[:, channels:-1], rows[:, -1:]
    total = float(counts.sum())
    if total < 2:
        raise ValueError(
            f"SyncBatchNorm needs more than 1 value per channel in training, and all {communicator.nranks()} ranks "
            f"together have {int(total)}"
        )
    mean = (means * counts).sum(0) / total
    squares = deviations.sum(0) + ((means - mean).square() * counts).sum(0)
    return mean, squares / total, total
