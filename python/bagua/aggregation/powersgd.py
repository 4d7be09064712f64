"""Low-rank aggregation with error feedback: PowerSGD.

Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", NeurIPS
2019, algorithms 1 and 2. For a gradient of n x m elements, seen as a matrix M, r (n + m) elements are sent. Each step
is one step of subspace iteration:

1. P = orthonormal(mean(M Q)) 2. Q = mean(M^T P) 3. The result is P Q^T.

Two changes to the paper make a step exact whenever the mean has rank r or less. Q is made orthonormal before it is
used, which does not change its span and keeps small singular directions above rounding. And a reused Q whose columns
have become dependent (after zero gradients, or gradients of lower rank) is replaced by a random one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch

from bagua.linalg import is_finite, orthonormal, wide

from .aggregation import Denominator
from .backends import Group, Peers, find
from .error_feedback import CompressingAggregation, Gradients
from .tensor_packing import flatten

_OPS = ("avg_world", "avg")


def orthogonalize(matrix: torch.Tensor, eps: torch.Tensor | float = 1e-16) -> None:
    """Makes the columns of a matrix orthonormal, in place.

    Uses modified Gram-Schmidt, twice per column, because one pass leaves nearly dependent columns visibly not
    orthogonal (Giraud, Langou and Rozloznik, 2005). A column that depends on earlier ones becomes zero, and so do
    columns beyond the number of rows. ``eps`` is added to the norms.
    """
    small = float(eps)
    with torch.no_grad():
        for index in range(matrix.shape[1]):
            column, before = matrix[:, index], matrix[:, :index]
            length = torch.linalg.vector_norm(column)
            for _ in range(2):
                for other in before.unbind(1):
                    column -= torch.dot(other, column) * other
            rest = torch.linalg.vector_norm(column)
            # The rest of a dependent column is rounding error, which must not become a direction.
            rounding = max(matrix.shape) * torch.finfo(matrix.dtype).eps
            if rest <= rounding * length:
                column.zero_()
            else:
                column /= rest + small


class PowerAggregation(CompressingAggregation):
    """Aggregates gradients by an approximation of rank ``rank``, found by one power iteration.

    Tensors with at most one dimension are sent uncompressed. Computes in float32, or in float64 for float64 parameters.
    ``world_size`` is the group's size; 1, the default, accepts any size. With ``reuse_query``, each step starts from
    the last step's Q instead of a random one ("warm start"). ``seed`` is the seed for random Q, which are the same on
    all ranks and do not use other random number generators.

    ``memory="aggregated"`` remembers the difference between this rank's gradient and the result. ``memory="local"``
    remembers the part of its own gradient outside the common subspace, as in the paper; it is zero at full rank and
    does not grow with the ranks' disagreement. ``error_feedback=False`` remembers nothing.

    ``op`` of the closure is ``"avg"`` or ``"avg_world"``. A step with tensors of a single dtype takes three
    collectives. They send r (n + m) elements for each matrix, all elements of the other tensors, and one element per
    parameter that says whether there is a gradient.

    ``bases`` and ``queries`` hold the last P and Q of each parameter, ``None`` for those sent uncompressed.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        use_cuda: bool = False,
        reuse_query: bool = False,
        world_size: int = 1,
        rank: int = 1,
        *,
        memory: Literal["aggregated", "local"] = "aggregated",
        error_feedback: bool = True,
        seed: int = 1,
        group: Group = None,
    ) -> None:
        super().__init__(model, use_cuda, group=group)
        if rank < 1:
            raise ValueError(f"rank is {rank}; it must be at least 1")
        if world_size < 1:
            raise ValueError(f"world_size is {world_size}; it must be at least 1")
        if memory not in ("aggregated", "local"):
            raise ValueError(f"memory must be 'aggregated' or 'local'; got {memory!r}")
        self.reuse_query = reuse_query
        self.world_size = world_size
        self.rank = rank
        self.memory = memory
        self.error_feedback = error_feedback
        self.seed = seed
        self.bases: list[torch.Tensor | None] = [None] * len(self.parameters)
        self.queries: list[torch.Tensor | None] = [None] * len(self.parameters)
        # Number of steps that drew at least one Q, which is the position in the sequence of seeds.
        self._draws = 0
        self._seeds = np.random.RandomState(seed)

    @property
    def ranks(self) -> int:
        """Number of ranks that take part."""
        return self._peers().size

    def _peers(self) -> Peers:
        return find(self.group, None if self.world_size == 1 else self.world_size)

    def _check(self, op: str, denom: Denominator) -> None:
        if op not in _OPS:
            raise NotImplementedError(f"op must be one of {', '.join(_OPS)}; got {op!r}")
        self._peers()

    def _is_matrix(self, index: int) -> bool:
        parameter = self.parameters[index]
        return parameter.dim() > 1 and parameter.numel() > 0

    def _begin_step(self, gradients: Gradients) -> None:
        """Draws a Q for every matrix that needs one. All ranks draw the same, because they draw in the same order."""
        matrices = [index for index in range(len(self.parameters)) if self._is_matrix(index)]
        cold = [index for index in matrices if not self.reuse_query or _degenerate(self.queries[index])]
        if not cold:
            return
        generator = torch.Generator().manual_seed(int(self._seeds.randint(1_000_000_000)))
        self._draws += 1
        for index in cold:
            parameter = self.parameters[index]
            n, m = parameter.shape[0], parameter[0].numel()
            drawn = torch.randn(m, min(n, m, self.rank), generator=generator)
            self.queries[index] = drawn.to(parameter.device, wide(parameter.dtype))

    def _combine(self, chosen: Sequence[int], gradients: Gradients, op: str, denom: Denominator) -> None:
        assert isinstance(gradients, list)
        peers = self._peers()
        for kind in (torch.float32, torch.float64):
            matrices = [i for i in chosen if self._is_matrix(i) and wide(self.parameters[i].dtype) is kind]
            if matrices:
                self._combine_matrices(peers, matrices, gradients)
        vectors: dict[torch.dtype, list[int]] = {}
        for index in chosen:
            if not self._is_matrix(index):
                vectors.setdefault(self.parameters[index].dtype, []).append(index)
        for indices in vectors.values():
            values = [
                torch.zeros_like(self.parameters[index]) if gradients[index] is None else gradients[index]
                for index in indices
            ]
            means, anywhere = self._reduce(peers, values, [gradients[index] is not None for index in indices], "mean")
            for index, mean, has_value in zip(indices, means, anywhere, strict=True):
                if has_value:
                    gradients[index] = mean

    def _combine_matrices(self, peers: Peers, matrices: Sequence[int], gradients: list[torch.Tensor | None]) -> None:
        sums = {i: self._with_memory(i, gradients[i]).reshape(self.parameters[i].shape[0], -1) for i in matrices}
        present = [gradients[i] is not None for i in matrices]
        products = [sums[i] @ _orthonormal(self.queries[i]) for i in matrices]
        # The scale of P does not matter, so a sum suffices.
        products, anywhere = self._reduce(peers, products, present, "sum")
        live = [i for i, has_value in zip(matrices, anywhere, strict=True) if has_value]
        for i, product in zip(matrices, products, strict=True):
            if i in live:
                self.bases[i] = _orthonormal(product)
        if not live:
            return
        means, _ = self._reduce(peers, [sums[i].T @ self._basis(i) for i in live], None, "mean")
        for i, query in zip(live, means, strict=True):
            parameter, basis, whole = self.parameters[i], self._basis(i), sums[i]
            exact = basis @ query.T
            result = exact.to(parameter.dtype)
            gradients[i] = result.view(parameter.shape)
            if not is_finite(exact):
                # All ranks see an overflow and skip the step. Memory and warm start must not be lost in it.
                self.queries[i] = None
                continue
            self.queries[i] = query
            if self.error_feedback:
                left = whole - result if self.memory == "aggregated" else whole - basis @ (basis.T @ whole)
                if self.memory == "local":
                    # Keep the rounding error of half precision, too.
                    left += exact - result
                self.memories[i].copy_(left.view(parameter.shape))

    def _basis(self, index: int) -> torch.Tensor:
        basis = self.bases[index]
        assert basis is not None
        return basis

    def _reduce(
        self,
        peers: Peers,
        tensors: Sequence[torch.Tensor],
        present: Sequence[bool] | None,
        op: Literal["sum", "mean"],
    ) -> tuple[list[torch.Tensor], list[bool]]:
        """All-reduces tensors of one dtype together. Also returns, for each, True if at least one rank has it."""
        marks = torch.tensor([float(mark) for mark in present or []], dtype=tensors[0].dtype)
        flat = flatten([*tensors, marks], peers.place(tensors[0].device, self.use_cuda))
        peers.all_reduce(flat, op)
        results, offset = [], 0
        for tensor in tensors:
            piece = flat[offset : offset + tensor.numel()].view(tensor.shape)
            results.append(piece.to(tensor.device))
            offset += tensor.numel()
        return results, (flat[offset:] != 0).tolist() if present is not None else [True] * len(tensors)

    def state_dict(self) -> dict[str, Any]:
        """Returns the memories, the queries and the number of draws."""
        queries = [None if query is None else query.clone() for query in self.queries]
        return super().state_dict() | {"queries": queries, "draws": self._draws, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state that :meth:`state_dict` returned on this rank."""
        super().load_state_dict(state)
        self.queries = [
            None if query is None else query.to(memory.device, copy=True)
            for query, memory in zip(state["queries"], self.memories, strict=True)
        ]
        self.seed, self._draws = state["seed"], state["draws"]
        self._seeds = np.random.RandomState(self.seed)
        for _ in range(self._draws):
            self._seeds.randint(1_000_000_000)


def _orthonormal(matrix: torch.Tensor | None) -> torch.Tensor:
    """Does what `orthonormal` does, but returns all NaN if an element is not finite."""
    assert matrix is not None
    basis = orthonormal(matrix)
    return torch.full_like(matrix, math.nan) if basis is None else basis


def _degenerate(query: torch.Tensor | None) -> bool:
    """Returns True if the columns are dependent up to rounding, or if there is no query yet."""
    if query is None:
        return True
    sizes = torch.linalg.svdvals(query)
    rounding = 10 * max(query.shape) * torch.finfo(query.dtype).eps
    return bool(sizes[-1] <= rounding * sizes[0])
