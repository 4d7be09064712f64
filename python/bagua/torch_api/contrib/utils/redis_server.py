"""Redis servers that the cache starts, each with a password. A server ends when its owner ends."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from multiprocessing import util as exits

from .cache_state import cache_state

__all__ = ["RedisServer", "address_towards", "start_redis_server_cli"]

#: Seconds within which a started server must answer.
_START_S = 20.0

# The shell execs the server, so the started process is the server. A child of the shell reads from a pipe whose write
# end only the owner holds. If the owner ends for any reason, SIGKILL included, the pipe breaks and the child kills the
# server. A line on the pipe means that the owner has ended the server itself. The child checks the process's name
# because the process id may have been reused. PR_SET_PDEATHSIG would not work: it fires when the starting *thread*
# ends. The configuration comes through the pipe as well, because every user of the machine can read a command line.
_GUARDED = """
configuration=
while read -r line && [ "$line" != end ]; do
    configuration="$configuration$line
"
done
exec 3<&0
( read -r word <&3 || { read -r name </proc/$$/comm; [ "$name" = redis-server ] && kill -9 $$; } ) >/dev/null 2>&1 &
exec "$@" - 3<&- <<END
$configuration
END
"""


class RedisServer:
    """A ``redis-server`` process that this process owns.

    - ``host``: Address to listen on.
    - ``capacity``: Memory limit in bytes.
    - ``port``: 0 chooses a free port.
    - ``password``: None admits every process that reaches the address.
    - ``settings``: Names and values of further settings of Redis.

    Raises RuntimeError, with the server's output, if the server does not start.
    """

    def __init__(
        self,
        host: str,
        capacity: int,
        *,
        port: int = 0,
        password: str | None = None,
        settings: Sequence[tuple[str, str]] = (),
    ) -> None:
        program = shutil.which("redis-server")
        if program is None:
            raise RuntimeError("redis-server was not found: install the package redis-server, or give hosts")
        if capacity <= 0:
            raise ValueError(f"the capacity is {capacity} bytes; it must be positive")
        self.host = host
        self.password = dict(settings).get("requirepass", password)
        for attempt in range(20):
            self.port = port or _free_port(host)
            said = self._start(program, capacity, password, settings)
            if said is None:
                break
            # Another process may have taken the port since it was found free.
            if port or attempt == 19 or "in use" not in said:
                raise RuntimeError(f"redis-server did not start on {host}:{self.port}: {said.strip() or 'no message'}")
        # Runs after the loaders' finalizers (priority 100), which may write to this server. The priority is negative so
        # that multiprocessing ends its children first.
        self._end = exits.Finalize(self, _stop, (self._process, self._line), exitpriority=-10)

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._process.pid

    def stop(self) -> None:
        """Ends the server. May be called twice. Does nothing in a forked child."""
        self._end()

    def _start(
        self, program: str, capacity: int, password: str | None, settings: Sequence[tuple[str, str]]
    ) -> str | None:
        """Starts the server. Returns None if it answers, else its output."""
        lines = [
            ("bind", self.host),
            ("port", str(self.port)),
            ("maxmemory", str(capacity)),
            # Training reads every sample once per epoch, and least-recently-used would evict exactly the next samples.
            ("maxmemory-policy", "allkeys-random"),
            ("appendonly", "no"),
            ("save", '""'),
            ("daemonize", "no"),
            ("loglevel", "warning"),
            ("dir", tempfile.gettempdir()),
            *([("requirepass", password)] if password else []),
            *settings,
        ]
        with tempfile.TemporaryFile() as words:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", _GUARDED, "sh", program],
                stdin=subprocess.PIPE,
                stdout=words,
                stderr=subprocess.STDOUT,
                # Ctrl-C in a terminal must not reach the server, which the ending training still uses.
                start_new_session=True,
            )
            assert self._process.stdin is not None
            self._line = os.dup(self._process.stdin.fileno())
            cache_state().server_pipes.add(self._line)
            with contextlib.suppress(BrokenPipeError), self._process.stdin as configuration:
                configuration.write("".join(f"{name} {value}\n" for name, value in lines).encode() + b"end\n")
            if self._answers():
                return None
            _stop(self._process, self._line)
            words.seek(0)
            return words.read().decode(errors="replace")

    def _answers(self) -> bool:
        # Another server may listen on the port. The process id tells that this server answers.
        asked = f"AUTH {self.password}\r\n" if self.password else ""
        ours = f"process_id:{self._process.pid}\r\n".encode()
        until = time.monotonic() + _START_S
        while time.monotonic() < until and self._process.poll() is None:
            with (
                contextlib.suppress(OSError),
                socket.create_connection((self.host, self.port), timeout=1.0) as connection,
            ):
                connection.sendall(f"{asked}INFO server\r\nQUIT\r\n".encode())
                said = b""
                while more := connection.recv(4096):
                    said += more
                if ours in said:
                    return True
            time.sleep(0.01)
        return False


def _stop(process: subprocess.Popen[bytes], line: int) -> None:
    process.kill()
    with contextlib.suppress(OSError):
        os.write(line, b"stopped\n")
    process.wait()
    cache_state().server_pipes.discard(line)
    os.close(line)


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def address_towards(host: str) -> str:
    """Returns this host's own address on the route to another host, from the routing table. Sends nothing.

    The host's own name is not used because many systems resolve it to a loopback address.
    """
    kind, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(kind, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def new_password() -> str:
    """Returns a random password of 256 bits."""
    return secrets.token_urlsafe(32)


def start_redis_server_cli(port: int, capacity: int, *args: str) -> RedisServer:
    """Starts a server on this machine's loopback address that holds at most ``capacity`` bytes.

    ``args`` are settings as on the command line of redis-server (``"--requirepass", "..."``). The server ends with this
    process. Without ``--requirepass`` it has no password; prefer ``RedisStore(hosts=None)``. Raises ValueError if a
    value precedes all settings.
    """
    settings: list[tuple[str, list[str]]] = []
    for word in args:
        if word.startswith("--"):
            settings.append((word[2:], []))
        elif settings:
            settings[-1][1].append(word)
        else:
            raise ValueError(f"{word!r} does not follow a setting such as --maxclients")
    server = RedisServer(
        "127.0.0.1", capacity, port=port, settings=[(name, " ".join(values)) for name, values in settings]
    )
    cache_state().cli_servers.append(server)
    return server
