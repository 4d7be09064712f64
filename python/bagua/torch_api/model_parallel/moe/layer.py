"""A mixture-of-experts layer, which sends tokens to the ranks of their experts and the results back.

Expert parallelism after GShard (Lepikhin et al., arXiv:2006.16668): one all_to_all to the experts and one back.
Gradients take the same way.
"""

from __future__ import annotations

from typing import Any

import torch

from ... import env
from ...communication import _get_default_group, is_initialized
from ...model_engine.engine import owner_of
from ...process_group import Communicator, ReduceOp
from .experts import Experts
from .gate import Routing, TopKGate


class _AllToAll(torch.autograd.Function):
    """Sends chunk r along the first dimension to rank r. The backward sends the gradients back."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, communicator: Communicator) -> torch.Tensor:
        ctx.communicator = communicator
        output = torch.empty_like(input, memory_format=torch.contiguous_format)
        communicator.alltoall(input, output)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        back = torch.empty_like(grad, memory_format=torch.contiguous_format)
        ctx.communicator.alltoall(grad, back)
        return back, None


class _ScaleGradient(torch.autograd.Function):
    """The identity, whose backward multiplies the gradient by a factor."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return input.view_as(input)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.factor, None


def _communicator() -> Communicator | None:
    """Returns the communicator of all ranks; None if there is only one rank."""
    if not is_initialized() and env.get_world_size() == 1:
        return None
    found = _get_default_group().get_global_communicator()
    assert isinstance(found, Communicator)
    return found if found.nranks() > 1 else None


class MOELayer(torch.nn.Module):
    """The gate, this rank's experts, and the all_to_all between the tokens and the experts of all ranks."""

    def __init__(self, gate: TopKGate, experts: Experts) -> None:
        super().__init__()
        self.gate = gate
        self.experts = experts

    def forward(
        self, hidden: torch.Tensor, used_token: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the output (like the input), the load-balancing loss, and the number of tokens per expert."""
        communicator = _communicator()
        ranks = 1 if communicator is None else communicator.nranks()
        experts = self.gate.wg.out_features
        if experts != ranks * self.experts.num_local_experts:
            raise ValueError(
                f"this layer was built for {experts} experts, but {ranks} rank(s) with "
                f"{self.experts.num_local_experts} each have {ranks * self.experts.num_local_experts}: "
                "call init_process_group before constructing MoE"
            )
        tokens = hidden.reshape(-1, hidden.shape[-1])
        routing: Routing = self.gate(tokens, used_token)
        room = _largest(routing.capacity, communicator)
        # Slot of each choice in the memory of all experts. Dropped choices have no slot.
        slots = torch.where(routing.places < 0, 0, routing.experts * room + routing.places)
        kept = routing.places >= 0
        choices = torch.arange(len(tokens), device=tokens.device).expand_as(slots)
        sent = tokens.new_zeros(experts * room, tokens.shape[1]).index_copy(0, slots[kept], tokens[choices[kept]])
        answers = self._ask(sent.view(ranks, -1, room, tokens.shape[1]), communicator)
        answers = answers.reshape(experts * room, -1)
        # A dropped choice reads slot 0, which may hold NaN: an expert's output for an empty slot.
        parts = torch.where(kept.unsqueeze(-1), answers[slots], 0.0)
        output = (parts * routing.weights.unsqueeze(-1).to(parts.dtype)).sum(0)
        return output.view(*hidden.shape[:-1], -1).to(hidden.dtype), routing.l_aux, routing.exp_counts

    def _ask(self, sent: torch.Tensor, communicator: Communicator | None) -> torch.Tensor:
        """Sends [ranks, local experts, room, hidden] to the experts, and returns their output in the same order."""
        if communicator is None:
            answers: torch.Tensor = self.experts(sent)
            return answers
        received: torch.Tensor = _AllToAll.apply(sent, communicator)
        divisor = communicator.nranks() if self._averaged() else 1
        if divisor != 1:
            # An expert's gradient is the sum over the tokens of all ranks. If all other gradients are averages, it is
            # divided by the number of ranks too. The tokens' own gradient is not divided.
            received = _ScaleGradient.apply(received, float(divisor))
        answered = self.experts(received)
        if divisor != 1:
            answered = _ScaleGradient.apply(answered, 1.0 / divisor)
        returned: torch.Tensor = _AllToAll.apply(answered, communicator)
        return returned

    def _averaged(self) -> bool:
        owner = next((found for p in self.gate.parameters() if (found := owner_of(p)) is not None), None)
        return owner is not None and getattr(owner.bagua_algorithm, "average", True)


def _largest(capacity: int, communicator: Communicator | None) -> int:
    """Returns the largest capacity of all ranks, so that all ranks send the same number of slots."""
    if communicator is None:
        return capacity
    largest = torch.tensor([capacity], dtype=torch.int64)
    communicator.allreduce_inplace(largest, ReduceOp.MAX)
    return int(largest.item())


class MoE(torch.nn.Module):
    """A mixture of experts with ``num_local_experts`` copies of ``expert`` on each rank.

    - ``hidden_size``: Size of the last dimension of the input. ``expert`` must keep it.
    - ``expert``: The module to copy. All experts of a rank start equal.
    - ``num_local_experts``: Number of experts on each rank.
    - ``k``, ``capacity_factor``, ``eval_capacity_factor``, ``min_capacity``, ``noisy_gate_policy``: Options of the
      gate, see :class:`TopKGate`. An expert accepts ``ceil(k * tokens / experts * capacity_factor)`` tokens of each
      rank, for k=1 at least ``min_capacity``. Further tokens are dropped, and their output is 0.
    - ``output_dropout_prob``: Dropout probability of the output.

    Parameters of experts carry ``expert = True``, so that ``with_bagua`` neither broadcasts nor averages them. Their
    gradients are those of the sum of all ranks' losses, or of the mean if ``with_bagua`` averages gradients.
    """

    def __init__(
        self,
        hidden_size: int,
        expert: torch.nn.Module,
        num_local_experts: int = 1,
        k: int = 1,
        output_dropout_prob: float = 0.0,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        noisy_gate_policy: str | None = None,
    ) -> None:
        super().__init__()
        if num_local_experts < 1:
            raise ValueError(f"num_local_experts must be at least 1, not {num_local_experts}")
        communicator = _communicator()
        self.num_experts = num_local_experts * (1 if communicator is None else communicator.nranks())
        gate = TopKGate(
            hidden_size, self.num_experts, k, capacity_factor, eval_capacity_factor, min_capacity, noisy_gate_policy
        )
        self.bagua_moe = MOELayer(gate, Experts(expert, num_local_experts))
        self.dropout = torch.nn.Dropout(output_dropout_prob)

    def forward(
        self, hidden_states: torch.Tensor, used_token: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Applies gate and experts to ``hidden_states`` [..., hidden_size].

        ``used_token`` has one entry per token, 0 for tokens to leave out. Returns the output in the input's shape, the
        load-balancing loss (add a small multiple of it to the loss), and int64 [experts]: the number of this rank's
        tokens that chose each expert first.
        """
        output, l_aux, exp_counts = self.bagua_moe(hidden_states, used_token)
        return self.dropout(output), l_aux, exp_counts


def has_moe_layers(module: torch.nn.Module) -> bool:
    """Returns True if the module contains a mixture-of-experts layer."""
    return any(isinstance(child, MOELayer) for child in module.modules())
