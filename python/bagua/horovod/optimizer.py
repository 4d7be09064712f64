"""DistributedOptimizer, and the functions that give all ranks the same parameters and optimizer state."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from bagua import hints
from bagua.torch_api.model_engine.sync_model_state import broadcast_optimizer, broadcast_tensors, require_equal
from bagua.torch_api.process_group import ReduceOp
from bagua.torch_operand import check_on_cpu

from .basics import rank, world
from .collectives import Average, Compression, Reduction
from .gradient_reducer import GradientReducer

Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)


class _Distributed(torch.optim.Optimizer):
    """The methods that DistributedOptimizer adds to the user's optimizer class."""

    _bagua_reducer: GradientReducer

    def synchronize(self) -> None:
        """Puts the reduced gradients into ``.grad``, such as for clipping. Then call step() in skip_synchronize()."""
        self._bagua_reducer.synchronize(_params(self))

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Makes :meth:`step` inside the ``with`` block skip the reduction, which :meth:`synchronize` has done."""
        self._bagua_reducer.step_synchronizes = False
        try:
            yield
        finally:
            self._bagua_reducer.step_synchronizes = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sets the number of backward passes per step, from the next step on. Raises ValueError below 1."""
        self._bagua_reducer.set_passes(passes)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Runs the user's step on reduced gradients. With a closure, reduces them after each call of it."""
        reducer = self._bagua_reducer
        if closure is not None:
            inner = closure

            def closure() -> Any:
                loss = inner()
                reducer.synchronize(_params(self))
                return loss

        elif reducer.step_synchronizes:
            if reducer.synchronized:
                hints.warn(
                    "optimizer.step() after optimizer.synchronize() reduces the gradients again: call it in "
                    "`with optimizer.skip_synchronize():`"
                )
            reducer.synchronize(_params(self))
        reducer.synchronized = False
        result = super().step(closure)
        reducer.synchronized = False
        return result

    # Keeps torch from wrapping this step() to call hooks, because the inner step calls them.
    step.hooked = True  # type: ignore[attr-defined]

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clears the gradients. Raises AssertionError between backward and step, while gradients are being reduced."""
        self._bagua_reducer.forget()
        super().zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters. Their gradients are reduced too."""
        super().add_param_group(param_group)
        self._bagua_reducer.watch(_params(self))


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
    """Returns an optimizer of a subclass of ``optimizer``'s class, with its parameters, options and state.

    Gradients are reduced by ``op`` while backward runs, in the same order on all ranks; ``step()`` waits for them. If a
    parameter has no gradient on a rank, that rank contributes zeros. A parameter that all ranks freeze
    (``requires_grad`` False) is not reduced, and one that they unfreeze is reduced from then on.

    - ``named_parameters``: names for errors; all of the optimizer's parameters have one then.
    - ``compression``: ``hvd.Compression.fp16`` sends half of the bytes of float32.
    - ``backward_passes_per_step``: the gradients of this number of backward passes are added, and not divided by it,
      before they are reduced.
    - ``gradient_predivide_factor``: with Average, gradients are divided by it before they are added, and by
      size / factor afterwards.

    Raises ValueError or TypeError for bad arguments, before any communication. Raises NotImplementedError for the other
    arguments of Horovod's function, and in backward for sparse gradients.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"DistributedOptimizer takes a torch.optim.Optimizer, not {type(optimizer).__name__}")
    if isinstance(optimizer, _Distributed):
        raise ValueError("this optimizer is a DistributedOptimizer already")
    factor = float(gradient_predivide_factor)
    if factor != 1.0 and op is not Average:
        raise ValueError("gradient_predivide_factor needs op=hvd.Average")
    if not factor > 0:
        raise ValueError(f"gradient_predivide_factor must be positive, got {factor}")
    for name, given, instead in (
        ("groups", groups or num_groups, "set BAGUA_DEFAULT_BUCKET_SIZE for the size of messages"),
        ("sparse_as_dense", sparse_as_dense, "use nn.Embedding(sparse=False), or bagua.torch_api.with_bagua"),
        ("process_set", process_set, "use bagua.torch_api.with_bagua with a process group"),
    ):
        if given:
            raise NotImplementedError(f"DistributedOptimizer({name}=...) is not supported: {instead}")
    params = _params(optimizer)
    names: dict[torch.Tensor, str] = {}
    if named_parameters is not None:
        names = {param: name for name, param in _named_tensors(named_parameters, "named_parameters").items()}
        if nameless := sum(param not in names for param in params):
            raise ValueError(f"named_parameters lacks {nameless} of the optimizer's parameters, or has a name twice")
    how = Reduction(op, 1.0 / factor, factor, compression)
    reducer = GradientReducer(params, how, backward_passes_per_step, names)
    cls: Any = type(type(optimizer).__name__, (_Distributed, type(optimizer)), {})
    made: Optimizer = cls.__new__(cls)
    # A scheduler's wrapper of the other object's step stays there.
    made.__dict__.update((key, value) for key, value in optimizer.__dict__.items() if key != "step")
    made._bagua_reducer = reducer  # type: ignore[attr-defined]
    weakref.finalize(made, reducer.close)
    return made


def _params(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _named_tensors(named: Any, what: str) -> dict[str, torch.Tensor]:
    """Returns the tensors of a state_dict or of named_parameters by name. Raises TypeError for others."""
    pairs = list(named.items() if isinstance(named, Mapping) else named)
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], torch.Tensor | None)):
            raise TypeError(f"{what} must be model.state_dict() or model.named_parameters(), which has names")
    return {name: tensor for name, tensor in pairs if tensor is not None}


def broadcast_parameters(params: Mapping[str, Any] | Iterable[tuple[str, torch.Tensor | None]], root_rank: int) -> None:
    """Gives parameters and buffers the values of ``root_rank``, a rank of the job, in place.

    ``params`` is ``model.state_dict()`` or ``model.named_parameters()``, with CPU tensors of any dtype. Raises
    TypeError for others, and MismatchError on every rank if names, shapes or dtypes differ.
    """
    named = _named_tensors(params, "params")
    for name, tensor in named.items():
        check_on_cpu(tensor, f"parameter {name!r}")
    communicator = world()
    require_equal(communicator, [f"{name!r} {tensor.dtype}{list(tensor.shape)}" for name, tensor in named.items()])
    broadcast_tensors(lambda room: communicator.broadcast(room, root_rank), rank(), named.values(), root_rank)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int) -> None:
    """Gives an optimizer the state and the options of ``root_rank``'s. Its state may be empty on any rank.

    Raises MismatchError on every rank if the shapes of parameters differ.
    """
    communicator = world()
    groups = [[list(param.shape) for param in group["params"]] for group in optimizer.param_groups]
    require_equal(communicator, [f"parameters of shapes {shapes}" for shapes in groups])
    broadcast_optimizer(communicator, lambda room: communicator.broadcast(room, root_rank), optimizer, root=root_rank)
