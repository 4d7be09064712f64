"""Starts the ranks of a job on this node, with the flags of the original's launcher, over torchrun:

python -m bagua.distributed.launch --nproc_per_node N [...] script [arguments]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bagua.distributed import torchrun

__all__ = ["main"]

#: `baguarun` passes this as the first argument: the job ends with the connection that started it.
END_WITH_STDIN = "--end-with-stdin"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the ranks of one node to their end. Returns the exit code of `torchrun.run`."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    ends = given[:1] == [END_WITH_STDIN]
    return torchrun.run("launch", given[ends:], end_with_stdin=ends)


if __name__ == "__main__":
    sys.exit(main())
