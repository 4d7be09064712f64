"""Checks the algorithm and options of a strategy before any process is launched."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, device, nn, optim, zeros

from bagua import hints

__all__ = ["QADAM", "Refused", "check", "check_device", "make_algorithm", "needs_optimizers"]

#: The error text for qadam with another optimizer, exactly as in Lightning 1.9.
QADAM = "Bagua QAdam can only accept one QAdamOptimizer and one LR Scheduler."


class Refused(ValueError):
    """Arguments that cannot be used. The text says what to change."""


def check_device(device: device) -> None:
    if device.type != "cpu":
        raise Refused(f"the device is {device}, and only the CPU is supported: pass accelerator='cpu'")


def check(algorithm: Any, options: Mapping[str, Any]) -> None:
    """Raises :class:`Refused` unless ``algorithm`` is an ``Algorithm``, or the name of one that takes these options."""
    from bagua.torch_api.algorithms import Algorithm, GlobalAlgorithmRegistry

    if isinstance(algorithm, Algorithm):
        if options:
            raise Refused(
                f"pass {sorted(options)} to the constructor of {type(algorithm).__name__}, not to the strategy"
            )
        return
    if not isinstance(algorithm, str):
        raise Refused(f"algorithm must be an Algorithm or the name of one; got {algorithm!r}")
    names = GlobalAlgorithmRegistry.available_algorithms()
    if algorithm not in names:
        raise Refused(hints.unknown_name("algorithm", algorithm, names))
    made = GlobalAlgorithmRegistry[algorithm]["algorithm"]
    taken = inspect.signature(made).parameters
    unknown = [name for name in options if name not in taken or name == "q_adam_optimizer"]
    if unknown and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
        known = [name for name in taken if name != "q_adam_optimizer"]
        raise Refused(f"{algorithm!r} has no option {', '.join(map(repr, unknown))}; it has {', '.join(known)}")
    try:
        # Each constructor checks the values of its options.
        Algorithm.init(algorithm, **_first(algorithm, _placeholder_optimizer), **options)
    except (TypeError, ValueError) as wrong:
        raise Refused(f"algorithm {algorithm!r}: {wrong}") from wrong


def make_algorithm(
    algorithm: Any, options: Mapping[str, Any], optimizers: Sequence[optim.Optimizer], schedulers: int = 0
) -> Any:
    """Returns the ``Algorithm``. Raises :class:`Refused` with :data:`QADAM` if qadam does not get its own optimizer."""
    from bagua.torch_api.algorithms import Algorithm

    if isinstance(algorithm, Algorithm):
        return algorithm
    if algorithm == "qadam" and (len(optimizers) != 1 or not _is_qadam(optimizers[0]) or schedulers > 1):
        raise Refused(QADAM)
    return Algorithm.init(algorithm, **_first(algorithm, lambda: optimizers[0]), **options)


def needs_optimizers(algorithm: Any, options: Mapping[str, Any]) -> bool:
    """Returns True if the algorithm acts on optimizer steps, and so needs the optimizers with the model."""
    from bagua.torch_api.algorithms import Algorithm

    if isinstance(algorithm, str):
        algorithm = Algorithm.init(algorithm, **_first(algorithm, _placeholder_optimizer), **options)
    return bool(algorithm.needs_optimizers)


def _first(algorithm: str, optimizer: Any) -> dict[str, Any]:
    return {"q_adam_optimizer": optimizer()} if algorithm == "qadam" else {}


def _placeholder_optimizer() -> optim.Optimizer:
    from bagua.torch_api.algorithms.q_adam import QAdamOptimizer

    nothing: Tensor = zeros(1)
    return QAdamOptimizer([nn.Parameter(nothing)])


def _is_qadam(optimizer: optim.Optimizer) -> bool:
    from bagua.torch_api.algorithms.q_adam import QAdamOptimizer

    return isinstance(optimizer, QAdamOptimizer)
