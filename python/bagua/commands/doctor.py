"""`bagua doctor`: checks whether this machine and environment can run a job."""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from bagua import config, conflicting_packages, cuda, extension, group, launcher, log, require_torch
from bagua.commands import all_reduce_check, machine_limits, tables
from bagua.errors import BaguaError
from bagua.metrics.server import why_not_local

__all__ = ["add", "examine"]

# Open files of a rank besides its connections to peers: its own, the application's, and unauthenticated connections.
_FILES = 256

# Estimated number of channels with their own streams: those of the group, of engines and of sub-groups.
_LANES = 4


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="check whether this machine and environment can run a job",
        description="Examines this machine and this environment. The exit code is 1 when a problem is found.",
        epilog="example: srun --ntasks 2 bagua doctor --no-trial",
    )
    parser.add_argument("--all", action="store_true", help="also show settings that have their defaults")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--no-trial", action="store_true", help="skip the trial all_reduce of two processes")
    parser.set_defaults(run=_run_doctor)


def _run_doctor(options: argparse.Namespace) -> int:
    found = examine(with_trial=not options.no_trial)
    tables.show(json.dumps(found, indent=2, allow_nan=False) if options.json else _text(found, options.all))
    return 1 if found["problems"] else 0


def examine(*, with_trial: bool = True) -> dict[str, Any]:
    """Returns the dict that `bagua doctor --json` prints."""
    problems = _Problems()
    found: dict[str, Any] = {
        "versions": _versions(),
        "machine": machine_limits.machine(),
        "transports": _transports(problems),
        # Read before the trial or anything else can raise them.
        "limits": machine_limits.limits(),
        "settings": _settings(problems),
    }
    place = _place(problems)
    found["launcher"] = _launcher(place)
    if conflict := conflicting_packages.conflict():
        problems.add("installation", *conflict)
    if why := require_torch.too_old("bagua.torch_api", found["versions"]["torch"] or ""):
        problems.add("torch", why, 'pip install "torch>=2.5"')
    found["network"] = _network(place, problems)
    _check_limits(place, problems)
    found["cuda"] = _cuda()
    found["trial"] = None
    if with_trial:
        found["trial"], why = all_reduce_check.run_check()
        if why:
            problems.add("trial of two processes", why, "fix the other problems first, or try it yourself: bagua bench")
    found["problems"] = problems.found
    return found


class _Problems:
    def __init__(self) -> None:
        self.found: list[dict[str, str]] = []

    def add(self, what: str, why: object, fix: str) -> None:
        self.found.append({"what": what, "why": str(why), "fix": fix})


def _versions() -> dict[str, str | None]:
    def version_of(*names: str) -> str | None:
        for name in names:
            try:
                return metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
        return None

    return {
        "bagua": extension.version(),
        "python": platform.python_version(),
        "numpy": version_of("numpy"),
        "torch": version_of("torch"),
        "lightning": version_of("lightning", "pytorch-lightning"),
        "ray": version_of("ray"),
    }


def _transports(problems: _Problems) -> dict[str, Any]:
    found = {}
    for name, (available, why) in (("shm", machine_limits.shm()), ("tcp", machine_limits.tcp())):
        if not available:
            problems.add(f"transport {name}", why, "check the restrictions of the kernel or the container")
        elif name == "shm" and config.text("BAGUA_TRANSPORT") == "tcp":
            available, why = False, "BAGUA_TRANSPORT=tcp"
        found[name] = {"available": available, "why": why}
    return found


def _settings(problems: _Problems) -> dict[str, Any]:
    environment = config.environment({})
    found = {}
    for name, variable in sorted(config.VARIABLES.items()):
        value, source = variable.default, "default"
        if name == "BAGUA_TRACE_DIR":
            value = config.default_trace_dir()
        # An empty variable counts as unset, except for the directory of flight records, where it turns records off.
        if environment.get(name) or (name in environment and name == "BAGUA_TRACE_DIR"):
            value, source = environment[name], "environment"
            try:
                variable.read()
            except ValueError as error:
                problems.add(name, error, f"correct it, or unset it; its default is {variable.default or 'none'}")
        if name == config.SECRET and value is not None:
            value = "(not shown)"
        found[name] = {"value": value, "source": source}
    if (why := _why_no_records()) is not None:
        fix = "name a directory that this user can write to, or unset it"
        problems.add("BAGUA_TRACE_DIR", f"flight records cannot be written to {config.trace_dir()}: {why}", fix)
    if config.text("BAGUA_METRICS_PORT") is not None and (no_server := why_not_local(config.metrics_host())):
        fix = "give an address of this host, or 0.0.0.0 for all of them"
        problems.add("BAGUA_METRICS_ADDR", f"metrics cannot be served at {config.metrics_host()!r}: {no_server}", fix)
    for name, nearest in config.unknown():
        advice = "unset it: bagua doctor --all lists all settings" if nearest is None else f"rename it to {nearest}"
        meant = "" if nearest is None else f"; did you mean {nearest}?"
        problems.add(name, f"{name} is not a setting of Bagua{meant}", advice)
    return found


def _why_no_records() -> OSError | None:
    """Returns the error of creating a file in BAGUA_TRACE_DIR or its closest existing parent; None if there is none."""
    if config.text("BAGUA_TRACE_DIR") is None:
        return None
    directory = Path(config.trace_dir() or "").absolute()
    try:
        with tempfile.TemporaryFile(dir=next(path for path in (directory, *directory.parents) if path.exists())):
            return None
    except OSError as error:
        return error


def _place(problems: _Problems) -> launcher.RankInfo | None:
    """Returns this process's rank. Returns None and adds a problem if it cannot be determined."""
    try:
        place = launcher.place()
        if place.world_size > 1:
            launcher.master()
    except (ValueError, BaguaError) as error:
        problems.add("launcher", error, "start the ranks with torchrun, srun or mpirun, or set what is missing")
        return None
    return place


def _launcher(place: launcher.RankInfo | None) -> dict[str, Any]:
    try:
        found = launcher.found()
    except ValueError:
        return {"name": None, "rank": None, "world_size": None}
    rank, size = (found.rank, found.world_size) if place is None else (place.rank, place.world_size)
    return {"name": found.name, "rank": rank, "world_size": size}


def _network(place: launcher.RankInfo | None, problems: _Problems) -> dict[str, Any]:
    try:
        host, port = launcher.known_master()
    except ValueError:
        # The launcher's problem names it already.
        host, port = None, None
    for name, wanted in (("MASTER_ADDR", host), ("BAGUA_ELASTIC", _book_host())):
        if wanted is not None and (why := launcher.unresolved(wanted)):
            fix = f"give {name} a name or an address that this host can look up"
            problems.add(name, f"cannot resolve host name {wanted!r}: {why}", fix)
            host = None
    address = None
    try:
        address = group.listen_host((host, port or 1) if host else None, 2, None)
    except (BaguaError, ValueError) as error:
        problems.add("network", error, "set MASTER_ADDR to an address of rank 0's host that this host can reach")
    interface = None if address is None else log.interface_of(address)
    mtu = None if interface is None else machine_limits.mtu_of(interface)
    return {"interface": interface, "address": address, "mtu": mtu}


def _book_host() -> str | None:
    try:
        place = config.book_place(config.text("BAGUA_ELASTIC") or "")
    except ValueError:
        return None
    return place[0] if isinstance(place, tuple) else None


def _check_limits(place: launcher.RankInfo | None, problems: _Problems) -> None:
    try:
        streams = config.settings().streams_per_peer
    except ValueError:
        streams = 2
    peers = 1 if place is None else max(1, place.world_size - 1)
    needed = _FILES + peers * (1 + _LANES * streams)
    allowed = machine_limits.hard_limit_of_files()
    if allowed is not None and allowed < needed:
        problems.add(
            "open files",
            f"a rank with {peers} peer(s) may need {needed} file descriptors, and the hard limit is {allowed}",
            "raise the hard limit where the ranks are started: ulimit -Hn, LimitNOFILE=, --ulimit nofile=",
        )


def _cuda() -> dict[str, Any]:
    why_not = cuda.why_not()
    devices = len(cuda.info()["devices"])
    works = f"{devices} device(s); `bagua` communicates arrays on them, `bagua.torch_api` only tensors in host memory"
    return {"available": why_not is None, "why": why_not or works}


def _text(found: dict[str, Any], with_defaults: bool) -> str:
    parts = ["no problems"]
    if found["problems"]:
        lines = [tables.bold(f"problems: {len(found['problems'])}")]
        for each in found["problems"]:
            what = "" if each["why"].startswith(each["what"]) else f"{each['what']}: "
            lines += [f"  {tables.red(what + each['why'])}", f"    {each['fix']}"]
        parts = ["\n".join(lines)]
    parts += [
        tables.pairs(name, [_shown(key, value) for key, value in found[name].items()])
        for name in ("versions", "machine", "limits", "network", "launcher")
    ]
    if not extension.IS_OPTIMIZED:
        parts.append("This build of the extension is not optimized: make setup, or maturin develop --release")
    channels = found["transports"] | {"cuda": found["cuda"]}
    parts.append(
        tables.pairs("transports", [(*_shown(name, each["available"]), each["why"]) for name, each in channels.items()])
    )
    chosen: list[tuple[str, ...]] = [
        (*_shown(name, each["value"]), each["source"])
        for name, each in found["settings"].items()
        if with_defaults or each["source"] != "default"
    ]
    parts.append(tables.pairs("settings", chosen or [("all have their defaults; --all shows them",)]))
    if found["trial"] is not None:
        outcome = "works" if found["trial"]["ok"] else "failed"
        parts.append(f"trial: all_reduce of {found['trial']['ranks']} ranks {outcome}, {found['trial']['seconds']} s")
    return "\n\n".join(parts)


def _shown(name: str, value: object) -> tuple[str, str]:
    """Returns the name and value of one finding as text; numbers of bytes get a unit."""
    if value is None:
        return name, "-"
    if isinstance(value, bool):
        return name, "yes" if value else "no"
    if isinstance(value, int) and name.endswith("_bytes"):
        return name.removesuffix("_bytes"), tables.amount(value)
    return name, str(value)
