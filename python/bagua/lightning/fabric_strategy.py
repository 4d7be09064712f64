"""The differences between `FabricBaguaStrategy` and Fabric's `DDPStrategy`, under either name of Lightning."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from . import algorithm_options, ddp_wrapper, join_and_leave
from .strategy_base import CommonMethods

__all__ = ["FabricStrategyMethods"]


class _SyncControl:
    """Fabric's interface for a backward pass without communication."""

    def no_backward_sync(self, module: Any, enabled: bool) -> AbstractContextManager[None]:
        """Returns a context in which gradients only accumulate. Raises TypeError for a module that was not set up."""
        if not enabled:
            return contextlib.nullcontext()
        if not ddp_wrapper.is_wrapped(module):
            raise TypeError(
                f"no_backward_sync needs a module that FabricBaguaStrategy has set up, not a {type(module).__name__}"
            )
        context: AbstractContextManager[None] = module.no_sync()
        return context


class FabricStrategyMethods(CommonMethods):
    """Sets up models and optimizers of a Fabric for one of Bagua's algorithms, on the CPU.

    The arguments are those of ``BaguaStrategy``, with Fabric's name ``precision``. Algorithms that act on the
    optimizers' steps (qadam, low_precision_decentralized, local_sgd, diloco, async with a warm-up) need
    ``fabric.setup(model, optimizer)``, and raise RuntimeError if the model is set up alone.
    """

    def __init__(
        self,
        algorithm: Any = "gradient_allreduce",
        flatten: bool = True,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision: Any = None,
        process_group_backend: str | None = "bagua",
        timeout: Any = None,
        start_method: str = "popen",
        *,
        find_unused_parameters: bool = False,
        broadcast_buffers: bool = True,
        bucket_size: int | None = None,
        **bagua_kwargs: Any,
    ) -> None:
        super().__init__(
            cluster_environment,
            process_group_backend,
            timeout,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            checkpoint_io=checkpoint_io,
            precision=precision,
            start_method=start_method,
        )
        self._backward_sync_control = _SyncControl()
        self._choose(
            algorithm,
            bagua_kwargs,
            flatten=flatten,
            find_unused_parameters=find_unused_parameters,
            broadcast_buffers=broadcast_buffers,
            bucket_size=bucket_size,
        )

    def _setup_distributed(self) -> None:
        self._prepare_to_join(self.root_device)
        self._set_world_ranks()
        join_and_leave.restart(self._process_group_backend, self.global_rank, self.world_size, self._timeout)
        super()._setup_distributed()
        join_and_leave.join()

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces a tensor over all ranks, as ``BaguaStrategy.reduce``."""
        # Fabric passes the group of all ranks explicitly.
        return self._reduce(tensor, None if group is dist.group.WORLD else group, reduce_op)

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Wraps a model without optimizers. Raises RuntimeError if the algorithm acts on its optimizers' steps."""
        if algorithm_options.needs_optimizers(self._algorithm, self._bagua_kwargs):
            raise RuntimeError(self._err_msg_joint_setup_required())
        wrapped: torch.nn.Module = self._wrapped(module, [])
        return wrapped

    def setup_module_and_optimizers(
        self, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], scheduler: Any = None
    ) -> tuple[torch.nn.Module, list[torch.optim.Optimizer], Any]:
        """Wraps a model together with its optimizers."""
        return self._wrapped(module, optimizers), list(optimizers), scheduler

    def get_module_state_dict(self, module: torch.nn.Module) -> dict[str, Any]:
        """Returns the state of the model, without the wrapper's prefix."""
        state: dict[str, Any] = super().get_module_state_dict(ddp_wrapper.inner(module))
        return state

    def load_module_state_dict(
        self, module: torch.nn.Module, state_dict: Mapping[str, Any], strict: bool = True
    ) -> None:
        """Loads a state without the wrapper's prefix into the model."""
        super().load_module_state_dict(module=ddp_wrapper.inner(module), state_dict=state_dict, strict=strict)

    @contextlib.contextmanager
    def paused(self, module: torch.nn.Module) -> Iterator[None]:
        """Keeps this rank out of the averaging rounds of ``async`` inside the ``with`` block. No effect on other
        algorithms.

        Fabric has no hook for the end of training or evaluation, so call ``with fabric.strategy.paused(model)``
        yourself.
        """
        wrapped: Any = getattr(module, "_forward_module", module)
        with wrapped.bagua_ddp.policy.pause() if ddp_wrapper.is_wrapped(wrapped) else contextlib.nullcontext():
            yield
