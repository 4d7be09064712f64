"""``model.with_bagua(...)``: the call that makes a model train on several ranks."""

from __future__ import annotations

import contextlib
from collections.abc import MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist

from bagua.errors import BaguaError
from bagua.process_state import process
from bagua.weight import checked_weight

from .algorithms.base import Algorithm, AlgorithmImpl
from .bucket import BaguaBucket
from .communication import to_bagua_process_group
from .membership.state import membership_state
from .model_engine import engine, in_place_ddp
from .model_engine.engine import ModelEngine
from .model_engine.in_place_ddp import InPlaceEngine
from .model_engine.state import model_state, name_of
from .process_group import ProcessGroup

_wrapped: MutableMapping[torch.nn.Module, ModelEngine] = model_state.wrapped
_names = model_state.module_names


ModuleT = TypeVar("ModuleT", bound=torch.nn.Module)
ImplT = TypeVar("ImplT", bound=AlgorithmImpl)


def with_bagua(
    module: ModuleT,
    optimizers: Sequence[torch.optim.Optimizer],
    algorithm: Algorithm | str,
    process_group: ProcessGroup | dist.ProcessGroup | None = None,
    do_flatten: bool = True,
    *,
    find_unused_parameters: bool = False,
    broadcast_buffers: bool = True,
    bucket_size: int | None = None,
    flags: Sequence[str] | None = None,
) -> ModuleT:
    """Makes ``module`` train together with the other ranks, and returns it. Collective among the ranks of the group.

    Call it after ``init_process_group()`` and after the model and its optimizers are built. ``model.with_bagua(...)``
    is the same as a method. Parameters, buffers and the optimizers' state become rank 0's. From then on,
    ``loss.backward()`` returns when gradients have been communicated as ``algorithm`` says. A second call replaces the
    first one, unless it raises. :func:`unwrap` ends it.

    - ``module``: The model, on the CPU or on one CUDA device. It is changed in place.
    - ``optimizers``: A list of all optimizers that change the model's parameters. For a ``ZeroRedundancyOptimizer``
      each rank keeps its own state.
    - ``algorithm``: One of ``bagua.torch_api.algorithms``, such as ``ByteGradAlgorithm(hierarchical=False)``, or its
      name with default options, such as ``"bytegrad"``.
    - ``process_group``: The ranks that train together, a group of Bagua or torch.distributed. ``None`` means all ranks.
    - ``do_flatten``: True makes each gradient a view of its bucket's memory, which every backward overwrites: clone
      gradients that must outlive ``zero_grad()``.
    - ``find_unused_parameters``: True allows parameters that get no gradient in a step.
    - ``broadcast_buffers``: True sends rank 0's buffers to all ranks in each step.
    - ``bucket_size``: Size of a bucket in bytes, which are communicated at once. The default is
      ``BAGUA_DEFAULT_BUCKET_SIZE``, 10 MiB.
    - ``flags``: At most 16 names for :func:`raise_flag`, equal on all ranks. An empty list allows :func:`skip_step`
      alone.

    The gradient of a weight may be sparse if the weight belongs to an ``Embedding`` or ``EmbeddingBag`` with
    ``sparse=True``, and to nothing else.

    Raises BaguaError before ``init_process_group()``, ValueError and TypeError for unusable arguments, and
    MismatchError if ranks have different models, optimizers or algorithms.
    """
    group = to_bagua_process_group(process_group)
    if (before := _wrapped.get(module)) is not None:
        # Other ranks may wait for unfinished work of the last step. If it fails, the weights become rank 0's.
        with contextlib.suppress(BaguaError):
            before.exchange.before_step()
    _wrapped[module] = InPlaceEngine(
        module,
        optimizers,
        algorithm,
        group,
        do_flatten,
        name=name_of(module),
        find_unused_parameters=find_unused_parameters,
        broadcast_buffers=broadcast_buffers,
        bucket_size=bucket_size,
        flags=flags,
        older=module,
    )
    return module


def unwrap(module: ModuleT) -> ModuleT:
    """Makes a model train alone again, and returns it. No effect on a model that is not wrapped."""
    engine.unwrap(module)
    return module


@overload
def algorithm_of(module: torch.nn.Module) -> AlgorithmImpl: ...
@overload
def algorithm_of(module: torch.nn.Module, kind: type[ImplT]) -> ImplT: ...
def algorithm_of(module: torch.nn.Module, kind: type[Any] = AlgorithmImpl) -> Any:
    """Returns the algorithm that communicates for a wrapped model: ``module.bagua_algorithm`` with a type.

    - ``module``: A model of :func:`with_bagua`, or Bagua's ``DistributedDataParallel``.
    - ``kind``: The expected class, such as ``AsyncModelAverageAlgorithmImpl``.

    Raises ValueError if the model is not wrapped, and TypeError if the algorithm is not of this class.
    """
    ddp = _engine_of(module)
    if not isinstance(ddp.bagua_algorithm, kind):
        raise TypeError(f"the algorithm of this {type(module).__name__} is {ddp.algorithm!r}, not a {kind.__name__}")
    return ddp.bagua_algorithm


def no_sync(module: torch.nn.Module) -> AbstractContextManager[None]:
    """Returns a context manager in which gradients only accumulate. The next backward after it sends their sum."""
    return _ddp_of(module).no_sync()


def set_weight(module: torch.nn.Module, weight: float) -> None:
    """Sets this rank's weight in averages over the ranks: they become sum(weight * x) / sum(weight). Not collective.

    The weight counts from the next exchange on, until it is set again. Call it before ``backward()``, for example with
    the number of tokens that the loss is a mean of. If gradients accumulate, the weight belongs to their sum. In the
    algorithms that average weights of the model or their changes, the weight belongs to these. A rank with weight 0
    contributes nothing and gets the average.

    All ranks must call it for the first time before the same exchange. Otherwise this exchange raises MismatchError.
    If the weight of every rank is 0, the exchange raises ValueError on all ranks, before it changes a parameter.

    - ``module``: A model of :func:`with_bagua`, or Bagua's ``DistributedDataParallel``.
    - ``weight``: A finite number of at least 0. Without a call it is 1.

    Raises ValueError for another number, TypeError for something else, NotImplementedError for an algorithm without
    weights, and BaguaError for a first call between forward and backward with an algorithm that exchanges weights.
    """
    _engine_of(module).set_weight(checked_weight(weight))


def raise_flag(module: torch.nn.Module, name: str) -> None:
    """Raises a flag on this rank, which all ranks see in :func:`flags` after the next exchange. Not collective.

    May be called at any time, also by a signal handler or another thread. If the exchange of this step has already
    begun, the flag counts for the next step. Raises ValueError for a name that is not among ``flags`` of the call that
    wrapped the model.
    """
    _engine_of(module).votes.raise_flag(name)


def flags(module: torch.nn.Module) -> frozenset[str]:
    """Returns the flags that any rank had raised before the last exchange: the same on all ranks.

    Call it after ``backward()``, or after the optimizer's step with ``local_sgd`` and ``diloco``. Contains "skip" if a
    rank has called :func:`skip_step`. A flag is seen once: the next exchange has it only if it was raised again.
    Steps without an exchange, such as those inside ``no_sync``, do not change the result. Raises BaguaError if the
    model was wrapped without ``flags``.
    """
    return _engine_of(module).flags()


def skip_step(module: torch.nn.Module) -> None:
    """Takes part in a step without a batch, instead of forward and backward. Collective with the others' backward.

    This rank contributes nothing, as with weight 0, and gets the average of the other ranks, so that its optimizer
    steps as theirs do. If all ranks skip, gradients are zeros. Gradients that were accumulated on this rank are
    dropped. With ``local_sgd`` and ``diloco``, a rank that skips the last step before a round contributes nothing to
    the round. Does nothing inside ``no_sync``.

    Raises BaguaError if the model was wrapped without ``flags`` (an empty list is enough), in evaluation mode, and
    between a forward and its backward.
    """
    _engine_of(module).skip_step()


def _engine_of(module: torch.nn.Module) -> ModelEngine:
    ddp = _wrapped.get(module)
    if ddp is None:
        raise ValueError(f"this {type(module).__name__} is not wrapped: call with_bagua first")
    return ddp


def _ddp_of(module: Any) -> ModelEngine:
    ddp = _wrapped.get(module)
    if ddp is None:
        raise AttributeError(f"this {type(module).__name__} is not wrapped: call with_bagua first")
    return ddp


# In the class body, the name with_bagua is already the member.
_with_bagua = with_bagua


class BaguaModule:
    """The members added to :class:`torch.nn.Module`."""

    with_bagua = _with_bagua
    """:func:`with_bagua` as a method of the model."""

    @property
    def bagua_ddp(self: Any) -> ModelEngine:
        """The engine that communicates for this model."""
        return _ddp_of(self)

    @property
    def bagua_module_name(self: Any) -> str:
        """Name of the model, unique in this process. Defaults to class and number. Set it before ``with_bagua``."""
        name = _names.get(self)
        if name is None:
            raise AttributeError(f"this {type(self).__name__} has no name yet")
        return name

    @bagua_module_name.setter
    def bagua_module_name(self: Any, name: str) -> None:
        _names[self] = name

    @property
    def bagua_algorithm(self: Any) -> AlgorithmImpl:
        """The algorithm that communicates for this model."""
        return _ddp_of(self).bagua_algorithm

    @property
    def bagua_optimizers(self: Any) -> list[torch.optim.Optimizer]:
        """The optimizers given to ``with_bagua``."""
        return _ddp_of(self).bagua_optimizers

    @property
    def bagua_buckets(self: Any) -> list[BaguaBucket]:
        """The buckets in the order of communication."""
        return _ddp_of(self).bagua_buckets


def _end_all() -> None:
    for module in list(_wrapped):
        in_place_ddp.end_with_group(module)
    model_state.wrapped_count = 0
    membership_state.rebuilding = None


process.shutdown_hooks.append(_end_all)
