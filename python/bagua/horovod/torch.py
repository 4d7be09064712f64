"""Horovod's API for torch, over Bagua.

Scripts write ``import bagua.horovod.torch as hvd`` in place of ``import horovod.torch as hvd``. Names and meaning are
those of Horovod's documented API. Operations match by their order, not by their names, and take CPU tensors.
"""

from typing import TYPE_CHECKING

from bagua.handle import Handle as Handle

from . import unsupported
from .basics import HorovodInternalError as HorovodInternalError
from .basics import cross_rank as cross_rank
from .basics import cross_size as cross_size
from .basics import init as init
from .basics import is_initialized as is_initialized
from .basics import local_rank as local_rank
from .basics import local_size as local_size
from .basics import poll as poll
from .basics import rank as rank
from .basics import shutdown as shutdown
from .basics import size as size
from .basics import synchronize as synchronize
from .collectives import Average as Average
from .collectives import Compression as Compression
from .collectives import Max as Max
from .collectives import Min as Min
from .collectives import Product as Product
from .collectives import Sum as Sum
from .collectives import allgather as allgather
from .collectives import allgather_async as allgather_async
from .collectives import allgather_object as allgather_object
from .collectives import allreduce as allreduce
from .collectives import allreduce_ as allreduce_
from .collectives import allreduce_async as allreduce_async
from .collectives import allreduce_async_ as allreduce_async_
from .collectives import alltoall as alltoall
from .collectives import alltoall_async as alltoall_async
from .collectives import barrier as barrier
from .collectives import broadcast as broadcast
from .collectives import broadcast_ as broadcast_
from .collectives import broadcast_async as broadcast_async
from .collectives import broadcast_async_ as broadcast_async_
from .collectives import broadcast_object as broadcast_object
from .optimizer import DistributedOptimizer as DistributedOptimizer
from .optimizer import broadcast_optimizer_state as broadcast_optimizer_state
from .optimizer import broadcast_parameters as broadcast_parameters

if not TYPE_CHECKING:
    __getattr__ = unsupported.find
