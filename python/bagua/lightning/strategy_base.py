"""The base of the strategies of the Trainer and of Fabric."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from . import algorithm_options, ddp_wrapper, join_and_leave
from .environment import is_detected

__all__ = ["CommonMethods"]

_Base: Any = object

# Name in Lightning's registry -> start method of the ranks.
_NAMES = {"bagua": "popen", "bagua_spawn": "spawn", "bagua_fork": "fork", "bagua_notebook": "fork"}


class CommonMethods(_Base):  # type: ignore[misc]
    """The methods that both strategies share: choosing an algorithm, joining, and wrapping a model."""

    #: Lightning's MisconfigurationException and our BaguaEnvironment, for the namespace of this class.
    _misconfigured: type[Exception]
    _environment: type[Any]

    def __init__(
        self, cluster_environment: Any, process_group_backend: str | None, timeout: Any, **others: Any
    ) -> None:
        if cluster_environment is None and is_detected():
            cluster_environment = self._environment()
        if timeout is not None:
            # Without a timeout, the base class's default applies.
            others["timeout"] = timeout
        super().__init__(
            cluster_environment=cluster_environment, process_group_backend=process_group_backend or "bagua", **others
        )

    def _choose(self, algorithm: Any, options: Mapping[str, Any], **wrapping_options: Any) -> None:
        self._algorithm, self._bagua_kwargs, self._wrapping = algorithm, dict(options), wrapping_options
        with self._refusing():
            algorithm_options.check(algorithm, options)

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except algorithm_options.Refused as wrong:
            # The text about qadam must stay exactly as in Lightning 1.9.
            text = str(wrong) if str(wrong) == algorithm_options.QADAM else f"{type(self).__name__}: {wrong}"
            raise self._misconfigured(text) from wrong

    def _prepare_to_join(self, device: torch.device) -> None:
        """Prepares for joining the ranks. Raises MisconfigurationException for a device that is not the CPU."""
        # Registers the backend if torch did not find it through its entry point.
        import bagua.c10d  # noqa: F401

        with self._refusing():
            algorithm_options.check_device(device)

    def _wrapped(self, module: Any, optimizers: Sequence[torch.optim.Optimizer], schedulers: int = 0) -> Any:
        with self._refusing():
            algorithm = algorithm_options.make_algorithm(self._algorithm, self._bagua_kwargs, optimizers, schedulers)
        return ddp_wrapper.wrap(module, optimizers, algorithm, **self._wrapping)

    def _reduce(self, tensor: Any, group: Any, reduce_op: Any) -> Any:
        return join_and_leave.reduce(type(self).__name__, tensor, group, reduce_op)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Registers "bagua", "bagua_spawn", "bagua_fork" and "bagua_notebook", unless they are registered already."""
        for name, start_method in _NAMES.items():
            if name not in strategy_registry:
                strategy_registry.register(
                    name,
                    cls,
                    description=f"Bagua's algorithms, with `start_method` {start_method!r}",
                    start_method=start_method,
                )
