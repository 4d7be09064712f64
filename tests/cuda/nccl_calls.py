"""The strict libnccl by ctypes, for scenarios that keep its rules or break them."""

from __future__ import annotations

import ctypes
import os
from typing import Any

from tests.cuda.driver import Driver

SUCCESS, INTERNAL, INVALID_ARGUMENT, INVALID_USAGE, IN_PROGRESS = 0, 3, 4, 5, 7
FLOAT32, SUM = 7, 0
UNDEFINED = -(1 << 31)


class Config(ctypes.Structure):
    """The configuration of NCCL 2.19."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga", ctypes.c_int),
        ("least", ctypes.c_int),
        ("most", ctypes.c_int),
        ("net", ctypes.c_char_p),
        ("split", ctypes.c_int),
    )


class Id(ctypes.Structure):
    """A unique id, which is passed by value."""

    _fields_ = (("internal", ctypes.c_char * 128),)


class Nccl:
    """Calls of the library beside the simulated driver, in a process that has started it."""

    def __init__(self, cuda: Driver) -> None:
        self.cuda = cuda
        self.library = ctypes.CDLL(os.path.join(os.path.dirname(os.environ["BAGUA_LIBCUDA"]), "libnccl.so.2"))
        self.library.ncclGetLastError.restype = ctypes.c_char_p

    def code(self, name: str, *arguments: Any) -> int:
        """What a call returns."""
        passed = [ctypes.c_int64(each) if isinstance(each, int) else each for each in arguments]
        return int(getattr(self.library, name)(*passed))

    def id(self) -> Id:
        """A new unique id."""
        made = Id()
        assert self.code("ncclGetUniqueId", ctypes.byref(made)) == SUCCESS
        return made

    def begin(self, ranks: int, unique: Id, rank: int, **fields: int) -> tuple[int, Any]:
        """Begins to make a communicator: what the call returns, and the communicator."""
        config = Config(48, 0xCAFEBEEF, 21900, 0, UNDEFINED, UNDEFINED, UNDEFINED, None, UNDEFINED)
        for name, value in fields.items():
            setattr(config, name, value)
        made = ctypes.c_void_p()
        init = self.library.ncclCommInitRankConfig
        init.argtypes = (ctypes.c_void_p, ctypes.c_int, Id, ctypes.c_int, ctypes.c_void_p)
        code = init(ctypes.byref(made), ranks, unique, rank, ctypes.byref(config))
        return code, ctypes.c_void_p(made.value)

    def state(self, communicator: Any) -> int:
        """One poll."""
        result = ctypes.c_int()
        assert self.code("ncclCommGetAsyncError", communicator, ctypes.byref(result)) == SUCCESS
        return result.value

    def settle(self, *communicators: Any) -> list[int]:
        """Polls until none is in progress."""
        while IN_PROGRESS in (found := [self.state(each) for each in communicators]):
            pass
        return found

    def alone(self) -> Any:
        """A communicator of one rank."""
        code, communicator = self.begin(1, self.id(), 0)
        assert code == IN_PROGRESS
        assert self.settle(communicator) == [SUCCESS]
        return communicator

    def end(self, communicator: Any) -> None:
        """In order."""
        assert self.code("ncclCommFinalize", communicator) == IN_PROGRESS
        assert self.settle(communicator) == [SUCCESS]
        assert self.code("ncclCommDestroy", communicator) == SUCCESS

    def all_reduce(self, communicator: Any, stream: int, source: int, target: int, count: int) -> int:
        """Begins to enqueue a sum of float32."""
        return self.code("ncclAllReduce", source, target, count, FLOAT32, SUM, communicator, stream)
