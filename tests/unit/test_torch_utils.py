"""Flattening, names of element types, averages of measurements."""

from __future__ import annotations

import pytest
import torch

from bagua.torch_api import utils


def test_element_types_have_short_names() -> None:
    assert utils.to_bagua_datatype(torch.float32) == "f32"
    assert utils.to_bagua_datatype(torch.bfloat16) == "bf16"
    assert utils.to_bagua_datatype(torch.int64) == "i64"
    with pytest.raises(ValueError, match=r"torch.complex64 cannot be communicated; these can: torch.float16"):
        utils.to_bagua_datatype(torch.complex64)


def test_contiguous_means_one_after_the_other() -> None:
    memory = torch.zeros(10)
    assert utils.check_contiguous([memory[:3], memory[3:3], memory[3:7], memory[7:]])
    assert not utils.check_contiguous([memory[:3], memory[4:]])
    assert not utils.check_contiguous([memory[4:], memory[:4]])
    assert utils.check_contiguous([])


def test_flattening_and_back_keeps_values() -> None:
    tensors = [torch.arange(4.0).view(2, 2).t(), torch.tensor(5.0), torch.empty(0)]
    flat = utils.get_flattened_tensor(tensors)
    assert flat is not None
    assert flat.tolist() == [0.0, 2.0, 1.0, 3.0, 5.0]
    for before, after in zip(tensors, utils.unflatten(flat, tensors), strict=True):
        assert torch.equal(before, after)
    assert utils.get_flattened_tensor([]) is None


def test_a_flattened_call_writes_its_results_back() -> None:
    tensors = [torch.ones(2, 2), torch.ones(3, dtype=torch.float64), torch.ones(1)]
    calls = []

    def double(flat: torch.Tensor) -> None:
        calls.append(flat.numel())
        flat.mul_(2)

    utils.apply_flattened_call_all(tensors, double)
    assert calls == [5, 3]
    assert all((tensor == 2).all() for tensor in tensors)
    utils.apply_flattened_call(tensors[:1], lambda flat, factor: flat.mul_(factor), (5,))
    assert (tensors[0] == 10).all()


def test_an_average_leaves_out_warm_up_and_outliers() -> None:
    mean, deviation, used = utils.average_by_removing_extreme_values([900.0] * 5 + [10.0, 12.0] * 5 + [1000.0])
    assert mean == 11.0
    assert deviation == 1.0
    assert sorted(set(used)) == [10.0, 12.0]
    with pytest.raises(ValueError, match="no values"):
        utils.average_by_removing_extreme_values([])


class Clock:
    """Time that passes when it is told to."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def recorded(*values: tuple[float, float]) -> tuple[Clock, utils.StatisticalAverage]:
    clock = Clock()
    average = utils.StatisticalAverage(clock=clock)
    for seconds, value in values:
        clock.now += seconds
        average.record(value)
    return clock, average


def test_a_statistical_average_weighs_by_time() -> None:
    _, average = recorded((1.0, 1.0), (1.0, 2.0), (2.0, 3.0))
    assert average.total_recording_time() == 4.0
    assert average.records == [3.0, 3.0, 2.25]
    assert average.get(1.0) == 3.0
    assert average.get(2.0) == 3.0
    assert average.get(4.0) == 2.25
    # Between two windows the sum grows linearly.
    assert average.get(3.0) == pytest.approx((6.0 + 1.5) / 3.0)
    assert average.get(1e9) == 2.25


def test_a_statistical_average_remembers_only_windows_of_powers_of_two() -> None:
    _, average = recorded(*((0.5, float(i)) for i in range(200)))
    assert average.total_recording_time() == pytest.approx(100.0)
    assert len(average.records) == 7
    assert average.record_tail[0] == pytest.approx(99.5)
    # The two records of the last second; what a window is known of half of it is a mean already.
    assert average.get(1.0) == pytest.approx(198.5, abs=1.0)


def test_the_age_of_the_last_record_counts() -> None:
    clock, average = recorded((4.0, 1.0), (4.0, 5.0))
    assert average.get(8.0) == 3.0
    clock.now += 4.0
    assert average.get(8.0) == 5.0


def test_every_statistical_average_starts_empty_and_now() -> None:
    _, first = recorded((2.0, 1.0))
    clock, second = recorded()
    assert first.records == [1.0, 1.0]
    assert second.records == []
    assert second.last_update_time == clock.now
    assert second.get(10.0) == 0.0
