"""Horovod's API for torch, over Bagua.

Scripts write ``import bagua.horovod.torch as hvd`` in place of ``import horovod.torch as hvd``.
Names and meaning are those of Horovod's documented API. Operations match by their order, not by their names.
"""

from typing import TYPE_CHECKING

from bagua.torch_needed import require

require("bagua.horovod")

from bagua.errors import BaguaError as HorovodInternalError
from bagua.handle import Handle

from . import (
    basics,
    compression,
    data_movement,
    functions,
    handles,
    optimizer,
    reductions,
    unsupported,
)
from .basics import *  # noqa: F403
from .compression import *  # noqa: F403
from .data_movement import *  # noqa: F403
from .functions import *  # noqa: F403
from .handles import *  # noqa: F403
from .optimizer import *  # noqa: F403
from .reductions import *  # noqa: F403

# Each module lists its own.
__all__ = ["Handle", "HorovodInternalError"]
__all__ += basics.__all__
__all__ += compression.__all__
__all__ += data_movement.__all__
__all__ += functions.__all__
__all__ += handles.__all__
__all__ += optimizer.__all__
__all__ += reductions.__all__

if not TYPE_CHECKING:
    __getattr__ = unsupported.find
