"""Redis as a store: existing servers, or servers that the job starts."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ...env import get_node_rank
from .redis_job_servers import job_servers, stop_job_servers
from .redis_server import start_redis_server_cli
from .store import ClusterStore, LossyStore

__all__ = ["RedisNode", "RedisStore", "start_redis_server_cli"]

# Bytes read from a socket at a time: enough for a batch of small values.
_READ_SIZE = 1 << 18


def _redis() -> Any:
    try:
        import redis
    except ImportError as absent:
        raise ImportError(
            "the cache backend 'redis' needs the package redis, which is not installed: "
            'pip install "redis[hiredis]>=5.3"'
        ) from absent
    return redis


class RedisNode(LossyStore):
    """One Redis server. ``options`` go to redis-py's client: host, port, password, username, timeouts, TLS."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        super().__init__(name)
        self._options = dict(options)
        self._client: Any = None
        self._process = 0
        self._know_errors()

    def _know_errors(self) -> None:
        errors = _redis().exceptions
        self.losses = (errors.RedisError, OSError)  # type: ignore[misc]
        self.refusals = (errors.ResponseError, errors.DataError)  # type: ignore[misc]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_client": None, "losses": None, "refusals": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._know_errors()

    def client(self) -> Any:
        """Returns this process's redis-py client. Parent and child processes do not share sockets."""
        if self._process != os.getpid() or self._client is None:
            self._client, self._process = self._connect(), os.getpid()
        return self._client

    def _connect(self) -> Any:
        redis = _redis()
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        # Once more for a connection that the server had closed meanwhile, never for a server that hangs.
        retry = Retry(NoBackoff(), 1, supported_errors=(redis.exceptions.ConnectionError,))
        # Values are bytes, whatever the options say.
        return redis.Redis(**{"socket_read_size": _READ_SIZE, **self._options, "decode_responses": False}, retry=retry)

    def set(self, key: str, value: str | bytes) -> None:
        self._attempt(lambda: self.client().set(key, value), None)

    def mset(self, dictionary: Mapping[str, str | bytes]) -> None:
        if dictionary:
            self._attempt(lambda: self.client().mset(dictionary), None)

    def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        if not keys:
            return []
        return self._attempt(lambda: self.client().mget(keys), [None] * len(keys))

    def num_keys(self) -> int:
        return self._attempt(lambda: int(self.client().dbsize()), 0)

    def clear(self) -> None:
        self._attempt(lambda: self.client().flushdb(), None)

    def status(self) -> bool:
        return self._attempt(lambda: bool(self.client().ping()), False)

    def shutdown(self) -> None:
        if self._client is not None and self._process == os.getpid():
            self._client.close()
        self._client = None

    def check(self, until: float) -> None:
        """Waits for the server until ``until`` on the monotonic clock. Raises redis-py's errors."""
        errors = _redis().exceptions
        while True:
            try:
                self.client().ping()
                return
            except errors.AuthenticationError:
                raise
            except (errors.ConnectionError, errors.TimeoutError, OSError):
                if time.monotonic() >= until:
                    raise
                time.sleep(0.05)


class RedisStore(ClusterStore):
    """A store on Redis servers.

    - ``hosts``: Dictionaries with ``"host"`` and ``"port"``, optionally ``"password"``, ``"username"`` and other
      options of redis-py's client (``"ssl"``, ``"db"``). None starts ``redis-server`` on each host of the job, once per
      process for all stores, on the host's own address, with a password that only this job knows. All ranks must then
      construct the store together if torch.distributed is initialised; otherwise each process gets its own server.
    - ``cluster_mode``: True spreads keys over all hosts by xxh64. False makes each host of the job use one:
      ``hosts[node rank modulo their number]``.
    - ``capacity_per_node``: Memory limit in bytes of each server that the job starts.
    - ``timeout``: Seconds that a server may take to answer before it counts as lost, and seconds to wait for the first
      answer at construction.

    Reads from a lost server are misses; see :class:`LossyStore`.

    Raises ImportError if the package ``redis`` is missing, ValueError for unusable hosts, and
    ConnectionError if no server answers or one refuses the password.
    """

    def __init__(
        self,
        hosts: Sequence[Mapping[str, Any]] | None = None,
        cluster_mode: bool = True,
        capacity_per_node: int = 107374182400,
        *,
        timeout: float = 5.0,
    ) -> None:
        redis = _redis()
        if not timeout > 0:
            raise ValueError(f"timeout is {timeout} s; it must be positive")
        self.secret = b""
        self._spawned = hosts is None
        mine = get_node_rank()
        if hosts is None:
            servers, mine = job_servers(capacity_per_node)
            hosts = servers
            # Only the ranks know the servers' passwords.
            self.secret = str(servers[0]["password"]).encode()
        options = [_options(host, timeout) for host in hosts]
        if not options:
            raise ValueError("hosts is empty; None starts servers")
        chosen = options if cluster_mode else [options[mine % len(options)]]
        nodes = [RedisNode(f"redis {host['host']}:{host['port']}", host) for host in chosen]
        super().__init__(nodes)
        self._check(redis, nodes, timeout)

    @staticmethod
    def _check(redis: Any, nodes: Sequence[RedisNode], timeout: float) -> None:
        until = time.monotonic() + timeout
        failures = {}
        for node in nodes:
            try:
                node.check(until)
            except redis.exceptions.AuthenticationError as refused:
                raise ConnectionError(f"{node.name} refuses the password: {refused}") from refused
            except redis.exceptions.ResponseError as refused:
                raise ConnectionError(f"{node.name} refuses: {refused}") from refused
            except (redis.exceptions.RedisError, OSError) as failure:
                failures[node.name] = failure
        if len(failures) == len(nodes):
            reasons = "; ".join(f"{name}: {failure}" for name, failure in failures.items())
            raise ConnectionError(f"no cache server answered within {timeout} s: {reasons}")

    def shutdown(self) -> None:
        super().shutdown()
        if self._spawned:
            stop_job_servers()


def _options(host: Mapping[str, Any], timeout: float) -> dict[str, Any]:
    if "host" not in host or "port" not in host:
        raise ValueError(f"each host of the cache must have a host and a port; got one with {sorted(host)}")
    try:
        port = int(host["port"])
    except ValueError:
        raise ValueError(f"the port of cache host {host['host']} is {host['port']!r}, not a number") from None
    return {
        "socket_timeout": timeout,
        "socket_connect_timeout": timeout,
        **host,
        "host": str(host["host"]),
        "port": port,
    }
