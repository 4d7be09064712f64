"""A few of torch's own tests of torch.distributed on the backend "bagua". `make test-torch` runs all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.torch_suite.__main__ import not_passed, outcomes, passed

pytestmark = pytest.mark.slow

QUICK = [
    "test_DistributedDataParallelCPU",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_all_gather_full_group",
    "test_all_gather_object_subgroup",
    "test_all_reduce_coalesced_sum",
    "test_all_reduce_sum_async",
    "test_batch_isend_irecv_gloo",
    "test_gather",
    "test_get_future",
    "test_irecv",
    "test_isend_torch_profiler",
    "test_reduce_full_group_max",
    "test_scatter_object_list",
    "test_send_recv_any_source",
    "test_send_recv_with_tag",
    "test_sparse_all_reduce_sum",
]


def test_torchs_own_tests_pass(tmp_path: Path) -> None:
    # torch's tests import it. The oldest torch that we support has other tests.
    pytest.importorskip("expecttest", reason="expecttest is not installed: make setup")
    found = outcomes("bagua", tmp_path, QUICK)
    failed = [f"{name}: {line['outcome']}: {line['text']}" for name, line in found.items() if name not in passed(found)]
    assert not failed, "\n".join(failed)
    assert set(found) == set(QUICK)


def test_each_test_that_does_not_pass_has_its_reason() -> None:
    listed = not_passed()
    assert all(listed.values())
    assert not set(QUICK) & set(listed)
