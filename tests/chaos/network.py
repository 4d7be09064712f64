"""Hosts that are network namespaces, and lines between them that can fail: the near end of `tests.chaos.switch`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

#: What happens on a line, as the arguments of `tests.chaos.switch.Line`.
Rule = dict[str, Any]


class Network:
    """`hosts` namespaces. OSError where they cannot be made."""

    def __init__(self, hosts: int = 4, number: int = 0) -> None:
        self.addresses = [f"10.78.{number}.{host + 1}" for host in range(hosts)]
        path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.switch", *self.addresses],
            cwd=ROOT,
            env=os.environ | {"PATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise OSError(self._process.communicate()[1].strip().splitlines()[-1])
        #: Paths of the namespaces, for `setns`.
        self.namespaces: list[str] = json.loads(line)

    def set(self, rules: dict[tuple[int, int], Rule]) -> float:
        """Replaces the rules of all lines, each from one host to another. The moment from which they hold."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        named = {f"{source}>{target}": rule for (source, target), rule in rules.items()}
        self._process.stdin.write(json.dumps(named) + "\n")
        self._process.stdin.flush()
        return float(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        """Removes the namespaces."""
        self._process.communicate()


def why_not() -> str:
    """The reason why there can be no network here; "" when there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin") is None:
        return "network namespaces need the program `ip` (Debian and Ubuntu: iproute2)"
    try:
        Network(1).close()
    except OSError as error:
        return f"namespaces with TUN devices are not permitted here: {error}"
    return ""
