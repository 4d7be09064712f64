"""Every verb, element type and reduce operation on CUDA arrays by each collective: the table of the contract.

On the simulated driver, and by NCCL on the strict libnccl of tests/cuda/nccl over it.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest

from tests.cuda.ranks import Ranks
from tests.cuda.verb_contract import DTYPES, Found, move_everything, reduce_everything


class Collective(NamedTuple):
    """A row: its name, the numbers of ranks, and whether reductions have the host's bits."""

    name: str
    sizes: tuple[int, ...]
    exact: bool

    def check(self, found: list[Found], dtype: str) -> None:
        """Checks the properties that only this collective has."""
        assert len({each.digest for each in found}) == 1
        for _, stats in found:
            assert stats["collective"] == self.name
            if self.name == "nccl":
                # The host does what NCCL lacks.
                served = dtype in ("float16", "float32", "float64")
                assert (stats["to_host_bytes"] + stats["to_device_bytes"] + stats["pinned_bytes"] == 0) == served


ROWS = (Collective("staged", (1, 2, 3), exact=True), Collective("nccl", (1, 2, 3, 4), exact=False))
COLLECTIVES = {each.name: each for each in ROWS}
#: The arithmetic of all types is in test_kernels_values.py.
QUICK = ("float16", "float32", "int32", "bool")
PLACES = [(each.name, size) for each in ROWS for size in each.sizes]


@pytest.mark.parametrize(
    ("dtype", "name", "size"),
    [
        pytest.param(dtype, *place, marks=[pytest.mark.slow] * (place[1] == 1 or dtype not in QUICK))
        for dtype in DTYPES
        for place in PLACES
        # With more ranks another order of the same sums.
        if place[1] == 2 or dtype in QUICK
    ],
)
def test_every_reduction_of_a_type_is_equal_on_all_ranks_and_as_the_hosts(
    ranks: Ranks, name: str, size: int, dtype: str
) -> None:
    collective = COLLECTIVES[name]
    collective.check(ranks.by(name, size, reduce_everything, dtype, collective.exact), dtype)


@pytest.mark.parametrize(("name", "size"), PLACES)
@pytest.mark.parametrize("dlpack", [False, True], ids=["interface", "dlpack"])
def test_every_verb_that_moves_has_the_bits_of_the_host(ranks: Ranks, name: str, size: int, dlpack: bool) -> None:
    ranks.by(name, size, move_everything, "float32", dlpack, (3, 2))


@pytest.mark.slow
@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_type_can_be_moved(ranks: Ranks, name: str, dtype: str) -> None:
    ranks.by(name, 2, move_everything, dtype, True, (7,))


@pytest.mark.parametrize("name", COLLECTIVES)
def test_empty_arrays_pass_through_every_verb(ranks: Ranks, name: str) -> None:
    ranks.by(name, 2, move_everything, "float32", True, (0, 3))
