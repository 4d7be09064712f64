"""torchrun's agent with the flags of the original's launchers: what `supervise.py` runs.

    python -m bagua.distributed.agent PID launch|run ARGUMENT ...

PID is the supervisor's. torchrun stays the launcher: the flags that it does not have become variables or arguments of
the ranks.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from bagua import config
from bagua.distributed import end_with_parent, flags, pet

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Runs the ranks of this node; the exit code, as `supervise` says."""
    parent, which, *given = arguments
    # torchrun ends its ranks in order then.
    end_with_parent.ask(int(parent), signal.SIGTERM)
    try:
        from torch.distributed import run as torchrun
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
    except ImportError as error:
        print(f'python -m bagua.distributed.{which} needs torch: pip install "torch>=2.5" ({error})', file=sys.stderr)
        return 1
    if problem := pet.problem(given):
        print(f"python -m bagua.distributed.{which}: {problem}", file=sys.stderr)
        return 2
    parser = torchrun.get_args_parser()
    options = _parse(parser, which, given)
    # torchrun's functions have no types.
    nodes: Any = torchrun.parse_min_max_nnodes
    local_ranks: Any = torchrun.determine_local_world_size
    checks: dict[str, Callable[[Any], None]] = {
        "nnodes": lambda value: _check_nodes(*nodes(value)),
        "nproc_per_node": lambda value: _check_least(local_ranks(value), 1),
        "max_restarts": lambda value: _check_least(value, 0),
    }
    for option, check in checks.items():
        try:
            check(getattr(options, option))
        except (ValueError, RuntimeError) as error:
            parser.error(f"--{option} or {pet.name(option)}: {error}")
    if (said := flags.warning(options)) and options.node_rank == 0:
        print(f"python -m bagua.distributed.{which}: {said}", file=sys.stderr)
    config.announce(**flags.variables(options))
    if which == "launch":
        config.announce(NODE_RANK=str(options.node_rank))
    try:
        record(_launch)(torchrun, options)
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        return 1
    except SignalException as ended:
        return 128 + ended.sigval
    return 0


def _check_nodes(least: int, most: int) -> None:
    if not 0 < least <= most:
        raise ValueError(f"from {least} to {most} nodes: it must be a number from 1, or MIN:MAX with MAX from MIN")


def _check_least(value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{value}: it must be at least {least}")


def _parse(parser: argparse.ArgumentParser, which: str, given: Sequence[str]) -> argparse.Namespace:
    """torchrun's options and ours; SystemExit with code 2 and a message for those that cannot be used."""
    parser.prog = f"python -m bagua.distributed.{which}"
    parser.description = "Starts the ranks of a job on this node, as torchrun does."
    flags.add(parser)
    if which == "launch":
        parser.add_argument(*flags.both("set_additional_flag"), action="store_true", help="append --local_rank=N")
        parser.add_argument(
            "--logdir", help="directory for the output, in files node_N_local_rank_R_stdout and _stderr"
        )
        parser.add_argument(*flags.both("host_list"), help="of baguarun; has no effect here")
        parser.add_argument(*flags.both("ssh_port"), help="of baguarun; has no effect here")
        # As in the original, also on one node.
        if not pet.defaults(["master_port"]):
            parser.set_defaults(master_port=29500)
    else:
        parser.epilog = "--keep-going starts another runner, of elastic jobs, with its own --keep-going --help"
        parser.add_argument(
            *flags.both("use_env"), action="store_true", default=True, help="the default: LOCAL_RANK is a variable"
        )
    options = parser.parse_args(given)
    options.logdir = getattr(options, "logdir", None)
    if getattr(options, "set_additional_flag", False):
        from torch.distributed.elastic.utils.api import macros

        options.training_script_args.insert(0, f"--local_rank={macros.local_rank}")
    return options


def _launch(torchrun: Any, options: argparse.Namespace) -> None:
    """Runs the ranks to their end."""
    if options.logdir is None:
        torchrun.run(options)
        return
    if options.standalone:
        options.rdzv_backend, options.rdzv_endpoint, options.rdzv_id = "c10d", "localhost:0", str(uuid.uuid4())
    chosen, entrypoint, arguments = torchrun.config_from_args(options)
    chosen.logs_specs = _node_logs(options.logdir, options.node_rank)
    torchrun.elastic_launch(config=chosen, entrypoint=entrypoint)(*arguments)


def _node_logs(folder: str, node_rank: int) -> Any:
    """torchrun's description of the files for output, with the names of the original."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest

    class NodeLogs(DefaultLogsSpecs):
        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            destination = super().reify(envs)
            os.makedirs(folder, exist_ok=True)
            for local_rank in envs:
                start = os.path.join(folder, f"node_{node_rank}_local_rank_{local_rank}")
                destination.stdouts[local_rank] = f"{start}_stdout"
                destination.stderrs[local_rank] = f"{start}_stderr"
            return destination

    return NodeLogs()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
