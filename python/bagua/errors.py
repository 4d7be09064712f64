"""What can go wrong between ranks: one class for each reaction of a caller.

Bad arguments are `ValueError`, `TypeError` or `NotImplementedError`, raised before anything is sent. Everything here
is raised afterwards, and leaves the group unusable: `bagua.shutdown()` works, and a new group can be built in the same
process. Only `PeerRaisedError` for an object that a rank could not pickle leaves the group as it was. Ranks in these
errors are ranks of the world.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from typing import Any

__all__ = [
    "AbortedError",
    "BaguaError",
    "BaguaTimeoutError",
    "DeviceError",
    "MismatchError",
    "PeerLostError",
    "PeerRaisedError",
]


def _again(cls: type[BaguaError], text: str, fields: dict[str, Any]) -> BaguaError:
    return cls(text, **fields)


@dataclass(eq=False, repr=False, match_args=False)
class BaguaError(RuntimeError):
    """Base of all errors of communication, and the error of a group that cannot be built or used."""

    text: InitVar[str] = ""
    """What happened: the only argument without a name, and `str` of the error."""
    record: str | None = field(default=None, kw_only=True)
    """Path of the file with this rank's last operations, when its group failed and the file could be written."""

    def __post_init__(self, text: str) -> None:
        super().__init__(text)

    def __reduce__(self) -> tuple[Any, ...]:
        # The default would call the class with its text alone, and lose the fields in another process.
        return _again, (type(self), str(self), self.__dict__)


# An argument, and no attribute.
del BaguaError.text  # type: ignore[attr-defined]


@dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class _During:
    """What an error may know of the operation that it ended."""

    during: str = ""
    """What this rank was doing, "" when it was doing nothing."""
    bucket: str = ""
    """Bucket or other label of that operation, "" when it has none."""
    done_bytes: int = 0
    """Bytes that were received and used."""
    total_bytes: int = 0
    """Bytes that the operation needs in all."""


@dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class PeerLostError(BaguaError, _During):
    """A peer died, froze, left while it was needed, or was cut off."""

    rank: int = -1
    """The rank that is gone."""
    host: str = ""
    """Name of its host."""
    reason: str = ""
    """How that was noticed."""
    noticed_by: int = -1
    """The rank that noticed first."""


@dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class BaguaTimeoutError(BaguaError, TimeoutError, _During):
    """A deadline passed although the peers are alive."""

    missing: tuple[int, ...] = ()
    """The ranks that had not done their part; empty when only this process's communication thread was waited for."""
    after: float = 0.0
    """The deadline that was set, in seconds."""
    noticed_by: int = -1
    """The rank whose deadline passed."""

    def __post_init__(self, text: str) -> None:
        super().__post_init__(text)
        self.missing = tuple(self.missing)


@dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class PeerRaisedError(BaguaError):
    """Another rank reported an exception."""

    rank: int = -1
    """The rank that raised."""
    host: str = ""
    """Name of its host."""
    kind: str = ""
    """Class of its exception, e.g. "ValueError"."""
    message: str = ""
    """Text of its exception."""


class MismatchError(BaguaError):
    """Ranks disagree on what to do, in which order, or on which data; the text says what each rank was doing."""


class AbortedError(BaguaError):
    """The user or the engine gave up on the group."""


@dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class DeviceError(BaguaError):
    """A call of a device's driver, or of a library over it, failed on this rank."""

    api: str = ""
    """The function, e.g. "cuMemcpyDtoHAsync" or "ncclAllReduce"."""
    code: int = 0
    """What it returned."""
    name: str = ""
    """The name of that code, e.g. "CUDA_ERROR_ILLEGAL_ADDRESS"."""
    device: int = -1
    """Number of the device in this process."""
