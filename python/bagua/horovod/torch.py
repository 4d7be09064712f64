"""The name under which scripts import the API: ``import bagua.horovod.torch as hvd``."""

from bagua.horovod import *  # noqa: F403
from bagua.horovod import __all__ as __all__
