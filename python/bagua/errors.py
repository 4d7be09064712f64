"""What can go wrong between ranks: one class for each reaction of a caller.

Bad arguments are `ValueError`, `TypeError` or `NotImplementedError`, raised before anything is sent. Everything here
is raised afterwards, and leaves the group unusable: `bagua.shutdown()` works, and a new group can be built in the same
process. Ranks in these errors are ranks of the world.
"""

from __future__ import annotations

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


class BaguaError(RuntimeError):
    """Base of all errors of communication, and the error of a group that cannot be built or used."""

    record: str | None
    """Path of the file with this rank's last operations, when its group failed and the file could be written."""

    def __init__(self, text: str = "", *, record: str | None = None) -> None:
        super().__init__(text)
        self.record = record

    def __reduce__(self) -> tuple[Any, ...]:
        # The default would call the class with its text alone, and lose the fields in another process.
        return _again, (type(self), str(self), self.__dict__)


class _During:
    """What an error may know of the operation that it ended."""

    during: str
    """What this rank was doing, "" when it was doing nothing."""
    bucket: str
    """Bucket or other label of that operation, "" when it has none."""
    done_bytes: int
    """Bytes that were received and used."""
    total_bytes: int
    """Bytes that the operation needs in all."""

    def _note(self, during: str = "", bucket: str = "", done_bytes: int = 0, total_bytes: int = 0) -> None:
        self.during = during
        self.bucket = bucket
        self.done_bytes = done_bytes
        self.total_bytes = total_bytes


class PeerLostError(BaguaError, _During):
    """A peer died, froze, left while it was needed, or was cut off."""

    rank: int
    """The rank that is gone."""
    host: str
    """Name of its host."""
    reason: str
    """How that was noticed."""
    noticed_by: int
    """The rank that noticed first."""

    def __init__(
        self,
        text: str = "",
        *,
        rank: int = -1,
        host: str = "",
        reason: str = "",
        noticed_by: int = -1,
        record: str | None = None,
        **progress: Any,
    ) -> None:
        super().__init__(text, record=record)
        self._note(**progress)
        self.rank = rank
        self.host = host
        self.reason = reason
        self.noticed_by = noticed_by


class BaguaTimeoutError(BaguaError, TimeoutError, _During):
    """A deadline passed although the peers are alive."""

    missing: tuple[int, ...]
    """The ranks that had not done their part; empty when only this process's communication thread was waited for."""
    after: float
    """The deadline that was set, in seconds."""
    noticed_by: int
    """The rank whose deadline passed."""

    def __init__(
        self,
        text: str = "",
        *,
        missing: tuple[int, ...] = (),
        after: float = 0.0,
        noticed_by: int = -1,
        record: str | None = None,
        **progress: Any,
    ) -> None:
        super().__init__(text, record=record)
        self._note(**progress)
        self.missing = tuple(missing)
        self.after = after
        self.noticed_by = noticed_by


class PeerRaisedError(BaguaError):
    """Another rank reported an exception."""

    rank: int
    """The rank that raised."""
    host: str
    """Name of its host."""
    kind: str
    """Class of its exception, e.g. "ValueError"."""
    message: str
    """Text of its exception."""

    def __init__(
        self,
        text: str = "",
        *,
        rank: int = -1,
        host: str = "",
        kind: str = "",
        message: str = "",
        record: str | None = None,
    ) -> None:
        super().__init__(text, record=record)
        self.rank = rank
        self.host = host
        self.kind = kind
        self.message = message


class MismatchError(BaguaError):
    """Ranks disagree on what to do, in which order, or on which data; the text says what each rank was doing."""


class AbortedError(BaguaError):
    """The user or the engine gave up on the group."""


class DeviceError(BaguaError):
    """A call of a device's driver, or of a library over it, failed on this rank."""

    api: str
    """The function, e.g. "cuMemcpyDtoHAsync" or "ncclAllReduce"."""
    code: int
    """What it returned."""
    name: str
    """The name of that code, e.g. "CUDA_ERROR_ILLEGAL_ADDRESS"."""
    device: int
    """Number of the device in this process."""

    def __init__(
        self,
        text: str = "",
        *,
        api: str = "",
        code: int = 0,
        name: str = "",
        device: int = -1,
        record: str | None = None,
    ) -> None:
        super().__init__(text, record=record)
        self.api = api
        self.code = code
        self.name = name
        self.device = device
