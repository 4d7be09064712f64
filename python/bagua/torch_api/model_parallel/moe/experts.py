"""The experts of one rank, and the mark by which expert parameters are recognised."""

from __future__ import annotations

import copy

import torch


def is_moe_param(param: torch.Tensor) -> bool:
    """Returns True if the parameter belongs to an expert. ``with_bagua`` does not communicate such parameters."""
    return bool(getattr(param, "expert", False))


class Experts(torch.nn.Module):
    """The experts of one rank: copies of one module. Copy i on rank r is expert r * num_local_experts + i of the job.

    Input and output have shape [ranks, num_local_experts, capacity, hidden]: tokens by sending rank and expert.
    """

    #: Marks that parameters and buffers below this module belong to this rank alone.
    expert = True

    def __init__(self, expert: torch.nn.Module, num_local_experts: int = 1) -> None:
        super().__init__()
        self.bagua_experts = torch.nn.ModuleList(copy.deepcopy(expert) for _ in range(num_local_experts))
        self.num_local_experts = num_local_experts
        for param in self.bagua_experts.parameters():
            param.expert = True  # type: ignore[attr-defined]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Returns each expert's output for its tokens."""
        outputs = []
        for part, expert in zip(inputs.chunk(self.num_local_experts, dim=1), self.bagua_experts, strict=True):
            output = expert(part)
            # Some modules return more than their output, such as attention weights.
            outputs.append(output[0] if isinstance(output, tuple) else output)
        return torch.cat(outputs, dim=1)
