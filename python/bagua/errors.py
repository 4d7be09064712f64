"""Errors between ranks: one class for each way in which a caller may react.

Bad arguments raise `ValueError`, `TypeError` or `NotImplementedError` before anything is sent. The errors here are
raised after that, and the group is then unusable: call `bagua.shutdown()`, and build a new group in the same process if
needed. One exception: the group stays usable after a `PeerRaisedError` about an object that a rank could not pickle.
Ranks in these errors are ranks of the world.
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
    """Base of all communication errors. Raised itself if a group cannot be built or used."""

    text: InitVar[str] = ""
    """Text of the error, and the only positional argument."""
    record: str | None = field(default=None, kw_only=True)
    """Path of the file with this rank's last operations; None unless its group failed and the file could be written."""

    def __post_init__(self, text: str) -> None:
        super().__init__(text)

    def __reduce__(self) -> tuple[Any, ...]:
        # The default would pass only the text, and lose the fields when the error is unpickled.
        return _again, (type(self), str(self), self.__dict__)


# `text` is an argument, not an attribute.
del BaguaError.text  # type: ignore[attr-defined]


@dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class _During:
    """The operation that an error ended, as far as it is known."""

    during: str = ""
    """The operation of this rank, such as "all_reduce(sum)"; "" if there was none."""
    bucket: str = ""
    """Bucket or other label of the operation; "" if it has none."""
    done_bytes: int = 0
    """Number of bytes received and used before the error."""
    total_bytes: int = 0
    """Total number of bytes that the operation receives."""


@dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class PeerLostError(BaguaError, _During):
    """A peer died, froze, was cut off, or left while it was needed."""

    rank: int = -1
    """The lost rank."""
    host: str = ""
    """Name of its host."""
    reason: str = ""
    """How the loss was noticed."""
    noticed_by: int = -1
    """The rank that noticed the loss first."""


@dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class BaguaTimeoutError(BaguaError, TimeoutError, _During):
    """A timeout expired although the peers are alive."""

    missing: tuple[int, ...] = ()
    """Ranks that had not done their part; empty if the wait was only for this process's communication thread."""
    after: float = 0.0
    """The timeout, in seconds."""
    noticed_by: int = -1
    """The rank whose timeout expired."""

    def __post_init__(self, text: str) -> None:
        super().__post_init__(text)
        self.missing = tuple(self.missing)


@dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class PeerRaisedError(BaguaError):
    """Another rank raised an exception and reported it."""

    rank: int = -1
    """The rank that raised."""
    host: str = ""
    """Name of its host."""
    kind: str = ""
    """Class name of the exception, such as "ValueError"."""
    message: str = ""
    """Text of the exception."""


class MismatchError(BaguaError):
    """Ranks disagree on the operation, its order or its data. The text says what each rank was doing."""


class AbortedError(BaguaError):
    """The user or the engine aborted the group."""


@dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class DeviceError(BaguaError):
    """A call of a device's driver, or of a library on top of it, failed on this rank."""

    api: str = ""
    """The function that failed, such as "cuMemcpyDtoHAsync" or "ncclAllReduce"."""
    code: int = 0
    """The error code that the function returned."""
    name: str = ""
    """Name of the error code, such as "CUDA_ERROR_ILLEGAL_ADDRESS"."""
    device: int = -1
    """Number of the device in this process."""
