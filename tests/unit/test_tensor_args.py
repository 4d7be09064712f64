"""Tensors of torch: which are refused, and why; the division of those of integers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make setup")

from bagua.torch_api.process_group import DTYPES, check_on_cpu, check_place  # noqa: E402
from bagua.torch_operand import divide_integers  # noqa: E402

INTEGERS = [dtype for dtype in DTYPES if not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)]


def tensor(device: str, layout: Any) -> Any:
    """Returns an object with the attributes that the checks read, for devices that this machine need not have."""
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


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_of_every_type_are_divided_and_cut_towards_zero(dtype: Any) -> None:
    info = torch.iinfo(dtype)
    values = [info.min, info.min + 1, info.min // 2, 0, 1, 5, info.max // 2, info.max // 2 + 1, info.max - 1, info.max]
    for divisor in (1, 2, 3, 7, 64, 100):
        tensor = torch.tensor(values, dtype=dtype)
        divide_integers(tensor, divisor)
        assert tensor.tolist() == [abs(value) // divisor * (1 if value > 0 else -1) for value in values]


def test_a_tensor_without_memory_of_its_own_is_refused_by_its_class() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.two_tensor import TwoTensor

    import bagua.torch_api as bagua

    bagua.init_process_group()
    without = [
        TwoTensor(torch.ones(3), torch.ones(3)),
        FakeTensorMode().from_tensor(torch.ones(3)),
        torch._efficientzerotensor(3),
    ]
    for found in without:
        for verb in (bagua.allreduce_inplace, bagua.broadcast):
            with pytest.raises(TypeError, match=f"is a {type(found).__name__}, which has no memory of its own"):
                verb(found)
    bagua.destroy_process_group()
