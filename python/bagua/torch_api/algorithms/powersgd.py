"""PowerSGD: the ranks average low-rank approximations of their gradients.

Source: Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
NeurIPS 2019, arXiv:1905.13727. With M = g + e of each rank, a gradient as a matrix of n x m plus what the rank's
earlier rounds lost of it, one round is::

    P  = orthonormal columns of (sum over ranks of M Q)      n x r, one all_reduce for all parameters
    Q' = mean over ranks of M^T P                            m x r, one all_reduce for all parameters
    g  = P Q'^T                                              the same on all ranks
    e  = M - P P^T M                                         each rank's own

and Q' is the next round's Q. P's columns come from a QR decomposition, which has them also where M Q has a lower rank:
then M^T P is 0 or rounding for these, and nothing is NaN. Every rank computes P and g from the same sums with the same
operations, so they are equal bit for bit on processors of one kind.

The rounds run after backward. What is not worth a round is averaged in buckets during it.
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
from ..model_engine.exchange_interface import Exchange
from ..model_engine.gradients import GradientExchange, Slot, grad_of
from ..process_group import ProcessGroup, ReduceOp
from ..tensor import forget, registration
from .base import Algorithm, AlgorithmImpl, GlobalAlgorithmRegistry, WrappedModel

_APPROXIMATED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def rank_of(param: torch.Tensor, rank: int, min_compression: float) -> int | None:
    """The rank r = min(n, m, ``rank``) of a gradient's approximation, as an n x m matrix with n = shape[0]; None if it
    is averaged as it is: r (n + m) numbers must be at least ``min_compression`` times fewer than n m.
    """
    if param.dim() == 0 or param.numel() == 0 or param.dtype not in _APPROXIMATED:
        return None
    n, m = param.shape[0], param.numel() // param.shape[0]
    r = min(n, m, rank)
    return r if n * m >= min_compression * r * (n + m) else None


class _Matrix:
    """One parameter that is approximated."""

    def __init__(self, slot_name: str, param: torch.nn.Parameter, number: int, r: int, feedback: bool) -> None:
        self.name = slot_name
        self.param = param
        # Place in the model's order, for the drawing of q.
        self.number = number
        self.n, self.m, self.r = param.shape[0], param.numel() // param.shape[0], r
        self.dtype = wide(param.dtype)
        # What earlier rounds lost of this rank's gradient, in the parameter's shape; None without error feedback.
        self.error = torch.zeros(param.shape, dtype=self.dtype, device=param.device) if feedback else None
        # m x r, the same on all ranks.
        self.q = torch.empty(0)

    def draw(self, seed: int, number: int) -> torch.Tensor:
        """Q for round ``number``: standard normal numbers, alike on every processor."""
        drawn = np.random.default_rng([seed, number, self.number]).standard_normal((self.m, self.r))
        return torch.from_numpy(drawn).to(self.dtype).to(self.param.device)

    def scaled_q(self) -> torch.Tensor:
        """Q with columns times powers of two, so that a product with M neither underflows nor overflows for its sake.

        That changes no direction and no bit of the columns' significands.
        """
        exponents = torch.frexp(self.q.abs().amax(0)).exponent.clamp(-120, 120).tolist()
        scales = [math.ldexp(1.0, -exponent) for exponent in exponents]
        return self.q * torch.tensor(scales, dtype=self.dtype, device=self.q.device)

    def given(self, grad: torch.Tensor) -> torch.Tensor:
        """M, n x m: new memory."""
        mine = grad.detach().to(self.dtype)
        mine = mine.clone(memory_format=torch.contiguous_format) if self.error is None else mine + self.error
        return mine.reshape(self.n, self.m)


class PowerSGDExchange(GradientExchange):
    """The gradients of one model: matrices by their approximations, the others in buckets."""

    def __init__(self, bagua_ddp: WrappedModel, algorithm: PowerSGDAlgorithm) -> None:
        super().__init__(bagua_ddp)
        self._warm_start = algorithm.warm_start
        self._seed = algorithm.seed
        #: Rounds so far.
        self.round = 0
        #: What is approximated, by name, in the model's order.
        self.matrices: dict[str, _Matrix] = {}
        for number, (name, param) in enumerate(self._parameters):
            r = rank_of(param, algorithm.rank, algorithm.min_compression)
            if r is not None:
                self.matrices[name] = _Matrix(name, param, number, r, algorithm.error_feedback)
        for matrix in self.matrices.values():
            matrix.q = matrix.draw(self._seed, 0)

    def register(self) -> list[torch.Tensor]:
        """The parameters that are not approximated, see :meth:`GradientExchange.register`."""
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

    def _completed(self, nowhere: set[str]) -> None:
        matrices = [matrix for name, matrix in self.matrices.items() if name not in nowhere]
        # One rank's gradients are the average as they are.
        if not matrices or self._backend.size == 1:
            return
        given = {matrix.name: matrix.given(grad_of(matrix.param)) for matrix in matrices}
        bases = self._bases(matrices, given)
        factors = self._factors(matrices, given, bases)
        finite = all(
            is_finite(slot.param.grad)
            for slot in self._slots.values()
            # What no rank used is still this rank's own.
            if slot.name not in self.matrices and slot.name not in nowhere and slot.param.grad is not None
        )
        for matrix in matrices:
            grad, basis = grad_of(matrix.param).data, bases[matrix.name]
            if basis is None:
                grad.fill_(math.nan)
            else:
                grad.copy_((basis @ factors[matrix.name].T).view(grad.shape))
            finite = is_finite(grad) and finite
        # The same on all ranks. A step that a GradScaler skips has used nothing of the errors and learned nothing.
        if finite:
            self._take_over(matrices, given, factors)

    def _bases(self, matrices: Sequence[_Matrix], given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
        """P of each matrix; None, on all ranks, where it is not finite."""
        shapes = {matrix.name: (matrix.n, matrix.r, matrix.dtype) for matrix in matrices}
        sums = _Flat(shapes, matrices[0].param.device)
        for matrix in matrices:
            if is_finite(given[matrix.name]):
                torch.mm(given[matrix.name], matrix.scaled_q(), out=sums.parts[matrix.name])
            else:
                sums.parts[matrix.name].fill_(math.nan)
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
    ) -> dict[str, torch.Tensor]:
        """Q' of each matrix. What ``given`` has becomes the rank's new error."""
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
        means.all_reduce(self._backend, ReduceOp.AVG)
        return means.parts

    def _take_over(
        self, matrices: Sequence[_Matrix], errors: Mapping[str, torch.Tensor], factors: Mapping[str, torch.Tensor]
    ) -> None:
        self.round += 1
        for matrix in matrices:
            if matrix.error is not None:
                matrix.error = errors[matrix.name].view(matrix.param.shape)
            if self._warm_start:
                found = factors[matrix.name]
                # Of 0, as of gradients that are 0, no other direction would ever come.
                matrix.q = torch.where(found.any(0), found, matrix.q)
        self.draw()

    def draw(self) -> None:
        """Without a warm start: Q for the next round."""
        if not self._warm_start:
            for matrix in self.matrices.values():
                matrix.q = matrix.draw(self._seed, self.round)


class _Flat:
    """Matrices by name, one after the other in memory of a device, with one all_reduce for each dtype."""

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
        """In place."""
        for handle in [backend.all_reduce(flat, op) for flat in self._flats]:
            handle.wait()


class PowerSGDAlgorithmImpl(AlgorithmImpl):
    """Rounds of PowerSGD after each backward, and one all_reduce for each bucket of the other gradients."""

    algorithm: PowerSGDAlgorithm

    def __init__(self, process_group: ProcessGroup, *options: Any, **named: Any) -> None:
        super().__init__(process_group, *options, **named)
        self._exchange: PowerSGDExchange | None = None

    def make_exchange(self, bagua_ddp: WrappedModel) -> Exchange:
        """Gradients, as matrices where that is worth it."""
        self._exchange = PowerSGDExchange(bagua_ddp, self.algorithm)
        return self._exchange

    def init_operations(self, bagua_ddp: WrappedModel, bucket: BaguaBucket) -> None:
        """Averages the bucket."""
        bucket.clear_ops()
        bucket.append_centralized_synchronous_op(average=True, group=self.process_group)

    @property
    def matrices(self) -> dict[str, tuple[int, int, int]]:
        """n, m and rank of the gradients that are approximated, by parameter name."""
        return {name: (matrix.n, matrix.m, matrix.r) for name, matrix in self._made().matrices.items()}

    def _made(self) -> PowerSGDExchange:
        assert self._exchange is not None
        return self._exchange

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`AlgorithmImpl.state_dict`: "round" counts the rounds; "error" is what a rank's rounds lost, in the
        parameter's shape, and "q" (m x r) the next round's Q with a warm start; float64 for float64 parameters, else
        float32.
        """
        state = super().state_dict()
        state["round"] = self._made().round
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :meth:`AlgorithmImpl.load_state_dict`."""
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
    """Averages gradients by approximations of rank ``rank``, where these have at least ``min_compression`` times fewer
    numbers than the gradient; the others are averaged as they are. On one rank nothing is approximated.

    A gradient is a matrix of shape[0] rows. ``warm_start``: a round begins with the last one's Q, which makes the
    approximation better from step to step; otherwise with one drawn from ``seed``, as the first one is.
    ``error_feedback``: each rank adds to its gradient what earlier rounds lost of it.

    Sparse gradients are refused. A round whose result is not finite is so on all ranks, and leaves errors and Q as they
    were. Gradients of float16 and bfloat16 are computed in float32.

    ValueError for a number out of its range.
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
