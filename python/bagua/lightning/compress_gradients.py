"""`CompressGradients`: Lightning's own DDP with gradients that are averaged through a codec."""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel

from bagua.codecs import Codec
from bagua.hooks import CompressedState, compressed_hook

__all__ = ["CompressGradientsMethods"]

_Base: Any = object


class CompressGradientsMethods(_Base):  # type: ignore[misc]
    """Averages the gradients of `strategy="ddp"` through a codec, with the hook of `bagua.hooks`.

        Trainer(strategy="ddp", devices=2, callbacks=[CompressGradients("minmax_u8")])

    `codec` and `error_feedback` are those of `bagua.hooks.CompressedState`. With error feedback, checkpoints hold the
    mean of the ranks' errors, so that training may resume on another number of ranks.

    Raises MisconfigurationException in a fit whose strategy does not wrap the model in torch's DistributedDataParallel.
    """

    _misconfigured: type[Exception]

    def __init__(self, codec: str | Codec = "minmax_u8", *, error_feedback: bool = False) -> None:
        super().__init__()
        self.compressed = CompressedState(codec, error_feedback=error_feedback)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Registers the hook."""
        model = trainer.strategy.model
        if not isinstance(model, DistributedDataParallel):
            raise self._misconfigured(
                f"CompressGradients needs a strategy with torch's DistributedDataParallel, such as 'ddp'; "
                f"{type(trainer.strategy).__name__} has none. BaguaStrategy('bytegrad') compresses without it"
            )
        model.register_comm_hook(self.compressed, compressed_hook)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the hook after `consolidate`. Lightning calls this on all ranks."""
        self.compressed.consolidate()
        return self.compressed.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the hook's state from a checkpoint."""
        self.compressed.load_state_dict(state_dict)
