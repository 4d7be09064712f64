"""Cases as in ``torch_ranks``, also on pretended hosts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tests.distributed.torch_ranks import Case
from tests.world import make_world

#: A case that hangs must not cost the whole deadline of the run; nor may the start of many ranks on few cores be one.
ENVIRONMENT = {"BAGUA_TIMEOUT": "60"}

#: Ranks, or the ranks of each host.
Layout = int | tuple[tuple[int, ...], ...]

LAYOUTS: list[Layout] = [1, 2, 3, 4, ((0, 1), (2, 3)), ((0, 1), (2,))]


def name_of(layout: Layout) -> str:
    """Ranks of each host."""
    return str(layout) if isinstance(layout, int) else "+".join(str(len(host)) for host in layout)


@functools.cache
def outcomes(function: Callable[..., Any], layout: Layout) -> list[dict[str, str]]:
    """Every rank's outcomes of ``function``, which calls ``run_cases``. Runs once for all tests of a module."""
    hosts = None if isinstance(layout, int) else layout
    size = layout if isinstance(layout, int) else sum(map(len, layout))
    found: list[dict[str, str]] = make_world(size, hosts=hosts, env=ENVIRONMENT, timeout=240.0).run(function)
    return found


def check(function: Callable[..., Any], layout: Layout, case: Case) -> None:
    """Fails with every rank's traceback when a case failed."""
    texts = [by_name[case.__name__] for by_name in outcomes(function, layout)]
    assert not any(texts), "\n".join(f"--- rank {rank} ---\n{text}" for rank, text in enumerate(texts))
