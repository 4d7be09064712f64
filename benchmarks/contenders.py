"""Those who race: ours through torch_api on ordinary tensors and in an arena, torch's gloo, OpenMPI through mpi4py.

A contender gives the memory of a case (`empty`), and a function that makes one call (`call`), or None where it has no
such call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from common import show_size
from torch._C._distributed_c10d import FileStore

VERBS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")
Call = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """One row of the table. `size` is in bytes, of the whole tensor: of what all_gather and all_to_all leave, and of
    what reduce_scatter, all_reduce and broadcast begin with.
    """

    verb: str
    dtype: str
    size: int

    def __str__(self) -> str:
        return f"{self.verb} of {show_size(self.size)} of {self.dtype}"

    def counts(self, ranks: int) -> tuple[int, int]:
        """Elements of a rank's input and output; 0 for no input of its own, where the verb works in place."""
        itemsize = torch.empty(0, dtype=getattr(torch, self.dtype)).element_size()
        if self.verb in ("all_reduce", "broadcast"):
            return 0, max(1, self.size // itemsize)
        chunk = max(1, self.size // itemsize // ranks)
        whole = chunk * ranks
        return {"all_gather": (chunk, whole), "reduce_scatter": (whole, chunk), "all_to_all": (whole, whole)}[self.verb]


class Buffers:
    """The tensors of one call, and the answer that a right call leaves."""

    def __init__(self, case: Case, rank: int, ranks: int, empty: Callable[[int, torch.dtype], torch.Tensor]) -> None:
        self.case, self.rank, self.ranks = case, rank, ranks
        dtype = getattr(torch, case.dtype)
        inputs, outputs = case.counts(ranks)
        self.dst = empty(outputs, dtype)
        self.src = empty(inputs, dtype) if inputs else self.dst

    def rewrite(self) -> None:
        """Puts the inputs there again, and something wrong where results will come."""
        if self.dst is not self.src:
            self.dst.fill_(-7)
        self.src.fill_(self.rank + 1)

    def check(self, contender: str) -> None:
        """AssertionError when the answer is wrong; exact, because small whole numbers are so in every dtype here."""
        n, verb = self.ranks, self.case.verb
        if verb in ("all_reduce", "reduce_scatter"):
            right = bool((self.dst == n * (n + 1) // 2).all())
        elif verb == "broadcast":
            right = bool((self.dst == 1).all())
        else:
            right = all(bool((chunk == r + 1).all()) for r, chunk in enumerate(self.dst.chunk(n)))
        if not right:
            raise AssertionError(f"{contender} gave a wrong answer on rank {self.rank}: {self.case}")


class Ours:
    """bagua on ordinary torch tensors, through torch_api."""

    name = "ours"

    def __init__(self, rank: int, ranks: int, folder: str) -> None:
        import bagua.torch_api as api

        self._api = api
        if not api.is_initialized():
            api.init_process_group(FileStore(f"{folder}/ours", ranks), rank, ranks, ranks)

    def begin(self, case: Case, copies: int, ranks: int) -> None:
        """Called on every rank before the memory of a case is asked for."""

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for a case."""
        return torch.empty(count, dtype=dtype)

    def call(self, b: Buffers) -> Call | None:
        """A function that makes the call once."""
        api, src, dst = self._api, b.src, b.dst
        total = api.ReduceOp.SUM
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

    name = "ours-arena"
    ALIGN = 4096

    @staticmethod
    def missing() -> str:
        """Why there is none; empty when there is."""
        from bagua.group import Group

        return "" if hasattr(Group, "empty") else "this build of bagua has no arenas"

    def begin(self, case: Case, copies: int, ranks: int) -> None:
        """Makes the arena, which every rank must do together."""
        from bagua.group import default

        itemsize = torch.empty(0, dtype=getattr(torch, case.dtype)).element_size()
        each = sum((count * itemsize + self.ALIGN - 1) // self.ALIGN * self.ALIGN for count in case.counts(ranks))
        group: Any = default(required=True)
        # numpy has no bfloat16: bytes, seen as what the case asks for.
        self._room = torch.from_numpy(group.empty(each * copies, "uint8"))
        self._used = 0

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A piece of the arena."""
        nbytes = count * torch.empty(0, dtype=dtype).element_size()
        piece = self._room[self._used : self._used + nbytes].view(dtype)
        self._used += (nbytes + self.ALIGN - 1) // self.ALIGN * self.ALIGN
        return piece


class Gloo(Ours):
    """torch.distributed with the gloo backend."""

    name = "gloo"

    def __init__(self, rank: int, ranks: int, folder: str) -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=FileStore(f"{folder}/gloo", ranks), rank=rank, world_size=ranks)
        # Any: torch says that it may be a number, which stands for a rank that is not a member.
        self._group: Any = dist.new_group(list(range(ranks)), backend="gloo")

    def call(self, b: Buffers) -> Call | None:
        """A function that makes the call once."""
        src, dst, group = b.src, b.dst, self._group
        chunks = list(dst.chunk(b.ranks))
        calls: dict[str, Call] = {
            "all_reduce": lambda: dist.all_reduce(dst, group=group),
            "broadcast": lambda: dist.broadcast(dst, 0, group=group),
            "all_gather": lambda: dist.all_gather(chunks, src, group=group),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(dst, src, group=group),
            "all_to_all": lambda: dist.all_to_all_single(dst, src, group=group),
        }
        return calls[b.case.verb]


class OpenMpi(Ours):
    """OpenMPI through mpi4py's buffer interface."""

    name = "openmpi"

    def __init__(self, rank: int, ranks: int, folder: str) -> None:
        from mpi4py import MPI

        self._mpi, self._comm = MPI, MPI.COMM_WORLD
        if (self._comm.Get_rank(), self._comm.Get_size()) != (rank, ranks):
            raise RuntimeError("mpirun and this benchmark number the ranks differently")

    def call(self, b: Buffers) -> Call | None:
        """A function that makes the call once; None for half precision, which MPI 3 does not know."""
        if b.src.element_size() == 2:
            return None
        mpi, comm, src, dst = self._mpi, self._comm, b.src.numpy(), b.dst.numpy()
        calls: dict[str, Call] = {
            "all_reduce": lambda: comm.Allreduce(mpi.IN_PLACE, dst, op=mpi.SUM),
            "broadcast": lambda: comm.Bcast(dst, root=0),
            "all_gather": lambda: comm.Allgather(src, dst),
            "reduce_scatter": lambda: comm.Reduce_scatter_block(src, dst, op=mpi.SUM),
            "all_to_all": lambda: comm.Alltoall(src, dst),
        }
        return calls[b.case.verb]
