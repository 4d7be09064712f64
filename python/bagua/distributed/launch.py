"""Starts the ranks of a job on this node, with the flags of the original's launcher, over torchrun:

python -m bagua.distributed.launch --nproc_per_node N [...] script [arguments]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bagua.distributed.supervise import supervise

__all__ = ["main"]

#: Of `baguarun`, as the first argument: the job ends with the connection that started it.
END_WITH_STDIN = "--end-with-stdin"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one node's ranks to their end; the exit code, as `supervise` says."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == [END_WITH_STDIN]:
        return supervise("launch", given[1:], end_with_stdin=True)
    return supervise("launch", given)


if __name__ == "__main__":
    sys.exit(main())
