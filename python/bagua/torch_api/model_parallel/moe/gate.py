"""Top-1 and top-2 gates, which choose the experts of each token.

Top-2 with capacity and load-balancing loss follows GShard (Lepikhin et al., arXiv:2006.16668), top-1 the Switch
Transformer (Fedus et al., arXiv:2101.03961). The formulas are those of the original Bagua. The original stores choices
as one-hot tensors of tokens x experts x capacity; here a choice is a number, the slot that the token takes in the
expert's capacity.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

NOISE = (None, "None", "Jitter", "RSample")

_JITTER = 0.01


@dataclass(frozen=True)
class Routing:
    """The choices of a gate for S tokens, with k choices per token."""

    #: Load-balancing loss: a scalar with a graph.
    l_aux: torch.Tensor
    #: int64 [k, S]: the expert of each choice.
    experts: torch.Tensor
    #: int64 [k, S]: slot of the token among the expert's tokens; -1 if the choice was dropped.
    places: torch.Tensor
    #: float32 [k, S]: weight of the expert's output in the token's output; 0 if the choice was dropped.
    weights: torch.Tensor
    #: int64 [experts]: number of tokens that chose each expert first, before any were dropped.
    exp_counts: torch.Tensor
    #: Number of tokens that each expert accepts from this rank.
    capacity: int


def capacity_of(tokens: int, experts: int, factor: float, least: int = 0) -> int:
    """Returns the number of tokens that an expert accepts."""
    return max(math.ceil(tokens / experts * factor), least)


def _gumbel(logits: torch.Tensor) -> torch.Tensor:
    tiny = torch.finfo(logits.dtype).tiny
    exponential = -torch.log(torch.rand_like(logits).clamp_min(tiny))
    return -torch.log(exponential.clamp_min(tiny))


def top1(
    logits: torch.Tensor,
    capacity: int,
    used_token: torch.Tensor | None = None,
    *,
    noise: bool = False,
    random_priority: bool = True,
) -> Routing:
    """Assigns each token to one expert.

    - ``logits``: float32 [S, E].
    - ``capacity``: Number of tokens that each expert accepts.
    - ``used_token``: [S], 0 for a token that no expert shall get.
    - ``noise``: Adds Gumbel noise to the logits before choosing.
    - ``random_priority``: True drops random tokens of a full expert; False drops the last ones.
    """
    tokens, experts = logits.shape
    gates = torch.softmax(logits, dim=1)
    choice = (logits + _gumbel(logits) if noise else gates).argmax(1)
    mask = F.one_hot(choice, experts)
    if used_token is not None:
        mask = mask * (used_token.reshape(-1, 1) != 0)
    l_aux = (gates.mean(0) * mask.to(gates.dtype).mean(0)).sum() * experts
    kept = mask
    if random_priority and capacity < tokens:
        priority = mask * torch.rand_like(gates)
        chosen = torch.zeros_like(mask).scatter(0, priority.topk(capacity, dim=0).indices, 1)
        kept = mask * chosen
    places = ((kept.cumsum(0) - 1) * kept).sum(1)
    here = kept.sum(1).bool() & (places < capacity)
    return Routing(
        l_aux,
        choice.unsqueeze(0),
        torch.where(here, places, -1).unsqueeze(0),
        (gates.gather(1, choice.unsqueeze(1)).squeeze(1) * here).unsqueeze(0),
        mask.sum(0),
        capacity,
    )


def top2(logits: torch.Tensor, capacity: int, *, noise: bool = True) -> Routing:
    """Assigns each token to two experts, weighted by the gates of those that accept it.

    - ``logits``: float32 [S, E].
    - ``capacity``: Number of tokens that each expert accepts. All first choices come before all second choices.
    - ``noise``: Adds Gumbel noise to the logits before choosing the second expert.
    """
    experts = logits.shape[1]
    gates = torch.softmax(logits, dim=1)
    first = gates.argmax(1)
    mask1 = F.one_hot(first, experts)
    others = (logits + _gumbel(logits) if noise else logits).masked_fill(mask1.bool(), -math.inf)
    second = others.argmax(1)
    mask2 = F.one_hot(second, experts)
    l_aux = (gates.mean(0) * mask1.to(gates.dtype).mean(0)).mean() * experts * experts
    choices = torch.stack([first, second])
    places = torch.stack(
        [((mask1.cumsum(0) - 1) * mask1).sum(1), ((mask2.cumsum(0) - 1 + mask1.sum(0)) * mask2).sum(1)]
    )
    here = places < capacity
    weights = gates.gather(1, choices.t()).t() * here
    weights = weights / weights.sum(0).clamp_min(torch.finfo(weights.dtype).eps)
    return Routing(l_aux, choices, torch.where(here, places, -1), weights, mask1.sum(0), capacity)


class TopKGate(torch.nn.Module):
    """A linear gate in float32 without bias, which chooses k = 1 or 2 experts per token.

    ``noisy_gate_policy`` adds randomness in training: ``"Jitter"`` multiplies the gate's input by U(0.99, 1.01),
    ``"RSample"`` adds Gumbel noise to the logits for k=1. Evaluation draws no random numbers. Raises ValueError for an
    unusable argument.
    """

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        noisy_gate_policy: str | None = None,
    ) -> None:
        super().__init__()
        if k not in (1, 2):
            raise ValueError(f"k must be 1 or 2, not {k}")
        if k > num_experts:
            raise ValueError(f"k={k} needs at least {k} experts, not {num_experts}")
        if noisy_gate_policy not in NOISE:
            raise ValueError(f"noisy_gate_policy must be one of {NOISE}, not {noisy_gate_policy!r}")
        self.wg = torch.nn.Linear(model_dim, num_experts, bias=False).float()
        self.k = k
        self.capacity_factor = capacity_factor
        self.eval_capacity_factor = eval_capacity_factor
        self.min_capacity = min_capacity
        self.noisy_gate_policy = noisy_gate_policy

    def forward(self, tokens: torch.Tensor, used_token: torch.Tensor | None = None) -> Routing:
        """Returns the routing of ``tokens`` [S, model_dim]. ``used_token`` is [S] or None, for k=1 only."""
        count, experts = len(tokens), self.wg.out_features
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        with torch.autocast(tokens.device.type, enabled=False):
            wide = tokens.float()
            if self.noisy_gate_policy == "Jitter" and self.training:
                wide = wide * torch.empty_like(wide).uniform_(1 - _JITTER, 1 + _JITTER)
            logits = F.linear(wide, self.wg.weight.float())
        if self.k == 1:
            return top1(
                logits,
                capacity_of(count, experts, factor, self.min_capacity),
                used_token,
                noise=self.noisy_gate_policy == "RSample" and self.training,
                random_priority=self.training,
            )
        if used_token is not None:
            raise ValueError("used_token works with k=1 only; leave it out for k=2")
        # As in the original, a minimum capacity applies to k=1 only.
        return top2(logits, capacity_of(2 * count, experts, factor), noise=self.training)
