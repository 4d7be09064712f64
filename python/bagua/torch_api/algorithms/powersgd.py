"""PowerSGD: the ranks average low-rank approximations of their gradients.

Source: Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
NeurIPS 2019, arXiv:1905.13727. A gradient is an n x m matrix g. Each rank adds e, what its earlier rounds lost of it: M
= g + e. One round is::

    P  = orthonormal columns of (sum over ranks of M Q)      n x r, one all_reduce for all parameters
    Q' = mean over ranks of M^T P                            m x r, one all_reduce for all parameters
    g  = P Q'^T                                              the same on all ranks
    e  = M - P P^T M                                         each rank's own

Q' becomes Q of the next round. P comes from a QR decomposition, which returns r columns even if the rank of M Q is
lower. For the extra columns, M^T P is 0 up to rounding, and nothing is NaN. Every rank computes P and g from the same
sums with the same operations, so they are bitwise equal on processors of one kind.

The rounds run after backward. Gradients that are not worth a round are averaged in buckets during backward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch

from bagua.linalg import is_finite, orthonormal, wide

from ..bucket import BaguaBucket
from ..model_engine.bucket_engine import BucketEngine
from ..model_engine.gradients import GradientExchange, Slot, grad_of
from ..model_engine.votes import divide
from ..process_group import ProcessGroup, ReduceOp
from ..tensor import forget, registration
from ._policy import ExchangePolicy
from .base import Algorithm, AlgorithmImpl, GlobalAlgorithmRegistry, WrappedModel

_APPROXIMATED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def rank_of(param: torch.Tensor, rank: int, min_compression: float) -> int | None:
    """Returns the rank r of a gradient's approximation, or None if the gradient is averaged as it is.

    The gradient is an n x m matrix with n = shape[0], and r = min(n, m, ``rank``). It is approximated if r (n + m)
    numbers are at least ``min_compression`` times fewer than n m.
    """
    if param.dim() == 0 or param.numel() == 0 or param.dtype not in _APPROXIMATED:
        return None
    n, m = param.shape[0], param.numel() // param.shape[0]
    r = min(n, m, rank)
    return r if n * m >= min_compression * r * (n + m) else None


class _Matrix:
    """One approximated parameter."""

    def __init__(self, slot_name: str, param: torch.nn.Parameter, number: int, r: int, feedback: bool) -> None:
        self.name = slot_name
        self.param = param
        # Index of the parameter in the model, for drawing q.
        self.number = number
        self.n, self.m, self.r = param.shape[0], param.numel() // param.shape[0], r
        self.dtype = wide(param.dtype)
        # Loss of earlier rounds on this rank, in the parameter's shape; None without error feedback.
        self.error = torch.zeros(param.shape, dtype=self.dtype, device=param.device) if feedback else None
        # Q, the m x r matrix of the power iteration. Equal on all ranks.
        self.q = torch.empty(0)

    def draw(self, seed: int, number: int) -> torch.Tensor:
        """Returns Q for round ``number``: standard normal numbers, equal on every processor."""
        drawn = np.random.default_rng([seed, number, self.number]).standard_normal((self.m, self.r))
        return torch.from_numpy(drawn).to(self.dtype).to(self.param.device)

    def scaled_q(self) -> torch.Tensor:
        """Returns Q with its columns scaled by powers of two, so that products with M neither underflow nor overflow
        because of Q.

        The scaling changes no direction and no significand.
        """
        exponents = torch.frexp(self.q.abs().amax(0)).exponent.clamp(-120, 120).tolist()
        scales = [math.ldexp(1.0, -exponent) for exponent in exponents]
        return self.q * torch.tensor(scales, dtype=self.dtype, device=self.q.device)

    def given(self, grad: torch.Tensor) -> torch.Tensor:
        """Returns M (n x m) in new memory."""
        mine = grad.detach().to(self.dtype)
        mine = mine.clone(memory_format=torch.contiguous_format) if self.error is None else mine + self.error
        return mine.reshape(self.n, self.m)


class PowerSGDExchange(GradientExchange):
    """The gradients of one model: large matrices as approximations, other gradients in buckets."""

    def __init__(self, bagua_ddp: WrappedModel, algorithm: PowerSGDAlgorithm) -> None:
        super().__init__(bagua_ddp)
        self._warm_start = algorithm.warm_start
        self._seed = algorithm.seed
        #: Number of rounds so far.
        self.round = 0
        #: Approximated parameters by name, in the model's order.
        self.matrices: dict[str, _Matrix] = {}
        for number, (name, param) in enumerate(self._parameters):
            r = rank_of(param, algorithm.rank, algorithm.min_compression)
            if r is not None:
                self.matrices[name] = _Matrix(name, param, number, r, algorithm.error_feedback)
        for matrix in self.matrices.values():
            matrix.q = matrix.draw(self._seed, 0)

    def register(self) -> list[torch.Tensor]:
        """Registers the parameters that are not approximated. Otherwise like :meth:`GradientExchange.register`."""
        others = []
        for tensor in super().register():
            name = registration(tensor).name
            if name not in self.matrices:
                others.append(tensor)
                continue
            forget(tensor)
            if not self._slots[name].had_grad:
                self._slots[name].param.grad = None
        return others

    def _prepare(self, slot: Slot, grad: torch.Tensor) -> torch.Tensor | None:
        return None if slot.name in self.matrices else super()._prepare(slot, grad)

    def _mark(self, slot: Slot, wire: torch.Tensor | None) -> None:
        if slot.name not in self.matrices:
            super()._mark(slot, wire)

    def _results(self, nowhere: set[str]) -> list[torch.Tensor]:
        return super()._results(nowhere | self.matrices.keys())

    def _completed(self, nowhere: set[str], divisor: float) -> None:
        matrices = [matrix for name, matrix in self.matrices.items() if name not in nowhere]
        if divisor == 0:
            divide([grad_of(matrix.param).data for matrix in matrices], divisor)
            return
        if not matrices or self._backend.size == 1:
            return
        given = {matrix.name: matrix.given(grad_of(matrix.param)) for matrix in matrices}
        bases = self._bases(matrices, given)
        factors = self._factors(matrices, given, bases, divisor)
        finite = all(
            is_finite(slot.param.grad)
            for slot in self._slots.values()
            # A gradient that no rank used is still this rank's own.
            if slot.name not in self.matrices and slot.name not in nowhere and slot.param.grad is not None
        )
        for matrix in matrices:
            grad, basis = grad_of(matrix.param).data, bases[matrix.name]
            if basis is None:
                grad.fill_(math.nan)
            else:
                grad.copy_((basis @ factors[matrix.name].T).view(grad.shape))
            finite = is_finite(grad) and finite
        # ``finite`` is equal on all ranks. GradScaler skips a step that is not finite, so errors and Q must not change.
        if finite:
            self._take_over(matrices, given, factors)

    def _bases(self, matrices: Sequence[_Matrix], given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
        """Returns P of each matrix; None on all ranks if P is not finite."""
        shapes = {matrix.name: (matrix.n, matrix.r, matrix.dtype) for matrix in matrices}
        sums = _Flat(shapes, matrices[0].param.device)
        for matrix in matrices:
            if is_finite(given[matrix.name]):
                torch.mm(given[matrix.name], matrix.scaled_q(), out=sums.parts[matrix.name])
            else:
                sums.parts[matrix.name].fill_(math.nan)
        self._votes.scale(list(sums.parts.values()))
        sums.all_reduce(self._backend, ReduceOp.SUM)
        bases: dict[str, torch.Tensor | None] = {}
        for name, total in sums.parts.items():
            basis = orthonormal(total)
            bases[name] = None if basis is None else basis.contiguous()
        return bases

    def _factors(
        self,
        matrices: Sequence[_Matrix],
        given: Mapping[str, torch.Tensor],
        bases: Mapping[str, torch.Tensor | None],
        divisor: float,
    ) -> dict[str, torch.Tensor]:
        """Returns the new Q of each matrix. Overwrites each matrix in ``given`` with this rank's new error."""
        shapes = {matrix.name: (matrix.m, matrix.r, matrix.dtype) for matrix in matrices}
        means = _Flat(shapes, matrices[0].param.device)
        for matrix in matrices:
            own, basis = means.parts[matrix.name], bases[matrix.name]
            if basis is None:
                own.fill_(math.nan)
                continue
            torch.mm(given[matrix.name].T, basis, out=own)
            if matrix.error is not None:
                given[matrix.name].addmm_(basis, own.T, alpha=-1)
        self._votes.scale(list(means.parts.values()))
        means.all_reduce(self._backend, ReduceOp.AVG if self._votes.room is None else ReduceOp.SUM)
        divide(list(means.parts.values()), divisor)
        return means.parts

    def _take_over(
        self, matrices: Sequence[_Matrix], errors: Mapping[str, torch.Tensor], factors: Mapping[str, torch.Tensor]
    ) -> None:
        self.round += 1
        for matrix in matrices:
            # This rank has sent nothing if its weight is 0.
            if matrix.error is not None and self._votes.factor != 0:
                matrix.error = errors[matrix.name].view(matrix.param.shape)
            if self._warm_start:
                found = factors[matrix.name]
                # A zero column would stay zero in all later rounds, so the old column is kept.
                matrix.q = torch.where(found.any(0), found, matrix.q)
        self.draw()

    def draw(self) -> None:
        """Draws Q for the next round, unless rounds start warm."""
        if not self._warm_start:
            for matrix in self.matrices.values():
                matrix.q = matrix.draw(self._seed, self.round)


class _Flat:
    """Matrices by name in one flat tensor per dtype, which one all_reduce serves."""

    def __init__(self, shapes: Mapping[str, tuple[int, int, torch.dtype]], device: torch.device) -> None:
        self.parts: dict[str, torch.Tensor] = {}
        self._flats: list[torch.Tensor] = []
        for dtype in sorted({dtype for _, _, dtype in shapes.values()}, key=str):
            wanted = {name: (rows, columns) for name, (rows, columns, of) in shapes.items() if of == dtype}
            flat = torch.empty(sum(rows * columns for rows, columns in wanted.values()), dtype=dtype, device=device)
            end = 0
            for name, (rows, columns) in wanted.items():
                start, end = end, end + rows * columns
                self.parts[name] = flat[start:end].view(rows, columns)
            self._flats.append(flat)

    def all_reduce(self, backend: BucketEngine, op: ReduceOp) -> None:
        for handle in [backend.all_reduce(flat, op) for flat in self._flats]:
            handle.wait()


class PowerSGDAlgorithmImpl(AlgorithmImpl):
    """Runs a round of PowerSGD after each backward, and one all_reduce per bucket of other gradients."""

    algorithm: PowerSGDAlgorithm

    def __init__(self, process_group: ProcessGroup, *options: Any, **named: Any) -> None:
        super().__init__(process_group, *options, **named)
        self._exchange: PowerSGDExchange | None = None

    def _policy(self) -> ExchangePolicy:
        return ExchangePolicy(make_exchange=self._make_exchange, votes_divide=True)

    def _make_exchange(self, bagua_ddp: WrappedModel) -> PowerSGDExchange:
        self._exchange = PowerSGDExchange(bagua_ddp, self.algorithm)
        return self._exchange

    def init_operations(self, bagua_ddp: WrappedModel, bucket: BaguaBucket) -> None:
        """Appends an average."""
        bucket.clear_ops()
        bucket.append_centralized_synchronous_op(average=not self._only_adds, group=self.process_group)

    @property
    def matrices(self) -> dict[str, tuple[int, int, int]]:
        """(n, m, rank) of the approximated gradients, by parameter name."""
        return {name: (matrix.n, matrix.m, matrix.r) for name, matrix in self._made().matrices.items()}

    def _made(self) -> PowerSGDExchange:
        assert self._exchange is not None
        return self._exchange

    def state_dict(self) -> dict[str, Any]:
        """Like :meth:`AlgorithmImpl.state_dict`.

        "round" is the number of rounds, "error" what this rank's rounds lost (shape of the parameter), and "q" (m x r)
        the next round's Q with a warm start. Tensors are float64 for float64 parameters, else float32.
        """
        state = super().state_dict()
        state["round"] = self._made().round
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Like :meth:`AlgorithmImpl.load_state_dict`."""
        super().load_state_dict(state)
        self._made().round = int(state["round"])
        self._made().draw()

    def _tensors_of_state(self) -> dict[str, dict[str, torch.Tensor]]:
        matrices = self._made().matrices
        found = {"error": {name: matrix.error for name, matrix in matrices.items() if matrix.error is not None}}
        if self.algorithm.warm_start:
            found["q"] = {name: matrix.q for name, matrix in matrices.items()}
        return {kind: tensors for kind, tensors in found.items() if tensors}


@dataclass(eq=False, repr=False)
class PowerSGDAlgorithm(Algorithm):
    """Averages low-rank approximations of gradients.

    A gradient is a matrix with shape[0] rows. Gradients for which an approximation is not worth it are averaged as they
    are. On one rank nothing is approximated. Gradients of float16 and bfloat16 are computed in float32. Models with
    sparse gradients are refused. If the result of a round is not finite, it is so on all ranks, and errors and Q stay
    as they were.

    - ``rank``: Rank of the approximations.
    - ``warm_start``: True starts a round with Q of the last round, so that approximations improve from step to step.
      False draws Q from ``seed`` for each round.
    - ``error_feedback``: Adds to each rank's gradient what its earlier rounds lost.
    - ``min_compression``: Approximates a gradient if the approximation has at least this many times fewer numbers.
    - ``seed``: Seed for the first Q, or for all of them without ``warm_start``.

    Raises ValueError for a number outside its range.
    """

    _implementation = PowerSGDAlgorithmImpl

    rank: int = 4
    _: KW_ONLY
    warm_start: bool = True
    error_feedback: bool = True
    min_compression: float = 2.0
    seed: int = 1

    def __post_init__(self) -> None:
        for name, value, least in (("rank", self.rank, 1), ("seed", self.seed, 0)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} must be an int of at least {least}, not {value!r}")
        if not 0 <= self.min_compression < math.inf:
            raise ValueError(
                f"min_compression must be a finite number that is not negative, not {self.min_compression!r}"
            )


GlobalAlgorithmRegistry.register("powersgd", PowerSGDAlgorithm, "averages of low-rank approximations of gradients")
