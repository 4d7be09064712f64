"""torchrun's variables, PET_ and the name of an option: what Kubeflow Trainer gives each pod instead of arguments.

An argument wins over its variable. Source: `torch.distributed.argparse_util`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from bagua import config
from bagua.distributed import flags

__all__ = ["KEEP_GOING", "SHUTDOWN_TIMEOUT_S", "defaults", "name", "problem"]

#: Options of the runner of elastic jobs that torchrun has too.
KEEP_GOING = (
    "nproc_per_node",
    "nnodes",
    "node_rank",
    "master_addr",
    "master_port",
    "max_restarts",
    "shutdown_timeout",
)

#: Seconds that ranks have after SIGTERM, with which an engine begins to take a job away, as torchrun has them.
SHUTDOWN_TIMEOUT_S = 30

_INTEGER = (r"-?[0-9]+", "is not an integer")
_SWITCH = (r"[0-9]+", "is neither 0 nor 1")

# What the value of a variable has to match, and what is wrong with one that does not.
_FORMS = {
    **dict.fromkeys(("node_rank", "master_port", "max_restarts", "shutdown_timeout"), _INTEGER),
    **dict.fromkeys(("module", "no_python", "run_path", "standalone", "virtual_local_rank"), _SWITCH),
    "master_addr": (r".+", "is empty"),
    "monitor_interval": (r"[0-9]*\.?[0-9]+([eE][-+]?[0-9]+)?", "is not a number of seconds"),
    "nnodes": (r"[1-9][0-9]*(:[1-9][0-9]*)?", "is neither a number of nodes from 1 nor MIN:MAX"),
    "nproc_per_node": (
        r"[1-9][0-9]*|[a-z]+",
        "is neither a number of ranks from 1 nor a word such as auto, cpu or gpu",
    ),
}


def name(option: str) -> str:
    """The variable of an option of torchrun."""
    return f"PET_{option.upper()}"


def problem(arguments: Sequence[str], integers: Collection[str] = ()) -> str | None:
    """What is wrong with the variables that are set, if anything is.

    Those of options that are given do not count, unless they take no value: torchrun reads their variables all the
    same. The options `integers` take an integer only, whatever torchrun takes.
    """
    environment = config.environment({})
    for option, (form, complaint) in _FORMS.items():
        value = environment.get(name(option))
        if value is None:
            continue
        if flags.value(arguments, option) is not None and (form, complaint) != _SWITCH:
            continue
        if option in integers and option != "master_addr":
            form, complaint = _INTEGER
        if not re.fullmatch(form, value):
            return f"{name(option)}={value!r} {complaint}"
    return None


def defaults(options: Sequence[str]) -> dict[str, str]:
    """The options whose variables are set, with their texts."""
    return {option: value for option in options if (value := config.text(name(option))) is not None}
