"""When rank 0's buffers travel, if the ranks exchange gradients."""

from __future__ import annotations


class BufferSchedule:
    """Decides when the ranks get rank 0's buffers, so that training has the bits of torch's DistributedDataParallel.

    torch sends buffers before each forward that follows a training forward outside ``no_sync``, evaluation included.
    Here they are sent when the backward of that forward has exchanged its gradients, with what a checkpoint has changed
    in the backward. Training reads the same values, and all ranks evaluate alike without communication. A forward that
    no such backward has followed, as the first of two in one step, has its buffers sent before the next one.
    """

    def __init__(self) -> None:
        # The last training forward was outside `no_sync`, or none was yet.
        self._due = True
        # Its buffers were sent.
        self._sent = False

    @property
    def wait(self) -> bool:
        """True if the next training forward begins with rank 0's buffers."""
        return self._due and not self._sent

    def forward_begins(self, *, syncs: bool) -> bool:
        """A training forward begins, outside ``no_sync`` if ``syncs``: True if buffers have to be sent before it."""
        before, self._due, self._sent = self.wait, syncs, False
        return before

    def gradients_are_exchanged(self) -> bool:
        """A backward has exchanged gradients: True if buffers have to be sent now."""
        self._sent = True
        return self._due
