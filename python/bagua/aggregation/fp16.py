"""Mixed precision: a half-precision model, a float32 copy that is optimised, and a loss scale that adapts itself.

Micikevicius et al., "Mixed Precision Training", ICLR 2018.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_

from .aggregation import Denominator
from .backends import Group
from .centralized import AVG_CUSTOM, AVG_WORLD, AllReduceAggregation, AllReduceAggregationHVD


class DynamicLossScaler:
    """A loss scale that keeps small gradients above half precision's smallest number.

    An overflow divides ``loss_scale`` by ``scale_factor``. After ``scale_window`` steps without an overflow it is
    multiplied, up to ``max_scale``.
    """

    def __init__(
        self,
        init_scale: float = 2.0**15,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        max_scale: float | None = None,
    ) -> None:
        self.loss_scale = float(init_scale)
        self.scale_factor = scale_factor
        self.scale_window = scale_window
        self.max_scale = max_scale
        # Number of steps since the last overflow.
        self._good = 0

    def update_scale(self, overflow: bool) -> None:
        """Adapts the scale after a step. ``overflow``: True if the step's gradient overflowed."""
        if overflow:
            self.loss_scale /= self.scale_factor
            self._good = 0
            return
        self._good += 1
        if self._good % self.scale_window == 0:
            grown = self.loss_scale * self.scale_factor
            self.loss_scale = grown if self.max_scale is None else min(grown, self.max_scale)


class FP16Optimizer:
    """Runs any optimizer on a float32 copy of a half-precision model, with gradients averaged over all ranks.

    Make the optimizer over ``[fp32_params]``, one flat float32 parameter that replaces all parameters of the model that
    require gradients. Pass it to :meth:`set_optimizer`, which stores it in ``optimizer``.

    Call :meth:`backward_loss` on the loss, which scales it. If the gradient overflows on any rank, all ranks skip the
    step, because infinity survives the average. ``grad_clip`` is the largest L2 norm of the averaged, unscaled
    gradient. Raises NotImplementedError unless ``average_world`` or ``average_custom`` is chosen.
    """

    def __init__(
        self,
        fp16_model: torch.nn.Module,
        world_size: int,
        use_cuda: bool = False,
        use_horovod: bool = False,
        by_layer: bool = False,
        grad_clip: float = math.inf,
        init_scale: float = 1024,
        scale_factor: float = 2,
        scale_window: int = 128,
        max_scale: float | None = None,
        min_scale: float = 1e-4,
        average_world: bool = False,
        average_custom: bool = False,
        divide_before: bool = False,
        *,
        group: Group = None,
    ) -> None:
        if not average_world and not average_custom:
            raise NotImplementedError("choose average_world or average_custom")
        self.fp16_model = fp16_model
        self.grad_clip = grad_clip
        self.min_scale = min_scale
        self.loss_scaler = DynamicLossScaler(init_scale, scale_factor, scale_window, max_scale)
        self.optimizer: torch.optim.Optimizer | None = None
        self.agg_mode = AVG_WORLD if average_world else AVG_CUSTOM
        kind = AllReduceAggregationHVD if use_horovod else AllReduceAggregation
        self.agg = kind(world_size, divide_before, use_cuda, group=group).agg_grad(by_layer)
        self.fp32_params = torch.nn.Parameter(
            torch.cat([parameter.detach().float().reshape(-1) for parameter in self._trained()])
        )

    def _trained(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self.fp16_model.parameters() if parameter.requires_grad]

    def set_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Sets the optimizer of ``fp32_params``. Raises ValueError if it optimises anything else."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if len(parameters) != 1 or parameters[0] is not self.fp32_params:
            raise ValueError("the optimizer must be made over [fp32_params]")
        self.optimizer = optimizer

    def backward_loss(self, loss: torch.Tensor) -> None:
        """Computes gradients of the loss times the loss scale."""
        (loss * self.loss_scaler.loss_scale).backward()  # type: ignore[no-untyped-call]

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        tracker: Any = None,
        multiplier: float = 1,
        denom: Denominator = None,
    ) -> bool:
        """Runs one step. Returns True if weights were updated, False if the gradient overflowed and the scale was
        lowered.

        ``closure`` computes gradients through :meth:`backward_loss`. Gradients are divided by the loss scale times
        ``multiplier``. ``denom`` is the denominator of ``average_custom``. Raises FloatingPointError if the scale falls
        to ``min_scale``, because then the scale is not the cause of the overflow.
        """
        if self.optimizer is None:
            raise ValueError("the optimizer has not been set: call set_optimizer()")
        if closure is not None:
            with torch.enable_grad():
                closure()
        self.agg(self.fp16_model, self.agg_mode, denom)
        if tracker:
            tracker.record_batch_agg()
        trained = self._trained()
        gradients = [
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach() for parameter in trained
        ]
        flat = torch.cat([gradient.float().reshape(-1) for gradient in gradients])
        self.fp32_params.grad = flat / (self.loss_scaler.loss_scale * multiplier)
        norm = clip_grad_norm_([self.fp32_params], self.grad_clip)
        overflow = not bool(norm.isfinite())
        self.loss_scaler.update_scale(overflow)
        if overflow:
            if self.loss_scaler.loss_scale <= self.min_scale:
                raise FloatingPointError(
                    f"gradients overflow even with loss scale {self.loss_scaler.loss_scale}: check for infinity and NaN"
                )
            return False
        self.optimizer.step()
        with torch.no_grad():
            pieces = torch.split(self.fp32_params.detach(), [parameter.numel() for parameter in trained])
            for parameter, piece in zip(trained, pieces, strict=True):
                parameter.copy_(piece.view(parameter.shape))
        if tracker:
            tracker.record_batch_opt_step()
        return True

    def zero_grad(self) -> None:
        """Clears the gradients of the model and of ``fp32_params``."""
        self.fp16_model.zero_grad()
        self.fp32_params.grad = None
