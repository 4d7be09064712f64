"""``DistributedDataParallel``: the wrapper of torch, with any of Bagua's algorithms."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook, _JoinConfig

from bagua import hints
from bagua.errors import BaguaError

from ..algorithms.base import Algorithm, AlgorithmImpl
from ..algorithms.gradient_allreduce import GradientAllReduceAlgorithm
from ..bucket import BaguaBucket
from ..communication import group_of
from ..model_engine.engine import ModelEngine
from ..model_engine.model_checks import is_recorded, refuse_training
from ..model_engine.state import model_state, name_of
from ..model_engine.torch_hooks import call_after_forward, call_before_forward
from ..process_group import ProcessGroup
from .comm_hooks import CommHook
from .wrapper_engine import WrapperEngine

__all__ = ["DistributedDataParallel"]

_PREFIX = "module."

_engines: MutableMapping[torch.nn.Module, ModelEngine] = model_state.wrapped


class DistributedDataParallel(torch.nn.Module, Joinable):
    """Trains ``module`` together with the other ranks, like torch's DistributedDataParallel. Collective among the
    ranks.

    ``loss.backward()`` returns when gradients have been communicated. A forward in evaluation, or without gradients,
    does not communicate. Attributes that the wrapper does not have are the model's.

    - ``module``: The model, on the CPU or on one CUDA device.
    - ``device_ids``, ``output_device``: The model's CUDA device, to which the inputs of ``forward`` are moved. Leave
      them out on the CPU.
    - ``dim``: Must be 0.
    - ``broadcast_buffers``: True copies rank 0's buffers to all ranks at the end of each backward that exchanges
      gradients.
    - ``init_sync``: True copies rank 0's parameters, buffers and optimizer state to all ranks.
    - ``process_group``: A group of Bagua or torch.distributed. None means Bagua's default group, or torch.distributed's
      world if its backend is "bagua".
    - ``bucket_cap_mb``: Size of a bucket in MiB. None means ``BAGUA_DEFAULT_BUCKET_SIZE``.
    - ``find_unused_parameters``: True allows parameters that get no gradient in a step.
    - ``check_reduction``: Has no effect, as in torch.
    - ``gradient_as_bucket_view``: True makes each gradient a view of its bucket's memory, which every backward
      overwrites.
    - ``static_graph``: True allows unused parameters, and several gradients of a parameter in one backward.
    - ``device_mesh``: A mesh of one dimension, instead of ``process_group``.
    - ``mixed_precision``, ``delay_all_reduce_named_params``, ``param_to_hook_all_reduce``: Not supported; must be None.
    - ``forward_sync_buffers``: Replaces ``broadcast_buffers`` if given.
    - ``optimizers``: The model's optimizers, for algorithms that act on their steps.
    - ``algorithm``: An ``Algorithm``, or the name of one. None means gradient_allreduce.
    - ``flags``: Names of flags, as in ``with_bagua``.

    Raises NotImplementedError for unsupported arguments; ValueError for ``device_ids`` or ``output_device`` other than
    the model's device, and (with "already") if another wrapper communicates a parameter; BaguaError for a model without
    a parameter that needs a gradient; and MismatchError, with the parameter's name, if the ranks' models differ. The
    group stays usable after ValueError and MismatchError.
    """

    module: torch.nn.Module

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        *,
        init_sync: bool = True,
        process_group: ProcessGroup | dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        forward_sync_buffers: bool | None = None,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        algorithm: Algorithm | str | None = None,
        flags: Sequence[str] | None = None,
    ) -> None:
        torch.nn.Module.__init__(self)
        Joinable.__init__(self)
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"module must be a torch.nn.Module, not {type(module).__name__}")
        refused = {
            "dim": dim != 0,
            "mixed_precision": mixed_precision is not None,
            "delay_all_reduce_named_params": delay_all_reduce_named_params is not None,
            "param_to_hook_all_reduce": param_to_hook_all_reduce is not None,
        }
        for name, is_given in refused.items():
            if is_given:
                raise NotImplementedError(f"DistributedDataParallel: {name} is not supported")
        if check_reduction:
            hints.warn("check_reduction has no effect, as in torch", DeprecationWarning)
        device = _device_of(module, device_ids, output_device)
        if bucket_cap_mb is not None and not bucket_cap_mb > 0:
            raise ValueError(f"bucket_cap_mb is {bucket_cap_mb}; it must be positive")
        if device_mesh is not None:
            process_group = _group_of(device_mesh, process_group)
        if not any(param.requires_grad for param in module.parameters()):
            raise BaguaError(f"{type(module).__name__} has no parameter that needs a gradient: it needs no wrapper")
        self.module = module
        self.broadcast_buffers = broadcast_buffers if forward_sync_buffers is None else forward_sync_buffers
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.device_ids = None if device is None else [device.index]
        self.output_device = None if device is None else device.index
        self._device = device
        self.dim = dim
        self._given_group = process_group
        self._bucket_size = None if bucket_cap_mb is None else max(int(bucket_cap_mb * (1 << 20)), 1)
        self._flags = flags
        self._algorithm = GradientAllReduceAlgorithm() if algorithm is None else algorithm
        # Value of require_backward_grad_sync while there is no engine.
        self._syncs = True
        # True for a copy, which communicates from its first training forward on.
        self._is_copy = False
        # True if a newer wrapper of the same module communicates instead.
        self._is_replaced = False
        # An older wrapper of the same module, as when a cell of a notebook runs again.
        wrappers = [each for each in list(_engines) if isinstance(each, DistributedDataParallel)]
        older = next((each for each in wrappers if each.module is self.module), None)
        try:
            self._open(optimizers, init_sync, older)
        finally:
            if older is not None:
                older._is_replaced = older not in _engines

    def _open(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        init_sync: bool,
        older: DistributedDataParallel | None = None,
    ) -> WrapperEngine:
        engine = _engines[self] = WrapperEngine(
            self.module,
            optimizers,
            self._algorithm,
            group_of(self._given_group),
            self.gradient_as_bucket_view,
            name=name_of(self.module),
            find_unused_parameters=self.find_unused_parameters or self.static_graph,
            broadcast_buffers=self.broadcast_buffers,
            bucket_size=self._bucket_size,
            flags=self._flags,
            broadcast_state=init_sync,
            older=older,
            owner=weakref.ref(self),
            cap=self._bucket_size,
            static_graph=self.static_graph,
        )
        self._is_copy = False
        engine.require_backward_grad_sync = self._syncs
        return engine

    @property
    def _engine(self) -> WrapperEngine | None:
        """The engine. None after the group ended, in an untrained copy, and while ``with_bagua`` has the wrapper."""
        found = _engines.get(self)
        return found if isinstance(found, WrapperEngine) else None

    def _at_work(self) -> WrapperEngine:
        engine = self._engine
        if engine is None:
            # AttributeError, because code that reads all attributes of an object handles no other error.
            raise AttributeError(
                "this wrapper communicates nothing: its group has ended, a newer wrapper of the same module has "
                "replaced it, or it is an untrained copy"
            )
        return engine

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Returns the model's output. With ``device_ids``, tensors among the inputs are moved to that device first."""
        if self._device is not None:
            inputs, kwargs = _moved((inputs, kwargs), self._device)
        if is_recorded():
            return self.module(*inputs, **kwargs)
        output = None
        if self._before_forward(inputs):
            try:
                output = self.module(*inputs, **kwargs)
            finally:
                call_after_forward(lambda: self._engine, output)
        else:
            output = self.module(*inputs, **kwargs)
        self._forward_returned()
        return output

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _before_forward(self, inputs: Any) -> bool:
        """Returns True if the algorithm must be called at the end of the forward."""
        if self._is_replaced:
            raise BaguaError(
                f"a newer DistributedDataParallel of the same {type(self.module).__name__} has replaced this one, "
                "which communicates nothing any more: call the newer one, or wrap the module again"
            )
        engine = self._engine
        if engine is None and self._is_copy and self.module.training and torch.is_grad_enabled():
            engine = self._open([], True)
        if engine is None:
            refuse_training(self)
            return False
        call_before_forward(lambda: engine, self.module, inputs)
        return engine.policy.callbacks is not None

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _forward_returned(self) -> None:
        if (engine := self._engine) is not None:
            engine.forward_returned()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulates gradients inside the block. The first step afterwards communicates their sum."""
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @property
    def require_backward_grad_sync(self) -> bool:
        """True if the backward of the next forward communicates. May be set."""
        return self._syncs

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._syncs = value
        engine = self._engine
        if engine is not None:
            engine.require_backward_grad_sync = value

    def will_sync_module_buffers(self) -> bool:
        """Returns True if the next training forward begins with rank 0's buffers."""
        engine = self._engine
        return engine is not None and engine.buffer_schedule.wait and bool(engine.buffers())

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Trains with different numbers of inputs on the ranks: ``with model.join(): ...``.

        A rank without inputs contributes zeros. ``divide_by_initial_world_size=False`` divides by the number of ranks
        that still have inputs. At the end, all ranks get the model of the last rank that had inputs. Raises
        NotImplementedError for algorithms other than gradient_allreduce.
        """
        return Join(
            [self], enable, throw_on_early_termination, divide_by_initial_world_size=divide_by_initial_world_size
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Returns the hook for torch's ``Join`` with others, such as ZeroRedundancyOptimizer. See :meth:`join`."""
        return self._at_work().join_hook(kwargs.get("divide_by_initial_world_size", True))

    @property
    def join_device(self) -> torch.device:
        """The device for Join's own tensors: the CPU."""
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        """The torch.distributed group in which ``Join`` counts ranks that have inputs.

        If the wrapper was given a group of Bagua smaller than the world, a torch.distributed group of the same ranks is
        made, collectively.
        """
        if isinstance(self._given_group, dist.ProcessGroup):
            return self._given_group
        ranks = self._at_work().process_group.ranks
        if len(ranks) == dist.get_world_size():
            return dist.group.WORLD
        if "_join_group" not in self.__dict__:
            self._join_group = dist.new_group(ranks, use_local_synchronization=True)
        return self._join_group

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Makes ``hook(state, bucket)`` communicate the buckets from now on, as in torch's DistributedDataParallel.

        All ranks call this once. Raises TypeError or ValueError if ``hook`` is not a communication hook, and
        NotImplementedError for algorithms other than gradient_allreduce or sparse gradients.
        """
        self._at_work().register_comm_hook(state, hook)

    @property
    def process_group(self) -> ProcessGroup | dist.ProcessGroup:
        """The group that was given, else Bagua's default group."""
        return self._at_work().process_group if self._given_group is None else self._given_group

    @property
    def bagua_ddp(self) -> ModelEngine:
        """The engine that communicates for the model."""
        return self._at_work()

    @property
    def bagua_module_name(self) -> str:
        """Name of the model, the same on all ranks."""
        return self._at_work().bagua_module_name

    @property
    def bagua_algorithm(self) -> AlgorithmImpl:
        """The algorithm that communicates for the model."""
        return self._at_work().bagua_algorithm

    @property
    def bagua_optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that were given."""
        return self._at_work().bagua_optimizers

    @property
    def bagua_buckets(self) -> list[BaguaBucket]:
        """The buckets in the order of communication."""
        return self._at_work().bagua_buckets

    @property
    def parameters_to_ignore(self) -> frozenset[str]:
        """Names of the model's parameters and buffers that are not communicated."""
        engine = self._engine
        return frozenset() if engine is None else engine.parameters_to_ignore

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None:
                raise
            return getattr(module, name)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Loads the state of a wrapper, or of a model without a wrapper."""
        wrapped = prefix + _PREFIX
        own = {name for name, _ in self.module.state_dict().items()}
        given = [name for name in state_dict if name.startswith(prefix)]
        if not any(name.startswith(wrapped) and name.removeprefix(wrapped) in own for name in given):
            for name in given:
                state_dict[wrapped + name.removeprefix(prefix)] = state_dict.pop(name)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedDataParallel:
        """Returns a wrapper around a copy of the model, without optimizers and hook.

        The copy communicates from its first training forward on, which all ranks run together. Until then it belongs to
        this rank alone.
        """
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        for name, value in self._state_of_copy().items():
            by_reference = name in ("_given_group", "_join_group", "_algorithm")
            made.__dict__[name] = value if by_reference else copy.deepcopy(value, memo)
        return made

    def _state_of_copy(self) -> dict[str, Any]:
        own = {"_is_copy": True, "_is_replaced": False, "_join_config": _JoinConfig(False, False, False)}
        return {**self.__dict__, **own}

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for a pickle, like :meth:`__deepcopy__`. Raises BaguaError without the default group."""
        if self._given_group is not None:
            raise BaguaError("a wrapper can be pickled only if it communicates with the default group")
        return self._state_of_copy()


def _moved(value: Any, device: torch.device) -> Any:
    """Moves tensors among the inputs to a device, in the order of its current stream."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_moved(each, device) for each in value))
    if type(value) in (list, tuple):
        return type(value)(_moved(each, device) for each in value)
    if type(value) is dict:
        return {key: _moved(each, device) for key, each in value.items()}
    return value


def _device_of(
    module: torch.nn.Module, device_ids: Sequence[int | torch.device] | None, output_device: Any
) -> torch.device | None:
    """Returns the CUDA device to which forward moves its inputs; None if the caller does so."""
    if not device_ids and output_device is None:
        return None
    places = list(dict.fromkeys(param.device for param in module.parameters()))
    given = f"device_ids={device_ids}, output_device={output_device}"
    if all(place.type == "cpu" for place in places):
        raise ValueError(f"{given} for a model on the CPU: leave them out")
    wanted = [_as_device(each) for each in [*(device_ids or ()), *([] if output_device is None else [output_device])]]
    if len(device_ids or ()) > 1 or any(each not in places for each in wanted):
        raise ValueError(f"{given} for a model on {', '.join(map(str, places))}: name the model's one device")
    return places[0] if device_ids else None


def _as_device(named: Any) -> torch.device:
    return torch.device("cuda", named) if isinstance(named, int) else torch.device(named)


def _group_of(device_mesh: Any, process_group: Any) -> dist.ProcessGroup:
    if process_group is not None:
        raise ValueError("process_group and device_mesh cannot both be given")
    if device_mesh.ndim != 1:
        raise ValueError(f"a device_mesh of one dimension is needed, not {device_mesh}")
    group: dist.ProcessGroup = device_mesh.get_group(mesh_dim=0)
    return group
