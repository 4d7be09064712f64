"""DistributedOptimizer: an optimizer whose gradients are reduced over the ranks before its step."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch

from bagua import hints

from .compression import Compression
from .gradient_reducer import GradientReducer
from .reductions import Average, ReduceOp, Reduction

__all__ = ["DistributedOptimizer"]

Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)


class _Distributed(torch.optim.Optimizer):
    """What DistributedOptimizer puts before the methods of the user's class."""

    _bagua_reducer: GradientReducer

    def synchronize(self) -> None:
        """Waits until the gradients of this step are reduced, and puts them into ``.grad``. Collective.

        For what reads gradients before :meth:`step`, such as clipping; step() follows in :meth:`skip_synchronize`.
        """
        self._bagua_reducer.synchronize(self.param_groups)

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside, :meth:`step` does not reduce gradients: :meth:`synchronize` has done so."""
        reducer = self._bagua_reducer
        before, reducer.step_synchronizes = reducer.step_synchronizes, False
        try:
            yield
        finally:
            reducer.step_synchronizes = before

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes how many backward passes each step has, from the next step on. ValueError below 1."""
        self._bagua_reducer.set_passes(passes)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The step of the user's class, with reduced gradients. Those of a closure are reduced after each call."""
        reducer = self._bagua_reducer
        if closure is not None:
            inner = closure

            def closure() -> Any:
                loss = inner()
                reducer.synchronize(self.param_groups)
                return loss

        elif reducer.step_synchronizes:
            if reducer.synchronized:
                hints.warn(
                    "optimizer.step() after optimizer.synchronize() reduces the gradients again: call it in "
                    "`with optimizer.skip_synchronize():`",
                )
            reducer.synchronize(self.param_groups)
        reducer.synchronized = False
        result = super().step(closure)
        reducer.synchronized = False
        return result

    # torch wraps step() of a class that lacks this to call its hooks; the step inside this one calls them.
    step.hooked = True  # type: ignore[attr-defined]

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As torch's. AssertionError between a backward and its step, where gradients are being reduced."""
        self._bagua_reducer.forget()
        super().zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; the gradients of the new parameters are reduced too."""
        super().add_param_group(param_group)
        self._bagua_reducer.watch(self.param_groups)


def DistributedOptimizer(
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: Any = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: Any = None,
) -> Optimizer:
    """An optimizer of a subclass of ``optimizer``'s class, with its parameters, options and state.

    Gradients are reduced by ``op`` while backward runs, in the same order on all ranks; ``step()`` waits for them. If a
    parameter has no gradient on a rank, that rank contributes zeros. A parameter that all ranks freeze
    (``requires_grad`` False) is not reduced, and one that they unfreeze is reduced from then on.

    - ``named_parameters``: names for errors; all of the optimizer's parameters have one then.
    - ``compression``: ``hvd.Compression.fp16`` sends half of the bytes of float32.
    - ``backward_passes_per_step``: gradients of as many backward passes add up before they are reduced. They are not
      divided by that number.
    - ``gradient_predivide_factor``: with Average, gradients are divided by it before they are added, and by
      size / factor afterwards.

    Raises ValueError or TypeError for bad arguments, before any communication. Raises NotImplementedError for the other
    arguments of Horovod's function, and in backward for sparse gradients.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"DistributedOptimizer takes a torch.optim.Optimizer, not {type(optimizer).__name__}")
    if isinstance(optimizer, _Distributed):
        raise ValueError("this optimizer is a DistributedOptimizer already")
    if gradient_predivide_factor != 1.0 and op is not Average:
        raise ValueError("gradient_predivide_factor is for op=hvd.Average")
    if not gradient_predivide_factor > 0:
        raise ValueError(f"gradient_predivide_factor is {gradient_predivide_factor}, which is not positive")
    for name, given, instead in (
        ("groups", groups, "set BAGUA_DEFAULT_BUCKET_SIZE for the size of messages"),
        ("num_groups", num_groups, "set BAGUA_DEFAULT_BUCKET_SIZE for the size of messages"),
        ("sparse_as_dense", sparse_as_dense, "use nn.Embedding(sparse=False), or bagua.torch_api.with_bagua"),
        ("process_set", process_set, "use bagua.torch_api.with_bagua with a process group"),
    ):
        if given:
            raise NotImplementedError(f"DistributedOptimizer({name}=...) is not supported: {instead}")
    factor = float(gradient_predivide_factor)
    reducer = GradientReducer(Reduction(op, 1.0 / factor, factor, compression), backward_passes_per_step)
    if named_parameters is not None:
        reducer.name(named_parameters, optimizer.param_groups)
    reducer.watch(optimizer.param_groups)
    cls: Any = type(type(optimizer).__name__, (_Distributed, type(optimizer)), {})
    made: Optimizer = cls.__new__(cls)
    # A scheduler's wrapper of the other object's step stays there.
    made.__dict__.update((key, value) for key, value in optimizer.__dict__.items() if key != "step")
    made._bagua_reducer = reducer  # type: ignore[attr-defined]
    weakref.finalize(made, reducer.close)
    return made
