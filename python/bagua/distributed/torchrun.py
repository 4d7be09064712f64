"""torchrun with the flags of the original's launchers. The flags that torchrun lacks become variables of the ranks."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import uuid
from collections.abc import Sequence
from typing import Any

from bagua import config
from bagua.distributed import flags

__all__ = ["run"]


def run(which: str, arguments: Sequence[str], *, end_with_stdin: bool = False) -> int:
    """Runs the ranks of this node with torchrun's agent. `which` is "launch" or "run".

    Returns 0 if every rank ended with 0, 1 if one failed or torch is missing, and 128 + N if signal N ended the job.
    Raises SystemExit with code 2 for bad arguments. With `end_with_stdin`, the end of standard input ends the job as
    SIGHUP does: ssh closes it when its connection ends.
    """
    try:
        from torch.distributed import run as torchrun
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
    except ImportError as error:
        print(f'python -m bagua.distributed.{which} needs torch: pip install "torch>=2.5" ({error})', file=sys.stderr)
        return 1
    options = _parse(torchrun.get_args_parser(), which, arguments)
    if (said := flags.warning(options)) and options.node_rank == 0:
        print(f"python -m bagua.distributed.{which}: {said}", file=sys.stderr)
    config.announce(**flags.variables(options))
    if which == "launch":
        config.announce(NODE_RANK=str(options.node_rank))
    if end_with_stdin:
        threading.Thread(target=_hang_up_after_stdin, daemon=True).start()
    try:
        record(_launch)(torchrun, options)
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        return 1
    except SignalException as ended:
        return 128 + ended.sigval
    return 0


def _hang_up_after_stdin() -> None:
    while os.read(0, 65536):
        pass
    os.kill(os.getpid(), signal.SIGHUP)


def _parse(parser: argparse.ArgumentParser, which: str, given: Sequence[str]) -> argparse.Namespace:
    """Returns torchrun's options and ours."""
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
        if config.text("PET_MASTER_PORT") is None:
            parser.set_defaults(master_port=29500)
    else:
        keep_going = "start a rank that fails again, alone; must be the first argument, and has its own --help"
        parser.add_argument("--keep-going", action="store_true", help=keep_going)
        parser.add_argument(
            *flags.both("use_env"), action="store_true", default=True, help="the default: LOCAL_RANK is a variable"
        )
    options = parser.parse_args(given)
    if getattr(options, "keep_going", False):
        parser.error("--keep-going must be the first argument")
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
    """Returns torchrun's description of the output files, with the original's names."""
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
