"""Reads the environment; no other module does. Variables are read when used, so that tests can set them late."""

from __future__ import annotations

import contextlib
import os
import site
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import urlsplit

from bagua import hints
from bagua.extension import ALGORITHMS, MAX_STREAMS, TRANSPORTS, Tls


def text(name: str) -> str | None:
    """Returns the variable's value; None if it is unset or empty."""
    return os.environ.get(name) or None


def integer(name: str, default: int, least: int | None = None, most: int | None = None) -> int:
    """Returns the variable as an integer. Raises ValueError with its name if it is not one, or outside the limits."""
    value = text(name)
    if value is None:
        return default
    try:
        found = int(value)
    except ValueError:
        raise ValueError(f"{name}={value!r} is not an integer") from None
    if (least is not None and found < least) or (most is not None and found > most):
        limits = f"from {least} to {most}" if most is not None else f"{least} or more"
        raise ValueError(f"{name} is {found}; it must be {limits}")
    return found


def number(name: str, default: float) -> float:
    """Returns the variable as a number. Raises ValueError with its name and value if it is not one."""
    value = text(name)
    if value is None:
        return default
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"{name}={value!r} is not a number") from None


def seconds(name: str, default: float) -> float:
    """Returns the variable as a time in seconds. Raises ValueError with its name if it is not a positive number."""
    return _positive(name, number(name, default))


#: The longest time that the core and torch's stores can represent safely: a hundred years. Replaces an infinite time.
_LONGEST = 100.0 * 365 * 24 * 3600


def _positive(name: str, value: float) -> float:
    if not value > 0:
        raise ValueError(f"{name} is {value} s; it must be positive")
    # The core counts whole nanoseconds.
    if value < 1e-9:
        raise ValueError(f"{name} is {value} s; it must be at least 1e-09")
    return min(value, _LONGEST)


def choice(name: str, choices: Sequence[str], default: str) -> str:
    """Returns the variable if it is one of `choices`, else raises ValueError with its name and the choices."""
    value = text(name) or default
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}")
    return value


def flag(name: str) -> bool:
    """Returns True for 1, true, yes and on; False for 0, false, no, off and unset. Raises ValueError otherwise."""
    value = (text(name) or "0").lower()
    if value in ("1", "true", "yes", "on"):
        return True
    if value in ("0", "false", "no", "off"):
        return False
    raise ValueError(f"{name}={value!r} is not 0 or 1")


def announce(**variables: str) -> None:
    os.environ.update(variables)


@contextlib.contextmanager
def keeping(*names: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def environment(changes: Mapping[str, str]) -> dict[str, str]:
    """Returns this process's environment with some variables changed or added, for a child process."""
    return {**os.environ, **changes}


class Variable(NamedTuple):
    """A variable whose name begins with BAGUA_."""

    #: The value if the variable is not set; None if there is no default.
    default: str | None
    #: Returns the variable's value. Raises ValueError with its name if the value is invalid.
    read: Callable[[], object]


#: Every variable by its name, as on the page "Settings".
VARIABLES: dict[str, Variable] = {}

_PREFIX = "BAGUA_"


def unknown() -> list[tuple[str, str | None]]:
    """Returns the BAGUA_ variables that are not settings, each with a setting of a similar name, or None."""
    names = {name.removeprefix(_PREFIX): name for name in VARIABLES}
    found = []
    for name in sorted(name for name in os.environ if name.startswith(_PREFIX) and name not in VARIABLES):
        near = hints.nearest(name.removeprefix(_PREFIX), names, 0.75)
        found.append((name, names[near] if near else None))
    return found


def warn_of_misspelt() -> None:
    """Warns of each variable whose name resembles that of a setting."""
    for name, nearest in unknown():
        if nearest is not None:
            hints.warn(f"unknown setting {name} is ignored; did you mean {nearest}?")


T = TypeVar("T")


def _declared(name: str, default: str | None, read: Callable[[], T]) -> Callable[[], T]:
    VARIABLES[name] = Variable(default, read)
    return read


def _optional(name: str) -> Callable[[], str | None]:
    return _declared(name, None, partial(text, name))


def _text(name: str, default: str) -> Callable[[], str]:
    return _declared(name, default or None, lambda: text(name) or default)


def _integer(name: str, default: int, least: int | None = None, most: int | None = None) -> Callable[[], int]:
    return _declared(name, str(default), partial(integer, name, default, least, most))


def _number(name: str, default: float) -> Callable[[], float]:
    return _declared(name, str(default), partial(number, name, default))


def _seconds(name: str, default: float) -> Callable[[], float]:
    return _declared(name, f"{default:g}", partial(seconds, name, default))


def _choice(name: str, choices: Sequence[str], default: str) -> Callable[[], str]:
    return _declared(name, default, partial(choice, name, choices, default))


def _flag(name: str) -> Callable[[], bool]:
    return _declared(name, "0", partial(flag, name))


#: The variable whose value is never shown.
SECRET = "BAGUA_JOB_SECRET"
_secret = _text(SECRET, "")
_timeout = _seconds("BAGUA_TIMEOUT", 300.0)


@dataclass(frozen=True)
class Settings:
    """Settings of a group other than ranks and addresses. The extension reads the fields by name."""

    #: Seconds until an operation raises BaguaTimeoutError.
    timeout: float
    #: Proves that a connection belongs to this job.
    secret: bytes
    #: How TCP connections are encrypted; None if they are not.
    tls: Tls | None
    #: Seconds of silence after which a peer is lost.
    heartbeat_timeout: float = field(default_factory=_seconds("BAGUA_HEARTBEAT_TIMEOUT", 5.0))
    #: One of TRANSPORTS.
    transport: str = field(default_factory=_choice("BAGUA_TRANSPORT", TRANSPORTS, "auto"))
    #: TCP streams to a peer on another host.
    streams_per_peer: int = field(default_factory=_integer("BAGUA_STREAMS_PER_PEER", 2, 1, MAX_STREAMS))
    #: The all_reduce algorithm between hosts: one of ALGORITHMS.
    algorithm: str = field(default_factory=_choice("BAGUA_ALGORITHM", ALGORITHMS, "auto"))
    #: Ranks share memory only if their host ids are equal. "" uses the system's id.
    host_id: str = field(default_factory=_text("BAGUA_HOST_ID", ""))


_TLS_FILES = ("BAGUA_TLS_CERT", "BAGUA_TLS_KEY", "BAGUA_TLS_CA")


def _tls(has_secret: bool) -> Tls | None:
    """Returns how to encrypt, from BAGUA_TLS and its files. Raises ValueError for incomplete or unusable files."""
    paths = {name: path for name in _TLS_FILES if (path := text(name)) is not None}
    if paths and text("BAGUA_TLS") is None:
        raise ValueError(f"{', '.join(paths)} set without BAGUA_TLS: set BAGUA_TLS=1 to encrypt, or BAGUA_TLS=0")
    if not flag("BAGUA_TLS"):
        return None
    if not paths:
        if not has_secret:
            raise ValueError("BAGUA_TLS=1 needs BAGUA_JOB_SECRET, or BAGUA_TLS_CERT, BAGUA_TLS_KEY and BAGUA_TLS_CA")
        return Tls()
    if missing := [name for name in _TLS_FILES if name not in paths]:
        raise ValueError(f"{', '.join(paths)} set without {' and '.join(missing)}: set all three")
    contents = []
    for name, path in paths.items():
        try:
            contents.append(Path(path).read_bytes())
        except OSError as error:
            raise ValueError(f"{name}={path!r} cannot be read: {error.strerror}") from error
    try:
        return Tls(*contents)
    except ValueError as error:
        files = ", ".join(f"{name}={path!r}" for name, path in paths.items())
        raise ValueError(f"{files}: {error}") from error


def settings(*, timeout: float | None = None, secret: str | bytes | None = None) -> Settings:
    """Returns the settings of a group: the arguments that are given, then the environment, then the defaults."""
    if secret is None:
        secret = _secret()
    if not isinstance(secret, str | bytes | bytearray | memoryview):
        # bytes(n) would make n zero bytes.
        raise TypeError(f"the secret is a {type(secret).__name__}, not text or bytes")
    return Settings(
        timeout=_timeout() if timeout is None else _positive("timeout", float(timeout)),
        secret=secret.encode() if isinstance(secret, str) else bytes(secret),
        tls=_tls(bool(secret)),
    )


# `settings` checks these together.
_declared("BAGUA_TLS", "0", settings)
for _file in _TLS_FILES:
    _declared(_file, None, settings)


def address_book() -> str | None:
    """Returns the URL of an elastic job's address book; None in other jobs. Raises ValueError for a malformed URL."""
    url = text("BAGUA_ELASTIC")
    if url is not None:
        try:
            book_place(url)
        except ValueError as error:
            raise ValueError(f"BAGUA_ELASTIC: {error}") from None
    return url


def book_place(url: str) -> Path | tuple[str, int]:
    """Returns the directory, or the host and port, of an address book. Raises ValueError for a malformed URL."""
    with contextlib.suppress(ValueError):
        parsed = urlsplit(url)
        if parsed.scheme == "file" and parsed.path.startswith("/") and parsed.path != "/" and not parsed.netloc:
            return Path(parsed.path)
        if parsed.scheme == "tcp" and parsed.hostname is not None and parsed.port is not None and not parsed.path:
            return parsed.hostname, parsed.port
    raise ValueError(f"an address book is file:///directory or tcp://host:port, not {url!r}")


_declared("BAGUA_ELASTIC", None, address_book)
# Set by the runner, for scripts to read.
_declared("BAGUA_RESTART_COUNT", None, partial(integer, "BAGUA_RESTART_COUNT", 0))
# Set by the launchers, for scripts to read.
_optional("BAGUA_NET_IMPLEMENT")

#: Largest size of a gradient bucket, in bytes.
default_bucket_size = _integer("BAGUA_DEFAULT_BUCKET_SIZE", 10 * 1024 * 1024, 1)
#: The hosts of `baguarun` if its options name none.
host_list = _optional("BAGUA_NODE_DOMAIN_NAMES")
#: The ssh port of hosts that are given without one.
ssh_port = _integer("BAGUA_SSH_PORT", 22, 1, 65535)

# Settings of the original's tuning service, which does not exist here. Scripts may still read them.
service_port = _integer("BAGUA_SERVICE_PORT", -1)
report_metrics = _flag("BAGUA_REPORT_METRICS")
autotune_level = _integer("BAGUA_AUTOTUNE", 0)
autotune_max_samples = _integer("BAGUA_AUTOTUNE_MAX_SAMPLES", 60)
autotune_sampling_confidence_time = _number("BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S", 5.0)
autotune_warmup_time = _number("BAGUA_AUTOTUNE_WARMUP_TIME_S", 30.0)
autotune_server_wait_time = _integer("BAGUA_AUTOTUNE_SERVER_WAIT_TIME", 300)
autotune_log = _flag("BAGUA_IS_OUTPUT_AUTOTUNE_LOG")


def agent_serves_store() -> bool:
    """True under torchrun, whose agent keeps MASTER_PORT busy with a store of its own."""
    return text("TORCHELASTIC_USE_AGENT_STORE") == "True"


def attempt() -> str:
    """Returns an id of this start of the job, which differs from other starts that use the same store."""
    return f"{text('TORCHELASTIC_RUN_ID') or ''}/{text('TORCHELASTIC_RESTART_COUNT') or '0'}"


_metrics_port = _declared("BAGUA_METRICS_PORT", None, partial(integer, "BAGUA_METRICS_PORT", 0, 1, 65535))
metrics_host = _text("BAGUA_METRICS_ADDR", "127.0.0.1")


def metrics_address() -> tuple[str, int] | None:
    """Returns the host and port of local rank 0's metrics; None if they are off. Local rank n uses port + n."""
    port = _metrics_port()
    return (metrics_host(), port) if port else None


def trace_dir() -> str | None:
    """Returns the directory of flight records; None if BAGUA_TRACE_DIR is set and empty, which turns records off."""
    found = os.environ.get("BAGUA_TRACE_DIR")
    return default_trace_dir() if found is None else found or None


_declared("BAGUA_TRACE_DIR", None, trace_dir)


def default_trace_dir() -> str:
    """Returns the directory of flight records if BAGUA_TRACE_DIR is unset: "bagua-UID" in the temporary directory."""
    return os.path.join(tempfile.gettempdir(), f"bagua-{os.geteuid()}")


@dataclass(frozen=True)
class CudaPlaces:
    """Places in which CUDA's libraries are searched."""

    #: Path of each library file; None if the library is to be searched for.
    libcuda: str | None
    libnvrtc: str | None
    libnccl: str | None
    #: Folders of Python packages, which may contain `nvidia/*/lib`.
    site_packages: list[str]
    #: True if several ranks may use one device, which NCCL 2.30 and newer support.
    nccl_multi_rank_gpu: bool = False


_libcuda, _libnvrtc = _optional("BAGUA_LIBCUDA"), _optional("BAGUA_LIBNVRTC")
_libnccl = _optional("BAGUA_LIBNCCL")


def cuda_places() -> CudaPlaces:
    """Returns the library paths of the BAGUA_LIB variables, and this Python's package folders."""
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    if site.ENABLE_USER_SITE:
        folders.append(site.getusersitepackages())
    return CudaPlaces(
        libcuda=_libcuda(),
        libnvrtc=_libnvrtc(),
        libnccl=_libnccl(),
        site_packages=list(dict.fromkeys(folders)),
        nccl_multi_rank_gpu=text("NCCL_MULTI_RANK_GPU_ENABLE") == "1",
    )


def cuda_cache() -> str | None:
    """Returns the folder of compiled kernels, inside the user's cache folder; None if the user has none."""
    # A relative path must be ignored: https://specifications.freedesktop.org/basedir-spec/latest/
    caches = text("XDG_CACHE_HOME")
    if caches is None or not os.path.isabs(caches):
        caches = os.path.expanduser("~/.cache")
    return os.path.join(caches, "bagua", "cuda") if os.path.isabs(caches) else None


#: Values of BAGUA_LOG.
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_log_level = _declared("BAGUA_LOG", None, lambda: choice("BAGUA_LOG", LOG_LEVELS, "") if text("BAGUA_LOG") else None)


def log_level() -> str | None:
    return _log_level()


#: True if ranks compare each call on CUDA arrays before they enqueue it on a device.
cuda_check = _flag("BAGUA_CUDA_CHECK")

#: Values of BAGUA_CUDA_COLLECTIVE.
CUDA_COLLECTIVES = ("auto", "nccl", "staged")
#: How ranks communicate arrays on CUDA devices: one of CUDA_COLLECTIVES.
cuda_collective = _choice("BAGUA_CUDA_COLLECTIVE", CUDA_COLLECTIVES, "auto")
