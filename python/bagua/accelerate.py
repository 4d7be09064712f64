"""Compressed gradients in Hugging Face accelerate, and so in transformers' Trainer.

    accelerator = Accelerator()
    bagua.accelerate.compress(accelerator, "minmax_u8")
    model, optimizer = accelerator.prepare(model, optimizer)

accelerate wraps the model in torch's DistributedDataParallel, as ever. `bagua.hooks` says what the hook does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from bagua.codecs import Codec
from bagua.hooks import CompressedState, compressed_hook

__all__ = ["TRAINER_FILE", "compress", "trainer_callback"]

#: The file that `trainer_callback` adds to a checkpoint.
TRAINER_FILE = "bagua_hook.pt"


def compress(accelerator: Any, codec: str | Codec = "minmax_u8", *, error_feedback: bool = False) -> CompressedState:
    """Lets an `accelerate.Accelerator` average gradients through a codec. Call it before `prepare`.

    The options of a `DistributedDataParallelKwargs` that the accelerator was given stay. `codec` and `error_feedback`
    are those of `bagua.hooks.CompressedState`. With error feedback, `accelerator.save_state` and `load_state` also save
    and load what each rank owes.

    With transformers' Trainer, call `compress(trainer.accelerator)` before `trainer.train()`. The Trainer saves
    checkpoints by itself: with error feedback, add `trainer_callback`.

    Returns the state of the hook.

    Raises RuntimeError if the accelerator has prepared a model already, and ValueError if its options name another
    communication hook.
    """
    from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

    class Handler(DistributedDataParallelKwargs):  # type: ignore[misc]
        def register_comm_hook(self, model: Any) -> None:
            model.register_comm_hook(state, compressed_hook)

    given = accelerator.ddp_handler or DistributedDataParallelKwargs()
    if given.comm_hook != DDPCommunicationHookType.NO:
        raise ValueError(f"the accelerator has the communication hook {given.comm_hook.value!r} already")
    if accelerator._models:
        raise RuntimeError("bagua.accelerate.compress must be called before accelerator.prepare wraps a model")
    state = CompressedState(codec, error_feedback=error_feedback)
    accelerator.ddp_handler = Handler(**vars(given))
    if error_feedback:
        # accelerate saves the state of one rank.
        accelerator.register_save_state_pre_hook(lambda *_: state.consolidate())
        accelerator.register_for_checkpointing(state)
    return state


def trainer_callback(state: CompressedState) -> Any:
    """Returns a `transformers.TrainerCallback` that adds what the ranks owe to each checkpoint of a Trainer.

        state = bagua.accelerate.compress(trainer.accelerator, "onebit", error_feedback=True)
        trainer.add_callback(bagua.accelerate.trainer_callback(state))

    To resume, load the file `TRAINER_FILE` of the checkpoint on every rank, with any number of ranks, before
    `trainer.train(resume_from_checkpoint=checkpoint)`:

        state.load_state_dict(torch.load(f"{checkpoint}/{bagua.accelerate.TRAINER_FILE}", weights_only=True))
    """
    from transformers import TrainerCallback

    class Checkpoint(TrainerCallback):  # type: ignore[misc]
        def on_save(self, args: Any, progress: Any, control: Any, **_: Any) -> None:
            state.consolidate()
            if progress.is_world_process_zero:
                folder = Path(args.output_dir, f"checkpoint-{progress.global_step}")
                torch.save(state.state_dict(), folder / TRAINER_FILE)

    return Checkpoint()
