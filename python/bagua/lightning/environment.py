"""`BaguaEnvironment`: tells Lightning about ranks that Bagua's own launchers have started."""

from __future__ import annotations

from typing import Any

from bagua import config, launcher

__all__ = ["EnvironmentMethods", "is_detected"]

_Base: Any = object


def is_detected() -> bool:
    """Returns True if a launcher has set ``BAGUA_SERVICE_PORT``."""
    return config.text("BAGUA_SERVICE_PORT") is not None


class EnvironmentMethods(_Base):  # type: ignore[misc]
    """Cluster environment of ranks that were started with the original's variable ``BAGUA_SERVICE_PORT``.

    Rank and world size come from the environment, and Lightning starts no process.
    """

    @staticmethod
    def detect() -> bool:
        """Returns True if a launcher has set ``BAGUA_SERVICE_PORT``."""
        return is_detected()

    @property
    def creates_processes_externally(self) -> bool:
        """Always True, because a launcher has started the ranks."""
        return True

    @property
    def main_address(self) -> str:
        """``MASTER_ADDR``, or else this host."""
        return launcher.known_master()[0] or "127.0.0.1"

    @property
    def main_port(self) -> int:
        """``MASTER_PORT``, or else -1."""
        return launcher.known_master()[1] or -1

    @property
    def service_port(self) -> int:
        """``BAGUA_SERVICE_PORT``, or else -1. Nothing listens there."""
        return config.service_port()

    def world_size(self) -> int:
        """Returns the number of ranks of the job."""
        return launcher.found().world_size or 1

    def set_world_size(self, size: int) -> None:
        """Does nothing, because the launcher has set the size."""

    def global_rank(self) -> int:
        """Returns this process's rank in the job."""
        return launcher.found().rank or 0

    def set_global_rank(self, rank: int) -> None:
        """Does nothing, because the launcher has set the rank."""

    def local_rank(self) -> int:
        """Returns this process's rank on its host."""
        return launcher.found().local_rank or 0

    def node_rank(self) -> int:
        """Returns the number of this host in the job."""
        return launcher.found().node_rank or 0
