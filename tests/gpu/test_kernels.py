"""Every kernel on a GPU: the values that the core computes, bit for bit, from machine code for the device."""

from __future__ import annotations

import pytest

from tests.cuda.ranks import Ranks
from tests.gpu.kernels import check_all


@pytest.mark.slow
def test_every_kernel_computes_what_the_core_computes(anywhere: Ranks) -> None:
    # The compiler, a process of its own, writes a report too.
    assert anywhere(1, check_all, clean=False, timeout=200)[0] > 200
    anywhere.check()
