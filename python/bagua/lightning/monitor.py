"""`CommunicationMonitor`: logs the cost of communication per step."""

from __future__ import annotations

from typing import Any

from bagua.metrics import StepMeter

__all__ = ["MonitorMethods"]

_Base: Any = object


class MonitorMethods(_Base):  # type: ignore[misc]
    """Logs ``bagua/payload_mb_per_step``, ``bagua/wire_mb_per_step``, ``bagua/wait_ms_per_step`` and
    ``bagua/calls_per_step`` of this rank to every logger of the trainer: means over the optimizer steps since the last
    log, by `bagua.metrics.StepMeter`.

    ``every_n_steps`` is the number of optimizer steps between logs. Raises ValueError unless it is a positive int, and
    MisconfigurationException in a fit without a logger.
    """

    _misconfigured: type[Exception]

    def __init__(self, every_n_steps: int = 50) -> None:
        super().__init__()
        if not isinstance(every_n_steps, int) or isinstance(every_n_steps, bool) or every_n_steps < 1:
            raise ValueError(f"every_n_steps must be a positive int, not {every_n_steps!r}")
        self.every_n_steps = every_n_steps
        self._meter: StepMeter | None = None
        # The trainer's number of optimizer steps at the last log.
        self._logged_at = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Starts the meter."""
        if not trainer.loggers:
            raise self._misconfigured("CommunicationMonitor needs a logger, and this Trainer has none")
        self._meter, self._logged_at = StepMeter(), trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Logs if ``every_n_steps`` steps have passed."""
        steps = trainer.global_step - self._logged_at
        if self._meter is None or steps < self.every_n_steps:
            return
        self._logged_at = trainer.global_step
        found = {f"bagua/{name}": value for name, value in self._meter.step(steps).items()}
        for logger in trainer.loggers:
            logger.log_metrics(found, step=trainer.global_step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Stops the meter."""
        self._meter = None
