"""Checks that an optimizer can be fused: the update of an element may depend on that element's values alone.

An update that uses a whole parameter, such as the trust ratio of LARS (arXiv:1708.03888) and LAMB (arXiv:1904.00962),
would silently compute something else on a concatenation of parameters. Torch's own optimizers are known by name. Any
other optimizer is tried on a few small parameters, separately and concatenated.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch
from torch import optim

# Only these exact types: a subclass may change the update.
_KNOWN: frozenset[type] = frozenset(
    {
        optim.ASGD,
        optim.Adadelta,
        optim.Adagrad,
        optim.Adam,
        optim.AdamW,
        optim.Adamax,
        optim.NAdam,
        optim.RAdam,
        optim.RMSprop,
        optim.Rprop,
        optim.SGD,
    }
)

# By name, because some versions of torch lack some of these classes.
_WHY_NOT = {
    "Adafactor": "it factors the second moment of a matrix into rows and columns, and scales by a parameter's norm",
    "LBFGS": "its direction and step length are computed from all parameters at once",
    "Muon": "it orthogonalises the momentum of whole matrices",
    "SparseAdam": "it is for sparse gradients, whose absent rows a fused update would step too",
}

_SIZES = (3, 5)
_SCALES = (1.0, 100.0)
_STEPS = 3


def require_elementwise(optimizer: optim.Optimizer) -> None:
    """Raises ValueError, with the reason, if a fused update would differ from the optimizer's own update."""
    kind = type(optimizer)
    if kind.__module__.startswith("torch.optim") and kind.__name__ in _WHY_NOT:
        raise ValueError(f"{kind.__name__} cannot be fused: {_WHY_NOT[kind.__name__]}")
    if reason := getattr(kind, "cannot_be_fused", None):
        raise ValueError(f"{kind.__name__} cannot be fused: {reason}")
    for number, group in enumerate(optimizer.param_groups):
        if group.get("differentiable"):
            raise ValueError(
                f"{kind.__name__} cannot be fused: differentiable=True in group {number} keeps a graph of each "
                "parameter's update, and a fused update works on their memory"
            )
    if kind not in _KNOWN:
        for group in optimizer.param_groups:
            _try(optimizer, group)


def twin(optimizer: optim.Optimizer) -> optim.Optimizer:
    """Returns an optimizer of the same type and attributes, without parameters, state or hooks."""
    other: optim.Optimizer = object.__new__(type(optimizer))
    # A learning-rate scheduler patches ``step`` on the instance. The patched method is bound to the original optimizer.
    other.__dict__.update({name: value for name, value in vars(optimizer).items() if name not in ("step", "fuse_step")})
    for name, value in vars(optimizer).items():
        if "_hooks" in name and isinstance(value, dict):
            other.__dict__[name] = type(value)()
    other.param_groups = []
    other.state = defaultdict(dict)
    return other


def plain_step(optimizer: optim.Optimizer) -> Any:
    """Returns ``optimizer.step`` without the hooks around it. The original optimizer runs the hooks once."""
    step = type(optimizer).step
    inner = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
    return inner.__get__(optimizer)


def _try(optimizer: optim.Optimizer, group: dict[str, Any]) -> None:
    kind = type(optimizer).__name__
    tried = f"{kind} cannot be fused: tried on small parameters, "
    devices = list({param.device for param in group["params"]}) or [torch.device("cpu")]
    cuda = [device for device in devices if device.type == "cuda"]
    generator = torch.Generator().manual_seed(0)
    start = [scale * torch.randn(size, generator=generator) for size, scale in zip(_SIZES, _SCALES, strict=True)]
    grads = [
        [torch.randn(size, generator=generator) / scale for size, scale in zip(_SIZES, _SCALES, strict=True)]
        for _ in range(_STEPS)
    ]
    try:
        with torch.random.fork_rng(cuda):
            apart = _run_updates(optimizer, group, start, grads, devices[0])
            whole = _run_updates(
                optimizer, group, [torch.cat(start)], [[torch.cat(grad)] for grad in grads], devices[0]
            )
    except Exception as failure:
        raise ValueError(f"{tried}its step raised {type(failure).__name__}: {failure}") from failure
    if not torch.equal(torch.cat(apart), whole[0]):
        raise ValueError(
            f"{tried}a step of their concatenation differs from the steps of each: it uses a norm (LARS, LAMB) or "
            "another property of whole parameters, or random numbers"
        )


def _run_updates(
    optimizer: optim.Optimizer,
    group: dict[str, Any],
    start: list[torch.Tensor],
    grads: list[list[torch.Tensor]],
    device: torch.device,
) -> list[torch.Tensor]:
    params = [torch.nn.Parameter(values.to(device, copy=True)) for values in start]
    trial = twin(optimizer)
    for name, value in vars(trial).items():
        if name not in ("param_groups", "state"):
            trial.__dict__[name] = copy.deepcopy(value)
    options = {key: copy.deepcopy(value) for key, value in group.items() if key not in ("params", "param_names")}
    trial.param_groups = [{**options, "params": params}]
    step = plain_step(trial)
    for grad in grads:
        for param, values in zip(params, grad, strict=True):
            param.grad = values.to(device, copy=True)
        step()
    return [param.detach().cpu() for param in params]
