"""Tensors that cannot be communicated are refused by the reason: their device, or that they are sparse."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make setup")

from bagua.torch_api.process_group import check_on_cpu, check_place  # noqa: E402


def tensor(device: str, layout: Any) -> Any:
    """What the checks read of a tensor, on devices that this machine need not have."""
    return SimpleNamespace(device=torch.device(device), layout=layout)


@pytest.mark.parametrize(
    ("check", "device", "layout", "why"),
    [
        (check_place, "cuda:0", torch.sparse_coo, "x is torch.sparse_coo on cuda:0: only dense tensors"),
        (check_place, "cpu", torch.sparse_csr, "x is torch.sparse_csr: only dense tensors"),
        (check_place, "xpu:1", torch.strided, "x is on xpu:1: only CPU and CUDA tensors"),
        (check_place, "mps", torch.sparse_coo, "x is on mps: only CPU and CUDA tensors"),
        (check_on_cpu, "cuda:0", torch.strided, "x is on cuda:0: only CPU tensors"),
        (check_on_cpu, "cpu", torch.sparse_coo, "x is torch.sparse_coo: only dense tensors"),
    ],
)
def test_a_tensor_is_refused_by_its_device_or_its_layout(check: Any, device: str, layout: Any, why: str) -> None:
    with pytest.raises(NotImplementedError) as raised:
        check(tensor(device, layout), "x")
    assert str(raised.value) == f"{why} can be communicated here"


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_dense_tensors_of_the_host_and_of_cuda_devices_are_taken(device: str) -> None:
    check_place(tensor(device, torch.strided), "x")
