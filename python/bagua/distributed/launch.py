"""torchrun under the name of the original's launcher:

python -m bagua.distributed.launch --nproc_per_node N [...] script [arguments]
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence

__all__ = ["main"]

#: `baguarun` passes this as the first argument: the job ends with the connection that started it.
END_WITH_STDIN = "--end-with-stdin"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the ranks of one node to their end, with torchrun's options and variables.

    Returns 0 if every rank ended with 0, 1 if one failed or torch is missing, and 128 + N if signal N ended the job.
    Raises SystemExit with code 2 for bad arguments.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        from torch.distributed import run as torchrun
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    except ImportError as error:
        print(f'starting ranks needs torch: pip install "torch>=2.5" ({error})', file=sys.stderr)
        return 1
    if given[:1] == [END_WITH_STDIN]:
        del given[0]
        threading.Thread(target=_hang_up_after_stdin, daemon=True).start()
    try:
        torchrun.main(given)
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        return 1
    except SignalException as ended:
        return 128 + ended.sigval
    return 0


def _hang_up_after_stdin() -> None:
    """Sends SIGHUP to this process, which ends the job, when ssh closes standard input because its connection ended."""
    while os.read(0, 65536):
        pass
    os.kill(os.getpid(), signal.SIGHUP)


if __name__ == "__main__":
    sys.exit(main())
