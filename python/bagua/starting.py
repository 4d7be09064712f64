"""`init()`: how ranks find each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast
from urllib.parse import unquote, urlsplit

from bagua import config, engine, group
from bagua.errors import BaguaError, BaguaTimeoutError

__all__ = ["init", "read_store"]

Spread = Callable[[bytes], Sequence[bytes]]

# How often this process joined through its launcher's store, so that a second group does not read the first one's
# addresses.
_joined = 0


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
    """Joins this process to the others and makes the group the default one.

    `rank` and `world_size` default to RANK and WORLD_SIZE, and to a world of one without them. `init_method` says how
    the ranks find each other: "env://" by MASTER_ADDR and MASTER_PORT, "tcp://host:port" by a small server that rank 0
    runs there, "file://path" by files on a file system that all of them see (a new path for each group). `secret`
    (BAGUA_JOB_SECRET) must be equal on all ranks. `timeout` (BAGUA_TIMEOUT, 300) is in seconds: for joining, and the
    default of every operation.

    Under torchrun MASTER_PORT is served by torchrun's own store. Then, and only then, torch is imported to use it.

    Raises ValueError for arguments that cannot be used, BaguaTimeoutError naming the ranks that did not come,
    BaguaError when there is a default group already.
    """
    if group.default() is not None:
        raise BaguaError("bagua is initialised already: call bagua.shutdown() before bagua.init()")
    place = config.place(rank, world_size, local_rank, local_world_size)
    chosen = config.settings(timeout=timeout, secret=secret)
    spread, towards = _rendezvous(init_method, place, chosen)
    joined = group.join(
        place.rank,
        place.world_size,
        spread,
        towards=towards,
        local_rank=place.local_rank,
        local_world_size=place.local_world_size,
        secret=chosen.secret,
        timeout=chosen.timeout,
    )
    group.set_default(joined)
    return joined


def _rendezvous(
    init_method: str, place: config.Place, chosen: config.Settings
) -> tuple[Spread, tuple[str, int] | None]:
    """How to spread an address, and in whose direction to listen."""
    parts = urlsplit(init_method)
    if parts.scheme not in ("env", "tcp", "file"):
        raise ValueError(f"init_method {init_method!r} starts with none of env://, tcp:// and file://")
    if parts.scheme == "file" and not parts.netloc + parts.path:
        raise ValueError(f"init_method {init_method!r} names no file")
    if parts.scheme == "tcp" and (parts.hostname is None or parts.port is None):
        raise ValueError(f"init_method {init_method!r} is not tcp://host:port")
    if place.world_size == 1:
        return lambda address: [address], None
    if parts.scheme == "file":
        path = unquote(parts.netloc + parts.path)

        def by_file(address: bytes) -> list[bytes]:
            return engine.rendezvous_file(path, place.rank, place.world_size, address, chosen.timeout)

        return by_file, None
    if parts.scheme == "env":
        host, port = config.master()
        if config.agent_serves_store():
            return _agent_store(host, port, place, chosen.timeout), (host, port)
    else:
        host, port = cast(str, parts.hostname), cast(int, parts.port)

    def by_tcp(address: bytes) -> list[bytes]:
        return engine.rendezvous_tcp(host, port, place.rank, place.world_size, address, chosen.secret, chosen.timeout)

    return by_tcp, (host, port)


def _agent_store(host: str, port: int, place: config.Place, timeout: float) -> Spread:
    global _joined
    _joined += 1
    prefix = f"bagua/{config.attempt()}/{_joined}"

    def by_store(address: bytes) -> list[bytes]:
        import torch.distributed

        # Typed as if it took text only; it takes and returns bytes.
        store: Any = torch.distributed.TCPStore(  # type: ignore[attr-defined, unused-ignore]
            host, port, is_master=False, timeout=timedelta(seconds=timeout)
        )
        store.set(f"{prefix}/{place.rank}", address)
        everybody = range(place.world_size)
        keys = [f"{prefix}/{rank}" for rank in everybody]
        return read_store(store, keys, everybody, noticed_by=place.rank, limit=timeout, what="init")

    return by_store


def read_store(
    store: Any, keys: Sequence[str], writers: Sequence[int], *, noticed_by: int, limit: float, what: str
) -> list[bytes]:
    """What the ranks `writers` put under `keys` into a store of torch.distributed.

    Raises BaguaTimeoutError naming those that have not within `limit` seconds.
    """
    try:
        store.wait(list(keys), timedelta(seconds=limit))
    except Exception as failure:
        absent = set(_absent(store, list(keys)))
        missing = tuple(writer for key, writer in zip(keys, writers, strict=True) if key in absent)
        text = f"{what}: no word from rank(s) {', '.join(map(str, missing))} after {limit:.1f} s"
        raise BaguaTimeoutError(text, missing=missing, after=limit, noticed_by=noticed_by) from failure
    # One request: with one for each key, the store's server (perhaps a rank) would answer the square of the world size.
    if store.has_extended_api():
        return [bytes(found) for found in store.multi_get(list(keys))]
    return [bytes(store.get(key)) for key in keys]


def _absent(store: Any, keys: list[str]) -> list[str]:
    """Those that nobody has written, by halving: few requests if they are few."""
    if not keys or store.check(keys):
        return []
    half = len(keys) // 2
    return _absent(store, keys[:half]) + _absent(store, keys[half:]) if half else keys
