"""The environment, read here and nowhere else; always at call time, so that a launcher or a test can set it late."""

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
from bagua.engine import ALGORITHMS, MAX_STREAMS, TRANSPORTS, Tls


def text(name: str) -> str | None:
    """The variable's value; None when it is unset or empty."""
    return os.environ.get(name) or None


def integer(name: str, default: int, least: int | None = None, most: int | None = None) -> int:
    """The variable as an integer, within limits. ValueError names the variable and what it holds."""
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
    """The variable as a number. ValueError names the variable and what it holds."""
    value = text(name)
    if value is None:
        return default
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"{name}={value!r} is not a number") from None


def seconds(name: str, default: float) -> float:
    """The variable as a time. ValueError names the variable where it is none, or not positive."""
    return _positive(name, number(name, default))


#: A hundred years, also for an infinite time: the core's longest, and one that torch's stores can count.
_LONGEST = 100.0 * 365 * 24 * 3600


def _positive(name: str, value: float) -> float:
    if not value > 0:
        raise ValueError(f"{name} is {value} s; it must be positive")
    # The core counts nanoseconds.
    if value < 1e-9:
        raise ValueError(f"{name} is {value} s; it must be at least 1e-09")
    return min(value, _LONGEST)


def choice(name: str, choices: Sequence[str], default: str) -> str:
    """The variable as one of these texts. ValueError names the variable, what it holds, and what there is."""
    value = text(name) or default
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}")
    return value


def flag(name: str) -> bool:
    """True for 1, true, yes and on; False for 0, false, no, off and an unset variable."""
    value = (text(name) or "0").lower()
    if value in ("1", "true", "yes", "on"):
        return True
    if value in ("0", "false", "no", "off"):
        return False
    raise ValueError(f"{name}={value!r} is neither 0 nor 1")


def announce(**variables: str) -> None:
    """Sets variables for this process and its children, which read their rank from the environment."""
    os.environ.update(variables)


@contextlib.contextmanager
def keeping(*names: str) -> Iterator[None]:
    """At the end these variables are as they were before."""
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
    """The environment of a child: that of this process with other or further variables."""
    return {**os.environ, **changes}


class Variable(NamedTuple):
    """A variable whose name begins with BAGUA_."""

    #: What holds where it is not set; None: nothing.
    default: str | None
    #: What it holds. ValueError names the variable where that cannot be used.
    read: Callable[[], object]


#: Every such variable by its name: the page "Settings" as a table.
VARIABLES: dict[str, Variable] = {}

#: The beginning of their names.
_PREFIX = "BAGUA_"


def unknown() -> list[tuple[str, str | None]]:
    """The variables that begin like ours and are none, each with the setting whose name is nearest, if one is near."""
    names = {name.removeprefix(_PREFIX): name for name in VARIABLES}
    found = []
    for name in sorted(name for name in os.environ if name.startswith(_PREFIX) and name not in VARIABLES):
        near = hints.nearest(name.removeprefix(_PREFIX), names, 0.75)
        found.append((name, names[near] if near else None))
    return found


def warn_of_misspelt() -> None:
    """Warns of each variable whose name is nearly that of a setting."""
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


#: The name of the variable whose value is not shown.
SECRET = "BAGUA_JOB_SECRET"
_secret = _text(SECRET, "")
_timeout = _seconds("BAGUA_TIMEOUT", 300.0)


@dataclass(frozen=True)
class Settings:
    """How a group is built, besides ranks and addresses; the extension reads them by their names."""

    #: Seconds until an operation gives up.
    timeout: float
    #: Proves that a connection belongs to this job.
    secret: bytes
    #: How TCP connections are encrypted; None: not at all.
    tls: Tls | None
    #: Seconds of silence after which a peer is lost.
    heartbeat_timeout: float = field(default_factory=_seconds("BAGUA_HEARTBEAT_TIMEOUT", 5.0))
    #: One of TRANSPORTS.
    transport: str = field(default_factory=_choice("BAGUA_TRANSPORT", TRANSPORTS, "auto"))
    #: TCP streams to a peer on another host.
    streams_per_peer: int = field(default_factory=_integer("BAGUA_STREAMS_PER_PEER", 2, 1, MAX_STREAMS))
    #: How all_reduce goes between hosts: one of ALGORITHMS.
    algorithm: str = field(default_factory=_choice("BAGUA_ALGORITHM", ALGORITHMS, "auto"))
    #: Ranks share memory only if this is equal; "" asks the system.
    host_id: str = field(default_factory=_text("BAGUA_HOST_ID", ""))


_TLS_FILES = ("BAGUA_TLS_CERT", "BAGUA_TLS_KEY", "BAGUA_TLS_CA")


def _tls(has_secret: bool) -> Tls | None:
    """What BAGUA_TLS and the files say. ValueError for a part of them, and for files that cannot be used."""
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
        raise ValueError(f"{', '.join(paths)} needs {' and '.join(missing)} beside it")
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
    """Arguments where they are given, then the environment, then the defaults."""
    if secret is None:
        secret = _secret()
    if not isinstance(secret, str | bytes | bytearray | memoryview):
        # Of an integer `bytes` makes so many zeros.
        raise TypeError(f"the secret is a {type(secret).__name__}, not text or bytes")
    return Settings(
        timeout=_timeout() if timeout is None else _positive("timeout", float(timeout)),
        secret=secret.encode() if isinstance(secret, str) else bytes(secret),
        tls=_tls(bool(secret)),
    )


# These make sense together only.
_declared("BAGUA_TLS", "0", settings)
for _file in _TLS_FILES:
    _declared(_file, None, settings)


def address_book() -> str | None:
    """The address book of an elastic job, BAGUA_ELASTIC; None in other jobs. ValueError for what names none."""
    url = text("BAGUA_ELASTIC")
    if url is not None:
        try:
            book_place(url)
        except ValueError as error:
            raise ValueError(f"BAGUA_ELASTIC: {error}") from None
    return url


def book_place(url: str) -> Path | tuple[str, int]:
    """The directory, or the host and port, of an address book. ValueError for what names none."""
    with contextlib.suppress(ValueError):
        parsed = urlsplit(url)
        if parsed.scheme == "file" and parsed.path.startswith("/") and parsed.path != "/" and not parsed.netloc:
            return Path(parsed.path)
        if parsed.scheme == "tcp" and parsed.hostname is not None and parsed.port is not None and not parsed.path:
            return parsed.hostname, parsed.port
    raise ValueError(f"an address book is file:///directory or tcp://host:port, not {url!r}")


_declared("BAGUA_ELASTIC", None, address_book)
# The runner sets it for scripts.
_declared("BAGUA_RESTART_COUNT", None, partial(integer, "BAGUA_RESTART_COUNT", 0))
# The launchers set it for scripts.
_optional("BAGUA_NET_IMPLEMENT")

#: Bytes of a gradient bucket.
default_bucket_size = _integer("BAGUA_DEFAULT_BUCKET_SIZE", 10 * 1024 * 1024, 1)
#: The hosts of `baguarun` where its options name none.
host_list = _optional("BAGUA_NODE_DOMAIN_NAMES")
#: The port of ssh on hosts that name none.
ssh_port = _integer("BAGUA_SSH_PORT", 22, 1, 65535)

# Those of the original's tuning service, which does not exist here: for scripts that ask for them.
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
    """Identifies this start of the job among those that use the same store."""
    return f"{text('TORCHELASTIC_RUN_ID') or ''}/{text('TORCHELASTIC_RESTART_COUNT') or '0'}"


_metrics_port = _declared("BAGUA_METRICS_PORT", None, partial(integer, "BAGUA_METRICS_PORT", 0, 1, 65535))
metrics_host = _text("BAGUA_METRICS_ADDR", "127.0.0.1")


def metrics_address() -> tuple[str, int] | None:
    """Where local rank 0 serves its metrics, each further rank of a host one port higher; None: nowhere."""
    port = _metrics_port()
    return (metrics_host(), port) if port else None


def trace_dir() -> str | None:
    """The directory of flight records; None when BAGUA_TRACE_DIR is set and empty: there are to be none."""
    found = os.environ.get("BAGUA_TRACE_DIR")
    return default_trace_dir() if found is None else found or None


_declared("BAGUA_TRACE_DIR", None, trace_dir)


def default_trace_dir() -> str:
    """The directory of flight records where BAGUA_TRACE_DIR is not set: "bagua" in what `tempfile.gettempdir` gives.

    That function makes and removes a file, for which a thousand ranks of a host that fail at once wait. So it is only
    called where no directory of its list can be written to.
    """
    found = tempfile.tempdir
    if found is None:
        named = (os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP"))
        places = (os.path.abspath(place) for place in (*named, "/tmp", "/var/tmp", "/usr/tmp") if place)
        found = next((place for place in places if os.access(place, os.W_OK | os.X_OK)), None)
    return os.path.join(found or tempfile.gettempdir(), "bagua")


@dataclass(frozen=True)
class CudaPlaces:
    """Where the libraries of CUDA are looked for."""

    #: Paths of files, each in place of everything else; None where the library is searched for.
    libcuda: str | None
    libnvrtc: str | None
    libnccl: str | None
    #: Folders of this Python's packages, in which `nvidia/*/lib` may be.
    site_packages: list[str]
    #: NCCL 2.30 or newer may let several ranks use one device.
    nccl_multi_rank_gpu: bool = False


_libcuda, _libnvrtc = _optional("BAGUA_LIBCUDA"), _optional("BAGUA_LIBNVRTC")
_libnccl = _optional("BAGUA_LIBNCCL")


def cuda_places() -> CudaPlaces:
    """What the BAGUA_LIB variables name, and this Python's folders."""
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
    """The folder of compiled kernels, `bagua/cuda` in that of the user's caches; None: the user has none."""
    # A relative path does not count: https://specifications.freedesktop.org/basedir-spec/latest/
    caches = text("XDG_CACHE_HOME")
    if caches is None or not os.path.isabs(caches):
        caches = os.path.expanduser("~/.cache")
    return os.path.join(caches, "bagua", "cuda") if os.path.isabs(caches) else None


#: Values of BAGUA_LOG.
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_log_level = _declared("BAGUA_LOG", None, lambda: choice("BAGUA_LOG", LOG_LEVELS, "") if text("BAGUA_LOG") else None)


def log_level() -> str | None:
    """The level of the logger "bagua"; None leaves it alone."""
    return _log_level()


#: Whether ranks compare each call on CUDA arrays before it is put on a device.
cuda_check = _flag("BAGUA_CUDA_CHECK")

#: Values of BAGUA_CUDA_COLLECTIVE.
CUDA_COLLECTIVES = ("auto", "nccl", "staged")
#: How arrays on CUDA devices are combined.
cuda_collective = _choice("BAGUA_CUDA_COLLECTIVE", CUDA_COLLECTIVES, "auto")
