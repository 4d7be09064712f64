"""The front ends that train a model, each a value: how it wraps and steps, and what it does not offer."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import bagua.horovod.torch as hvd
import bagua.torch_api as bagua
from bagua.torch_api.data_parallel import DistributedDataParallel

Optimizers = Callable[[list[nn.Parameter]], Any]
Options = Mapping[str, Any]

#: The rows that `make test` trains by every front end. It leaves the others out where they show little more: torch's
#: DistributedDataParallel on the backend "bagua" is torch's own code on operations that test_c10d.py compares with
#: gloo's, and Lightning's strategies train by our wrapper.
BRIEF = (
    "all_ranks_begin_as_rank_0",
    "evaluation_between_steps",
    "no_sync_with_clipping",
    "gradients_accumulate_under_no_sync",
    "ranks_take_different_branches",
    "outputs_of_which_the_loss_takes_some",
    "one_parameter_at_the_root",
    "sparse_gradients",
    "ignored_and_frozen_parameters",
    "tied_weights",
    "two_models_in_turn",
    "nan_stays_nan",
    "join_ends_early",
    "bf16_hook",
)


class Training:
    """One model that trains through a front end."""

    def __init__(self, module: nn.Module, model: Any, optimizer: Any, no_sync: Callable[[], Any]) -> None:
        self.module, self.model, self.optimizer, self.no_sync = module, model, optimizer, no_sync
        self.scaler: Any = None

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()


class FrontEnd:
    """`lacks` has the reason for everything that a row of the table may need and this one does not offer."""

    name: str
    #: That of the default group of torch.distributed.
    backend = "gloo"
    lacks: Mapping[str, str] = {}
    #: Whether the buffers are those of rank 0 before each training forward.
    has_buffers = True
    #: The rows that `make test` trains by it, if not all.
    quick: Collection[str] | None = None

    def begin(self, module: nn.Module, optimizers: Optimizers, options: Options) -> Training:
        """Wraps the model, with the options as torch's DistributedDataParallel names them."""
        raise NotImplementedError

    def why_not(self, needs: frozenset[str]) -> str:
        """The reason if something of this is not offered, else nothing."""
        return "; ".join(self.lacks[need] for need in sorted(needs) if need in self.lacks)

    def is_slow(self, name: str, row_is: bool) -> bool:
        """Returns True if `make test` does not train this row with the front end."""
        return row_is or (self.quick is not None and name not in self.quick)


def trainable(module: nn.Module) -> list[nn.Parameter]:
    return [param for param in module.parameters() if param.requires_grad]


class Wrapper(FrontEnd):
    """A class with the interface of torch's DistributedDataParallel, on the default group."""

    def __init__(self, name: str, made: Callable[..., Any], backend: str = "gloo") -> None:
        self.name, self._made, self.backend = name, made, backend
        self.quick = None if backend == "gloo" else BRIEF
        self._defaults = {"gradient_as_bucket_view": True} if made is TorchDDP else {}

    def begin(self, module: nn.Module, optimizers: Optimizers, options: Options) -> Training:
        model = self._made(module, **{**self._defaults, **options})
        return Training(module, model, optimizers(trainable(module)), model.no_sync)


_ONLY_WRAPPERS = {
    "forward decides": "gradients accumulate where the backward runs under no_sync",
    "gradients of unused parameters": "a gradient that no backward of a rank touched stays as it is there",
    "sharded optimizers": "the optimizer's state becomes rank 0's, and must be whole there",
    "changing_divisor": "uneven inputs are joined by the wrappers alone",
    "join": "uneven inputs are joined by the wrappers alone",
    "hooks": "an algorithm compresses there, not a hook",
    "init_sync": "parameters always become rank 0's",
    "forward_sync_buffers": "no such option",
    "static_graph": "no such option; a layer in several re-entrant checkpoints is an error",
}


class WithBagua(FrontEnd):
    """module.with_bagua(…)."""

    name = "with_bagua"
    lacks = _ONLY_WRAPPERS

    def begin(self, module: nn.Module, optimizers: Optimizers, options: Options) -> Training:
        optimizer = optimizers(trainable(module))
        algorithm = bagua.algorithms.GradientAllReduceAlgorithm()
        module.with_bagua([optimizer], algorithm, **bagua_options(options, "do_flatten"))
        # Both names of the same.
        names = itertools.cycle([lambda: module.bagua_ddp.no_sync(), lambda: bagua.no_sync(module)])
        return Training(module, module, optimizer, lambda: next(names)())


def bagua_options(options: Options, flatten: str) -> dict[str, Any]:
    """Options of torch's DistributedDataParallel under the names that with_bagua and Lightning's strategies have."""
    found = dict(options)
    if "bucket_cap_mb" in found:
        found["bucket_size"] = max(1, int(found.pop("bucket_cap_mb") * 2**20))
    if "gradient_as_bucket_view" in found:
        found[flatten] = found.pop("gradient_as_bucket_view")
    return found


class Horovod(FrontEnd):
    """hvd.DistributedOptimizer."""

    name = "Horovod"
    lacks = _ONLY_WRAPPERS | {
        "no_sync": "gradients accumulate by backward_passes_per_step",
        "find_unused_parameters": "a parameter that no rank used has a gradient of zeros",
        "bucket_cap_mb": "BAGUA_DEFAULT_BUCKET_SIZE is the size of messages",
        "gradient_as_bucket_view": "no such option",
        "ignored": "scripts name what is reduced by named_parameters",
        "hooks": "compression is an argument",
        "buffers": "buffers are not broadcast",
        "broadcast_buffers": "buffers are not broadcast",
        "several backwards": "a second backward before the step is an error unless backward_passes_per_step counts it",
        "no step": "gradients are averaged when optimizer.step() or synchronize() returns",
        "clipping": "gradients are there after optimizer.synchronize(), which scripts call before they clip",
    }
    has_buffers = False

    def begin(self, module: nn.Module, optimizers: Optimizers, options: Options) -> Training:
        hvd.init()
        hvd.broadcast_parameters(module.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(optimizers(trainable(module)), **options)
        return Training(module, module, optimizer, contextlib.nullcontext)


class Fabric(FrontEnd):
    """Lightning's Fabric with Bagua's strategy; `kit` has the classes of one of its two names."""

    name = "Lightning"
    quick = BRIEF
    lacks = _ONLY_WRAPPERS | {
        "scaler": "Fabric scales losses by its precision plugins",
        "dtypes": "Fabric converts inputs to the dtype of its precision",
    }

    def __init__(self, kit: Any = None) -> None:
        self._kit = kit

    def begin(self, module: nn.Module, optimizers: Optimizers, options: Options) -> Training:
        strategy = self._kit.fabric_strategy(**bagua_options(options, "flatten"))
        fabric = self._kit.fabric.Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
        fabric.launch()
        model, optimizer = fabric.setup(module, optimizers(trainable(module)))
        return _InFabric(fabric, module, model, optimizer)


class _InFabric(Training):
    """A training whose backward and no_sync are Fabric's."""

    def __init__(self, fabric: Any, module: nn.Module, model: Any, optimizer: Any) -> None:
        def no_sync() -> AbstractContextManager[None]:
            context: AbstractContextManager[None] = fabric.no_backward_sync(model)
            return context

        super().__init__(module, model, optimizer, no_sync)
        self._fabric = fabric

    def backward(self, loss: torch.Tensor) -> None:
        self._fabric.backward(loss)


#: What the others must be equal to.
REFERENCE = Wrapper("DDP on gloo", TorchDDP)
#: All but Lightning, which takes seconds to import.
FRONT_ENDS: dict[str, FrontEnd] = {
    front_end.name: front_end
    for front_end in (
        WithBagua(),
        Wrapper("the wrapper", DistributedDataParallel),
        Wrapper("DDP on bagua", TorchDDP, "bagua"),
        Horovod(),
    )
}
