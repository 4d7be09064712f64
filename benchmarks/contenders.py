"""The contenders: ours through torch_api on ordinary tensors and in an arena, ours as the backend "bagua" of
torch.distributed, torch's gloo, DeepSpeed's shared-memory all_reduce, an MPI through mpi4py.

A contender allocates the memory of a case (`empty`), and returns a function that makes one call (`call`), or None for a
case that it lacks. Buffers are NumPy arrays, because the environment of an MPI has no torch; torch views them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from common import show_size

VERBS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")
#: Element types and the NumPy type that has as many bytes: NumPy has no bfloat16.
DTYPES = {"float32": "float32", "bfloat16": "uint16", "float16": "float16"}
Call = Callable[[], Any]
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Case:
    """One row of the table. `size` is in bytes of the whole tensor: the output of all_gather and all_to_all, the input
    of reduce_scatter, all_reduce and broadcast.
    """

    verb: str
    dtype: str
    size: int

    def __str__(self) -> str:
        return f"{self.verb} of {show_size(self.size)} of {self.dtype}"

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return np.dtype(DTYPES[self.dtype]).itemsize

    def counts(self, ranks: int) -> tuple[int, int]:
        """Elements of a rank's input and output; 0 for the input of a verb that works in place."""
        if self.verb in ("all_reduce", "broadcast"):
            return 0, max(1, self.size // self.itemsize)
        chunk = max(1, self.size // self.itemsize // ranks)
        whole = chunk * ranks
        return {"all_gather": (chunk, whole), "reduce_scatter": (whole, chunk), "all_to_all": (whole, whole)}[self.verb]

    def element(self, number: int) -> Any:
        """A number as an element of the buffers: a bfloat16 is the upper half of a float32."""
        return np.float32(number).view(np.uint32) >> 16 if self.dtype == "bfloat16" else number


def ordinary(nbytes: int) -> Array:
    """Ordinary memory, aligned to a cache line as torch aligns it."""
    memory = np.empty(nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + nbytes]


class Buffers:
    """The arrays of one call, and its expected result."""

    def __init__(self, case: Case, rank: int, ranks: int, empty: Callable[[int], Array]) -> None:
        self.case, self.rank, self.ranks = case, rank, ranks
        dtype, (inputs, outputs) = DTYPES[case.dtype], case.counts(ranks)
        self.dst = empty(outputs * case.itemsize).view(dtype)
        self.src = empty(inputs * case.itemsize).view(dtype) if inputs else self.dst

    def rewrite(self) -> None:
        """Writes the input again, and a wrong value into an output that is not the input."""
        if self.dst is not self.src:
            self.dst.fill(self.case.element(99))
        self.src.fill(self.case.element(self.rank + 1))

    def check(self, contender: str) -> None:
        """AssertionError for a wrong result. Exact, because every dtype holds these small whole numbers exactly."""
        n, verb, element = self.ranks, self.case.verb, self.case.element
        if verb in ("all_reduce", "reduce_scatter"):
            right = bool((self.dst == element(n * (n + 1) // 2)).all())
        elif verb == "broadcast":
            right = bool((self.dst == element(1)).all())
        else:
            right = all(bool((chunk == element(r + 1)).all()) for r, chunk in enumerate(np.split(self.dst, n)))
        if not right:
            raise AssertionError(f"{contender} returned a wrong result on rank {self.rank}: {self.case}")


class Contender:
    """A library that has joined the ranks."""

    def __init__(self, rank: int, ranks: int, folder: str) -> None:
        self.ranks = ranks
        #: Allocates bytes for a case.
        self.empty: Callable[[int], Array] = ordinary

    def begin(self, case: Case, copies: int) -> None:
        """Called on every rank before the memory of a case is allocated."""

    def call(self, b: Buffers) -> Call | None:
        """A function that makes the call once; None for a case that the library lacks."""
        raise NotImplementedError


class Torch(Contender):
    """A contender on torch tensors."""

    def __init__(self, rank: int, ranks: int, folder: str) -> None:
        super().__init__(rank, ranks, folder)
        import torch

        torch.set_num_threads(1)

    @staticmethod
    def tensors(b: Buffers) -> tuple[Any, Any]:
        """Input and output as tensors."""
        import torch

        dtype = getattr(torch, b.case.dtype)
        src, dst = (torch.from_numpy(array.view(np.uint8)).view(dtype) for array in (b.src, b.dst))
        return src, dst


class Ours(Torch):
    """bagua on ordinary torch tensors, through torch_api."""

    def __init__(self, rank: int, ranks: int, folder: str) -> None:
        super().__init__(rank, ranks, folder)
        from torch._C._distributed_c10d import FileStore

        import bagua.torch_api as api

        self._api = api
        if not api.is_initialized():
            api.init_process_group(FileStore(f"{folder}/ours", ranks), rank, ranks, ranks)

    def call(self, b: Buffers) -> Call | None:
        """A function that makes the call once."""
        api, total = self._api, self._api.ReduceOp.SUM
        src, dst = self.tensors(b)
        calls: dict[str, Call] = {
            "all_reduce": lambda: api.allreduce_inplace(dst, total),
            "broadcast": lambda: api.broadcast(dst, 0),
            "all_gather": lambda: api.allgather(src, dst),
            "reduce_scatter": lambda: api.reduce_scatter(src, dst, total),
            "all_to_all": lambda: api.alltoall(src, dst),
        }
        return calls[b.case.verb]


class OursInArena(Ours):
    """The same verbs on tensors that lie in an arena, as registered buckets do."""

    ALIGN = 4096

    def __init__(self, rank: int, ranks: int, folder: str) -> None:
        super().__init__(rank, ranks, folder)
        self.empty = self._part

    def begin(self, case: Case, copies: int) -> None:
        """Allocates the arena: a collective call."""
        from bagua.group import default

        each = sum(-(-count * case.itemsize // self.ALIGN) * self.ALIGN for count in case.counts(self.ranks))
        self._arena: Array = default(required=True).empty(each * copies, "uint8")
        self._used = 0

    def _part(self, nbytes: int) -> Array:
        part = self._arena[self._used : self._used + nbytes]
        self._used += -(-nbytes // self.ALIGN) * self.ALIGN
        return part


class Gloo(Torch):
    """torch.distributed with the gloo backend."""

    BACKEND = "gloo"

    def __init__(self, rank: int, ranks: int, folder: str) -> None:
        super().__init__(rank, ranks, folder)
        import torch.distributed as dist
        from torch._C._distributed_c10d import FileStore

        if not dist.is_initialized():
            dist.init_process_group("gloo", store=FileStore(f"{folder}/gloo", ranks), rank=rank, world_size=ranks)
        # Any: torch declares it as a group or the number of a rank that is not a member.
        self._group: Any = dist.new_group(list(range(ranks)), backend=self.BACKEND)

    def call(self, b: Buffers) -> Call | None:
        """A function that makes the call once."""
        import torch.distributed as dist

        (src, dst), group = self.tensors(b), self._group
        chunks = list(dst.chunk(b.ranks))
        calls: dict[str, Call] = {
            "all_reduce": lambda: dist.all_reduce(dst, group=group),
            "broadcast": lambda: dist.broadcast(dst, 0, group=group),
            "all_gather": lambda: dist.all_gather(chunks, src, group=group),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(dst, src, group=group),
            "all_to_all": lambda: dist.all_to_all_single(dst, src, group=group),
        }
        return calls[b.case.verb]


class OursInTorch(Gloo):
    """The same calls of torch.distributed with the backend "bagua"."""

    BACKEND = "bagua"

    def __init__(self, rank: int, ranks: int, folder: str) -> None:
        import bagua.c10d  # noqa: F401 - registers the backend with a torch that does not look for it

        super().__init__(rank, ranks, folder)


class DeepSpeed(Torch):
    """DeepSpeed's all_reduce in shared memory, which serves inference on CPUs in place of gloo's."""

    def __init__(self, rank: int, ranks: int, folder: str) -> None:
        super().__init__(rank, ranks, folder)
        import deepspeed.comm.comm as dist

        dist.init_distributed("gloo", verbose=False)
        if dist.cdb.shm_comm_op is None:
            raise RuntimeError("DeepSpeed could not compile its operation in shared memory")
        self._dist = dist

    def call(self, b: Buffers) -> Call | None:
        """A function that makes the call once; None for the verbs that DeepSpeed passes to gloo."""
        all_reduce, (_, dst) = self._dist.inference_all_reduce, self.tensors(b)
        return (lambda: all_reduce(dst)) if b.case.verb == "all_reduce" else None


class Mpi(Contender):
    """An MPI through mpi4py's buffer interface, with the types of the buffers given: that is its fastest spelling."""

    def __init__(self, rank: int, ranks: int, folder: str) -> None:
        super().__init__(rank, ranks, folder)
        from mpi4py import MPI

        self._mpi, self._comm = MPI, MPI.COMM_WORLD
        if (self._comm.Get_rank(), self._comm.Get_size()) != (rank, ranks):
            raise RuntimeError(f"the launcher numbers this rank {rank}, the MPI library {self._comm.Get_rank()}")

    def call(self, b: Buffers) -> Call | None:
        """A function that makes the call once; None for half precision, which the MPI standard lacks."""
        if b.case.itemsize == 2:
            return None
        mpi, comm = self._mpi, self._comm
        src, dst = (b.src, mpi.FLOAT), (b.dst, mpi.FLOAT)
        calls: dict[str, Call] = {
            "all_reduce": lambda: comm.Allreduce(mpi.IN_PLACE, dst),
            "broadcast": lambda: comm.Bcast(dst),
            "all_gather": lambda: comm.Allgather(src, dst),
            "reduce_scatter": lambda: comm.Reduce_scatter_block(src, dst),
            "all_to_all": lambda: comm.Alltoall(src, dst),
        }
        return calls[b.case.verb]


OURS = ("ours", "ours-arena")
#: Compared with DeepSpeed, which users also call through a module of torch.distributed's form.
OURS_IN_TORCH = "ours-c10d"
MPIS = ("impi", "mpich", "openmpi")
CONTENDERS: dict[str, type[Contender]] = {
    "ours": Ours,
    "ours-arena": OursInArena,
    OURS_IN_TORCH: OursInTorch,
    "gloo": Gloo,
    "deepspeed": DeepSpeed,
    **dict.fromkeys(MPIS, Mpi),
}
