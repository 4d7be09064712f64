"""Bagua: communication for data-parallel training, for any framework.

The verbs here run on the default group. They take NumPy arrays, DLPack tensors in host memory, and anything with the
buffer protocol:

    import numpy as np
    import bagua

    bagua.init()
    x = np.ones(4, dtype=np.float32)
    bagua.all_reduce(x)
    if bagua.rank() == 0:
        print(x, bagua.world_size())
    bagua.shutdown()

Verbs whose names end in `_object` take anything that can be pickled.

Nothing here imports torch; `bagua.torch_api` does.
"""

from bagua import conflicting_packages as _distributions
from bagua import default_group as _default_group
from bagua import extension as _engine
from bagua import group
from bagua.array_buckets import Bucket, Engine
from bagua.codecs import Codec
from bagua.default_group import *  # noqa: F403 - the verbs, which are listed there
from bagua.errors import (
    AbortedError,
    BaguaError,
    BaguaTimeoutError,
    DeviceError,
    MismatchError,
    PeerLostError,
    PeerRaisedError,
)
from bagua.group import Group, rank, shutdown, stats, world_size
from bagua.handle import Handle
from bagua.initialize import init
from bagua.records import flight_recorder

__version__ = _engine.version()
_distributions.warn()

__all__ = [
    "AbortedError",
    "BaguaError",
    "BaguaTimeoutError",
    "Bucket",
    "Codec",
    "DeviceError",
    "Engine",
    "Group",
    "Handle",
    "MismatchError",
    "PeerLostError",
    "PeerRaisedError",
    "__version__",
    "flight_recorder",
    "group",
    "init",
    "rank",
    "shutdown",
    "stats",
    "world_size",
]
__all__ += _default_group.__all__
