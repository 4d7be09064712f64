"""The name under which scripts import the API: ``import bagua.horovod.torch as hvd``."""

from typing import TYPE_CHECKING

from bagua.horovod import Handle as Handle
from bagua.horovod import HorovodInternalError as HorovodInternalError
from bagua.horovod import __all__ as __all__

# Not from the package at once: mypy does not know what a list has that is the sum of others.
from bagua.horovod.basics import *  # noqa: F403
from bagua.horovod.compression import *  # noqa: F403
from bagua.horovod.data_movement import *  # noqa: F403
from bagua.horovod.functions import *  # noqa: F403
from bagua.horovod.handles import *  # noqa: F403
from bagua.horovod.optimizer import *  # noqa: F403
from bagua.horovod.reductions import *  # noqa: F403

if not TYPE_CHECKING:
    from bagua.horovod.unsupported import find

    __getattr__ = find
