"""Cases as in ``torch_ranks``, on layouts of ranks on pretended hosts."""

from __future__ import annotations

from collections.abc import Callable

from tests.distributed import torch_ranks
from tests.distributed.torch_ranks import Case

#: Seconds: the start of many ranks on few cores must not count as a rank that is missing.
TIMEOUT = 60

#: Ranks, or the ranks of each host.
Layout = int | tuple[tuple[int, ...], ...]

LAYOUTS: list[Layout] = [1, 2, 3, 4, ((0, 1), (2, 3)), ((0, 1), (2,))]


def name_of(layout: Layout) -> str:
    """Ranks of each host."""
    return str(layout) if isinstance(layout, int) else "+".join(str(len(host)) for host in layout)


def check(case: Case, layout: Layout, *, run: Callable[[int], dict[str, str]] | None = None) -> None:
    """Fails with every rank's traceback when a case failed."""
    if isinstance(layout, int):
        torch_ranks.check(case, layout, run=run, timeout=TIMEOUT)
    else:
        torch_ranks.check(case, sum(map(len, layout)), layout, run=run, timeout=TIMEOUT)
