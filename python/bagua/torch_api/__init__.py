"""Bagua for torch, with the names of the original Bagua. Usually imported as ``import bagua.torch_api as bagua``."""

from bagua.require_torch import require

require("bagua.torch_api")

from . import (
    algorithms,
    bucket,
    checkpoint,
    communication,
    contrib,
    data_parallel,
    default_collectives,
    distributed,
    env,
    model_parallel,
    moe,
    patches,
    tensor,
    utils,
)
from .communication import (
    ReduceOp,
    destroy_process_group,
    empty,
    from_torch_group,
    get_backend,
    init_process_group,
    is_initialized,
    new_group,
)
from .default_collectives import *  # noqa: F403 - the collectives, which are listed there
from .distributed import (
    BaguaModule,
    algorithm_of,
    flags,
    no_sync,
    raise_flag,
    set_weight,
    skip_step,
    unwrap,
    with_bagua,
)
from .env import get_local_rank, get_local_size, get_rank, get_world_size
from .membership.elastic import rejoined
from .membership.rebuild import Rebuilt, rebuild
from .tensor import BaguaTensor

patches.apply()

__all__ = [
    "BaguaModule",
    "BaguaTensor",
    "Rebuilt",
    "ReduceOp",
    "algorithm_of",
    "algorithms",
    "bucket",
    "checkpoint",
    "communication",
    "contrib",
    "data_parallel",
    "destroy_process_group",
    "distributed",
    "empty",
    "env",
    "flags",
    "from_torch_group",
    "get_backend",
    "get_local_rank",
    "get_local_size",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "is_initialized",
    "model_parallel",
    "moe",
    "new_group",
    "no_sync",
    "raise_flag",
    "rebuild",
    "rejoined",
    "set_weight",
    "skip_step",
    "tensor",
    "unwrap",
    "utils",
    "with_bagua",
]
__all__ += default_collectives.__all__


def __dir__() -> list[str]:
    """Lists public names only."""
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
