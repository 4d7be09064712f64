"""Process groups: sets of ranks, their communicators, and collectives on torch tensors. No default group."""

from bagua.handle import AnyHandle as Handle
from bagua.torch_operand import DTYPES, check_on_cpu, check_place, dtype_code

from .groups import NON_COMM_MEMBER, AnyCommunicator, Communicator, NonMember, ProcessGroup
from .reduce_op import ReduceOp

__all__ = [
    "DTYPES",
    "NON_COMM_MEMBER",
    "AnyCommunicator",
    "Communicator",
    "Handle",
    "NonMember",
    "ProcessGroup",
    "ReduceOp",
    "check_on_cpu",
    "check_place",
    "dtype_code",
]
