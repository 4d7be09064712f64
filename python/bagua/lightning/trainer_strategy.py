"""The differences between `BaguaStrategy` and Lightning's `DDPStrategy`, under either name of Lightning."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch

from bagua.errors import BaguaError

from . import ddp_wrapper, join_and_leave
from .strategy_base import CommonMethods

__all__ = ["StrategyMethods"]


class StrategyMethods(CommonMethods):
    """Trains a LightningModule on several ranks with one of Bagua's algorithms, on the CPU.

    - ``algorithm``: its name (page "Algorithms"), with its options as further keyword arguments, or an ``Algorithm``.
    - ``flatten``: True makes gradients views of their buckets' memory.
    - ``find_unused_parameters``: True allows parameters that take no part in a step.
    - ``broadcast_buffers``: True copies rank 0's buffers to all ranks in each step.
    - ``bucket_size``: bytes that are communicated at once (default: BAGUA_DEFAULT_BUCKET_SIZE).

    The other arguments are those of ``DDPStrategy``; ``process_group_backend`` is "bagua" by default.

    Raises MisconfigurationException for an unknown algorithm or option, and for a device that is not the CPU. If
    another rank is lost or raises, training ends with an exception of ``bagua.errors`` that names it.
    """

    #: The LightningModule, wrapped during training.
    model: Any

    def __init__(
        self,
        algorithm: Any = "gradient_allreduce",
        flatten: bool = True,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
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
            precision_plugin=precision_plugin,
            start_method=start_method,
        )
        self._choose(
            algorithm,
            bagua_kwargs,
            flatten=flatten,
            find_unused_parameters=find_unused_parameters,
            broadcast_buffers=broadcast_buffers,
            bucket_size=bucket_size,
        )
        # True once an exception has been reported to the other ranks.
        self._failed = False
        # Keeps this rank out of asynchronous averaging during a validation.
        self._paused = contextlib.ExitStack()

    def setup_distributed(self) -> None:
        """Joins the other ranks, and makes Bagua's group from them."""
        self._prepare_to_join(self.root_device)
        self.set_world_ranks()
        join_and_leave.restart(self._process_group_backend, self.global_rank, self.world_size, self._timeout)
        super().setup_distributed()
        join_and_leave.join()

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces a tensor over all ranks, in place, and returns it. Returns anything else unchanged.

        ``reduce_op`` is "mean" (or "avg" or None), "sum", "min", "max" or "product", or a ``ReduceOp``. A mean of
        integers is truncated towards zero. Raises ValueError for another value, and for a group.
        """
        return self._reduce(tensor, group, reduce_op)

    def configure_ddp(self) -> None:
        """Does nothing: algorithms need the optimizers, which are made later."""

    def setup_optimizers(self, trainer: Any) -> None:
        """Makes the optimizers, and wraps the model together with them."""
        self._unwrap()
        super().setup_optimizers(trainer)
        self.model = self._setup_model(self.model)

    def _setup_model(self, model: Any) -> Any:
        return self._wrapped(model, self.optimizers, len(self.lr_scheduler_configs))

    def pre_backward(self, closure_loss: Any) -> None:
        """Decides if this backward communicates. In manual optimization, no_sync may change between two backwards."""
        super().pre_backward(closure_loss)
        if self._is_wrapped() and not self.lightning_module.automatic_optimization:
            self.model.bagua_ddp.decide_now()

    def _is_wrapped(self) -> bool:
        return ddp_wrapper.is_wrapped(self.model)

    def _unwrap(self) -> None:
        if self._is_wrapped():
            # A validation that raised is still paused. A group's error was raised already.
            with contextlib.suppress(BaguaError):
                self._paused.close()
            ddp_wrapper.unwrap(self.model)
            self.model = self.lightning_module

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the LightningModule's state without a wrapper's prefix, copied between two rounds of ``async``."""
        read = super().lightning_module_state_dict
        state: dict[str, Any] = self.model.bagua_ddp.policy.read_state(read) if self._is_wrapped() else read()
        return state

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        """Loads a checkpoint on all ranks at once. Under ``async``, waits until no averaging round is running."""
        load = functools.partial(super().load_model_state_dict, checkpoint, strict)
        if not self._is_wrapped():
            load()
            return
        from bagua.torch_api.checkpoint.coordination import Coordinator
        from bagua.torch_api.checkpoint.weights import load_weights

        load_weights(self.lightning_module, Coordinator(), load)

    def on_validation_start(self) -> None:
        """Leaves asynchronous averaging for the validation, so that all its batches see the same weights."""
        super().on_validation_start()
        if self._is_wrapped():
            self._paused.enter_context(self.model.bagua_ddp.policy.pause())

    def on_validation_end(self) -> None:
        """Takes part in asynchronous averaging again."""
        super().on_validation_end()
        self._paused.close()

    def on_train_end(self) -> None:
        """Ends ``async`` with a round that averages all steps, so that the ranks' weights are equal."""
        super().on_train_end()
        from bagua.torch_api.algorithms import AsyncModelAverageAlgorithmImpl

        algorithm = self.model.bagua_algorithm if self._is_wrapped() else None
        if isinstance(algorithm, AsyncModelAverageAlgorithmImpl) and not algorithm.is_aborted:
            algorithm.synchronize(self.model)
            algorithm.abort(self.model)

    def on_exception(self, exception: BaseException) -> None:
        """Reports the exception to the other ranks, which ends their training too."""
        super().on_exception(exception)
        self._failed = True
        join_and_leave.fail(exception)

    def teardown(self) -> None:
        """Removes the wrapper and its hooks from the LightningModule. Does nothing before a model is connected.

        The group stays for the next fit in this process, unless an exception has ended it.
        """
        if self.lightning_module is None or self.accelerator is None or self.cluster_environment is None:
            return
        self._unwrap()
        super().teardown()
        if self._failed:
            self._failed = False
            join_and_leave.leave()
