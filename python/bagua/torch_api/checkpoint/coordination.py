"""Coordinates the ranks that save or load a checkpoint: if one of them fails, all raise an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from bagua.errors import BaguaError

from .. import env
from ..communication import _get_default_group, is_initialized
from ..process_group import Communicator

T = TypeVar("T")


class Coordinator:
    """All ranks of the job, or this process alone if there is no job."""

    def __init__(self) -> None:
        self._communicator: Communicator | None = None
        if is_initialized() or env.get_world_size() > 1:
            found = _get_default_group().get_global_communicator()
            assert isinstance(found, Communicator)
            self._communicator = found
        self.rank = 0 if self._communicator is None else self._communicator.rank()
        self.size = 1 if self._communicator is None else self._communicator.nranks()

    def together(self, what: str, work: Callable[[], T]) -> T:
        """Runs ``work`` on every rank and waits for all ranks. If it fails on one rank, all ranks raise an error."""
        failure: Exception | None = None
        result: T | None = None
        try:
            result = work()
        except Exception as found:
            failure = found
        well = failure is None
        verdicts = [well] if self._communicator is None else self._communicator.allgather_object(well)
        if failure is not None:
            raise failure
        wrong = [rank for rank, theirs in enumerate(verdicts) if not theirs]
        if wrong:
            raise BaguaError(f"rank(s) {', '.join(map(str, wrong))} failed to {what}; their own error says why")
        return result  # type: ignore[return-value]

    def from_first(self, value: T) -> T:
        """Returns rank 0's value on every rank."""
        if self._communicator is None:
            return value
        found: T = self._communicator.broadcast_object(value)
        return found

    def first_only(self, what: str, work: Callable[[], None]) -> None:
        """Runs ``work`` on rank 0; the other ranks wait for it."""
        self.together(what, work if self.rank == 0 else _nothing)


def _nothing() -> None:
    """Does nothing, on the ranks other than rank 0."""
