"""`init()`: joins the ranks of a job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast
from urllib.parse import unquote, urlsplit

from bagua import config, extension, group, launcher, log, metrics, process_state, store_rendezvous
from bagua.errors import BaguaError

__all__ = ["init"]

Spread = Callable[[bytes], Sequence[bytes]]


def init(
    rank: int | None = None,
    world_size: int | None = None,
    init_method: str = "env://",
    *,
    local_rank: int | None = None,
    local_world_size: int | None = None,
    secret: str | bytes | None = None,
    timeout: float | None = None,
) -> group.Group:
    """Joins the ranks of the job and makes their group the default group. Returns the group.

    `rank` and `world_size` default to what the launcher sets (page "Launchers"): RANK and WORLD_SIZE, or the variables
    of Slurm, OpenMPI, MPICH and Intel MPI. Without a launcher, this process is a world of one.

    `init_method` says how the ranks find each other. "env://" uses MASTER_ADDR and MASTER_PORT, which a Slurm step need
    not set. "tcp://host:port" uses a small server that rank 0 runs at this address. "file://path" uses files on a file
    system that all ranks see; the path must be new for each group.

    `secret` (BAGUA_JOB_SECRET) must be equal on all ranks. `timeout` (BAGUA_TIMEOUT, 300) is in seconds: it limits
    joining, and is the default of every operation.

    If torch.distributed is initialised with the default backend "bagua", its group becomes the default group, and the
    ranks do not join a second one.

    Under torchrun, MASTER_PORT belongs to torchrun's own store. Only then is torch imported, to use that store.

    Raises ValueError for bad arguments; BaguaTimeoutError naming the ranks that did not come; BaguaError if there is a
    default group already, or if the process may not open enough file descriptors for the group. (A soft limit is raised
    automatically.)
    """
    if group.default() is not None:
        raise BaguaError("bagua is initialised already: call bagua.shutdown() before bagua.init()")
    adopted: group.Group | None = process_state.process.torchs_world
    if adopted is not None:
        for what, given, has in (("rank", rank, adopted.rank), ("world_size", world_size, adopted.size)):
            if given not in (None, has):
                raise ValueError(f"{what} {given} was given, but torch.distributed is initialised with {has}")
        group.set_default(adopted)
        return adopted
    place = launcher.place(rank, world_size, local_rank, local_world_size)
    chosen = config.settings(timeout=timeout, secret=secret)
    metrics.begin(place.local_rank)
    log.configure()
    waiting = log.Waiting(place.rank, place.world_size)
    spread, towards = _rendezvous(init_method, place, chosen, waiting)
    if spread is None:
        host, port = launcher.master()
        joined, _ = store_rendezvous.join(
            _agent_store(host, port, chosen.timeout),
            place.rank,
            place.world_size,
            what="init",
            towards=towards,
            local_rank=place.local_rank,
            local_world_size=place.local_world_size,
            secret=chosen.secret,
            timeout=chosen.timeout,
            waiting=waiting,
        )
    else:
        joined = group.join(
            place.rank,
            place.world_size,
            spread,
            towards=towards,
            local_rank=place.local_rank,
            local_world_size=place.local_world_size,
            secret=chosen.secret,
            timeout=chosen.timeout,
            waiting=waiting,
        )
    group.set_default(joined)
    metrics.begin(joined.local_rank)
    return joined


def _rendezvous(
    init_method: str, place: launcher.RankInfo, chosen: config.Settings, waiting: log.Waiting
) -> tuple[Spread | None, tuple[str, int] | None]:
    """Returns how to exchange addresses (None: by the launcher's store), and the host and port to listen towards."""
    try:
        parts = urlsplit(init_method)
        host, port = (parts.hostname, parts.port) if parts.scheme == "tcp" else (None, None)
    except ValueError as error:
        raise ValueError(f"init_method {init_method!r}: {error}") from None
    if parts.scheme not in ("env", "tcp", "file"):
        raise ValueError(f"init_method must start with env://, tcp:// or file://; got {init_method!r}")
    if parts.query or parts.fragment:
        what = f"{'?' + parts.query if parts.query else ''}{'#' + parts.fragment if parts.fragment else ''}"
        instead = "write %3F for ? and %23 for #" if parts.scheme == "file" else "pass rank and world_size as arguments"
        raise ValueError(f"init_method {init_method!r}: {what} has no meaning here; {instead}")
    if parts.scheme == "file" and not parts.netloc + parts.path:
        raise ValueError(f"init_method {init_method!r} lacks the path of a file")
    if parts.scheme == "tcp" and (host is None or port is None or parts.path not in ("", "/")):
        raise ValueError(f"init_method {init_method!r} is not tcp://host:port")
    if place.world_size == 1:
        return lambda address: [address], None
    if parts.scheme == "file":
        path = unquote(parts.netloc + parts.path)

        def by_file(address: bytes) -> list[bytes]:
            return extension.rendezvous_file(path, place.rank, place.world_size, address, chosen.timeout, waiting)

        return by_file, None
    place_of_rank_0 = launcher.master() if parts.scheme == "env" else (cast(str, host), cast(int, port))
    given_by = "MASTER_ADDR" if parts.scheme == "env" else "init_method"
    launcher.require_name(place_of_rank_0[0], "init", chosen.timeout, given_by=given_by)
    if parts.scheme == "env" and config.agent_serves_store():
        return None, place_of_rank_0

    def by_tcp(address: bytes) -> list[bytes]:
        return extension.rendezvous_tcp(
            *place_of_rank_0,
            place.rank,
            place.world_size,
            address,
            chosen.secret,
            chosen.timeout,
            chosen.tls,
            chosen.heartbeat_timeout,
            waiting,
        )

    return by_tcp, place_of_rank_0


def _agent_store(host: str, port: int, limit: float) -> Any:
    import torch.distributed

    try:
        return torch.distributed.TCPStore(  # type: ignore[attr-defined, unused-ignore]
            host, port, is_master=False, timeout=timedelta(seconds=limit)
        )
    except torch.distributed.DistError as failure:  # type: ignore[attr-defined, unused-ignore]
        raise BaguaError(f"init: torchrun's store at {host}:{port} does not answer: {failure}") from failure
