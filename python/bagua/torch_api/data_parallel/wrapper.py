"""``DistributedDataParallel``: torch's wrapper, with any of Bagua's algorithms."""

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
from ..model_engine.checks import is_recorded, refuse_training
from ..model_engine.engine import ModelEngine
from ..model_engine.hooks import call_after_forward, call_before_forward
from ..model_engine.state import model_state, name_of
from ..process_group import ProcessGroup
from .comm_hooks import CommHook
from .wrapper_engine import WrapperEngine

__all__ = ["DistributedDataParallel"]

_PREFIX = "module."

_engines: MutableMapping[torch.nn.Module, ModelEngine] = model_state.wrapped


class DistributedDataParallel(torch.nn.Module, Joinable):
    """Trains ``module`` in step with the other ranks, as torch's DistributedDataParallel does. Collective among the
    ranks of the group.

    Parameters, buffers and the state of ``optimizers`` become rank 0's (``init_sync=False``: they stay). From then on
    ``loss.backward()`` returns with gradients that are communicated as ``algorithm`` says, an ``Algorithm`` or the name
    of one (``None``: gradient_allreduce), in buckets of ``bucket_cap_mb`` MiB (``None``: the environment's). With
    ``gradient_as_bucket_view`` a gradient is a view of its bucket's memory, which every backward overwrites.

    ``broadcast_buffers``, or ``forward_sync_buffers`` where it is given: rank 0's buffers at the end of each
    backward that exchanges gradients.
    ``find_unused_parameters``: parameters that do not take part in a step are not an error; nor are they with
    ``static_graph``. ``process_group``: one of bagua or of torch.distributed (``None``: the default group of bagua, or
    torch.distributed's world where its backend is "bagua"); or a ``device_mesh`` of one dimension.

    A forward in evaluation, or without gradients, communicates nothing. Attributes that the wrapper does not have are
    the model's.

    ``dim`` other than 0, ``mixed_precision``, ``delay_all_reduce_named_params`` and ``param_to_hook_all_reduce`` raise
    NotImplementedError; ``device_ids`` and ``output_device`` ValueError for a model on the CPU, and unless they name
    the one device of the model; a model without a parameter that needs a gradient BaguaError. MismatchError names the
    parameter when the ranks' models differ, ValueError says "already" when another model communicates it; the group
    stays usable after both.
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
            raise BaguaError(f"{type(module).__name__} has no parameter that needs a gradient: nothing is to be done")
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
        self._algorithm = GradientAllReduceAlgorithm() if algorithm is None else algorithm
        # What backward shall do while no engine asks for it.
        self._syncs = True
        # A copy communicates from its first training forward on.
        self._is_copy = False
        # A newer wrapper of the same module communicates instead.
        self._is_replaced = False
        # An older wrapper of the very same module, as when a cell of a notebook runs again.
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
        """None after the group's end, in a copy that was not trained, and while ``with_bagua`` has the wrapper."""
        found = _engines.get(self)
        return found if isinstance(found, WrapperEngine) else None

    def _at_work(self) -> WrapperEngine:
        engine = self._engine
        if engine is None:
            # Code that reads all attributes of an object handles no other error.
            raise AttributeError(
                "this wrapper communicates nothing: its group has ended, a newer wrapper of the same module has "
                "replaced it, or it is an untrained copy"
            )
        return engine

    # --- training -----------------------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The model's forward. With ``device_ids`` the tensors of its inputs are brought to that device."""
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
        """Whether the algorithm has to be called at the forward's end."""
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
        return engine.bagua_algorithm.hears_forward_and_backward

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _forward_returned(self) -> None:
        if (engine := self._engine) is not None:
            engine.forward_returned()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forward and backward inside only accumulate gradients; the first step afterwards communicates their sum."""
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the backward of the next forward communicates. May be set."""
        return self._syncs

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._syncs = value
        engine = self._engine
        if engine is not None:
            engine.require_backward_grad_sync = value

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward, if it is one of training, begins with rank 0's buffers."""
        engine = self._engine
        return engine is not None and engine.buffer_schedule.wait and bool(engine.buffers())

    # --- uneven inputs ------------------------------------------------------------------------------------------------

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """For training in which ranks have unequally many inputs: ``with model.join(): ...``.

        A rank without inputs counts with zeros; ``divide_by_initial_world_size=False`` divides by the ranks that have
        some. In the end all ranks have the model of the last one. NotImplementedError for algorithms other than
        gradient_allreduce.
        """
        return Join(
            [self], enable, throw_on_early_termination, divide_by_initial_world_size=divide_by_initial_world_size
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """See :meth:`join`; for torch's ``Join`` with other joinables, such as ZeroRedundancyOptimizer."""
        return self._at_work().join_hook(kwargs.get("divide_by_initial_world_size", True))

    @property
    def join_device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        """The group of torch.distributed by which ``Join`` counts the ranks that have inputs.

        One of the same ranks is made, collectively, where the wrapper was given a group of bagua that is smaller than
        the world.
        """
        if isinstance(self._given_group, dist.ProcessGroup):
            return self._given_group
        ranks = self._at_work().process_group.ranks
        if len(ranks) == dist.get_world_size():
            return dist.group.WORLD
        if "_join_group" not in self.__dict__:
            self._join_group = dist.new_group(ranks, use_local_synchronization=True)
        return self._join_group

    # --- hooks --------------------------------------------------------------------------------------------------------

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """``hook(state, bucket)`` communicates the buckets from now on, as with torch's DistributedDataParallel.

        Called by all ranks, once. TypeError and ValueError for what is no communication hook; NotImplementedError for
        algorithms other than gradient_allreduce, and where gradients are sparse.
        """
        self._at_work().register_comm_hook(state, hook)

    # --- what it is made of -------------------------------------------------------------------------------------------

    @property
    def process_group(self) -> ProcessGroup | dist.ProcessGroup:
        """The group that was given, else bagua's default group."""
        return self._at_work().process_group if self._given_group is None else self._given_group

    @property
    def bagua_ddp(self) -> ModelEngine:
        """What communicates for the model."""
        return self._at_work()

    @property
    def bagua_module_name(self) -> str:
        """The model's name, the same on all ranks."""
        return self._at_work().bagua_module_name

    @property
    def bagua_algorithm(self) -> AlgorithmImpl:
        """The algorithm at work."""
        return self._at_work().bagua_algorithm

    @property
    def bagua_optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that were given."""
        return self._at_work().bagua_optimizers

    @property
    def bagua_buckets(self) -> list[BaguaBucket]:
        """The buckets, in the order of communication."""
        return self._at_work().bagua_buckets

    @property
    def parameters_to_ignore(self) -> frozenset[str]:
        """Names of the model's parameters and buffers that each rank has for itself."""
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
        """Takes the states of a wrapper and of the model alone."""
        wrapped = prefix + _PREFIX
        own = {name for name, _ in self.module.state_dict().items()}
        given = [name for name in state_dict if name.startswith(prefix)]
        if not any(name.startswith(wrapped) and name.removeprefix(wrapped) in own for name in given):
            for name in given:
                state_dict[wrapped + name.removeprefix(prefix)] = state_dict.pop(name)
        super()._load_from_state_dict(state_dict, prefix, *args)

    # --- copies -------------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedDataParallel:
        """A wrapper around a copy of the model, without optimizers and hook. It communicates from its first training
        forward on, which all ranks make together; until then it is for this rank alone.
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
        """What is pickled: as :meth:`__deepcopy__`. BaguaError for another group than the default one."""
        if self._given_group is not None:
            raise BaguaError("a wrapper can be pickled when it communicates with the default group")
        return self._state_of_copy()


def _moved(value: Any, device: torch.device) -> Any:
    """Inputs with their tensors on a device, in the order of its current stream."""
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
    """The CUDA device to which forward brings its inputs; None where the caller does."""
    if not device_ids and output_device is None:
        return None
    places = list(dict.fromkeys(param.device for param in module.parameters()))
    given = f"device_ids={device_ids}, output_device={output_device}"
    if all(place.type == "cpu" for place in places):
        raise ValueError(f"{given} for a model on the CPU: leave them out")
    wanted = [_as_device(each) for each in [*(device_ids or ()), *([] if output_device is None else [output_device])]]
    if len(device_ids or ()) > 1 or any(each not in places for each in wanted):
        raise ValueError(f"{given} for a model on {', '.join(map(str, places))}: a model is on one device, name that")
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
