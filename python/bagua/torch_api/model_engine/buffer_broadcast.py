"""Decides when rank 0's buffers are sent, if the ranks exchange gradients."""

from __future__ import annotations


class BufferSchedule:
    """Decides when the ranks get rank 0's buffers, so that training equals torch's DistributedDataParallel bit for bit.

    torch sends buffers before each forward that follows a training forward outside ``no_sync``, including evaluation.
    Bagua sends them when the backward of that forward has exchanged its gradients, with changes that a checkpoint made
    during the backward. Training therefore reads the same values, and all ranks evaluate with the same buffers without
    communication. If no such backward follows a forward, as for the first of two forwards in one step, its buffers are
    sent before the next forward.
    """

    def __init__(self) -> None:
        # True if the last training forward was outside ``no_sync``, or there was none yet.
        self._due = True
        # True if the buffers were sent since that forward.
        self._sent = False

    @property
    def wait(self) -> bool:
        """True if rank 0's buffers are sent before the next training forward."""
        return self._due and not self._sent

    def forward_begins(self, *, syncs: bool) -> bool:
        """Records a training forward, outside ``no_sync`` if ``syncs``. Returns True if it must wait for buffers."""
        before, self._due, self._sent = self.wait, syncs, False
        return before

    def gradients_are_exchanged(self) -> bool:
        """Records a backward that exchanged gradients. Returns True if buffers must be sent now."""
        self._sent = True
        return self._due
