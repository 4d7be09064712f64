"""Flattening, names of element types, averages of measurements."""

from __future__ import annotations

import pytest
import torch

from bagua.torch_api import utils


def test_element_types_have_short_names() -> None:
    assert utils.to_bagua_datatype(torch.float32) == "f32"
    assert utils.to_bagua_datatype(torch.bfloat16) == "bf16"
    assert utils.to_bagua_datatype(torch.int64) == "i64"
    assert utils.to_bagua_datatype(torch.uint16) == "u16"
    with pytest.raises(ValueError, match=r"torch.float8_e5m2 cannot be communicated; these can: torch.float16"):
        utils.to_bagua_datatype(torch.float8_e5m2)


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
    """Time that the test advances."""

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
    # Between two durations the mean is interpolated.
    assert average.get(3.0) == pytest.approx((3.0 + 2.25) / 2)
    assert average.get(1e9) == 2.25


def test_a_statistical_average_goes_on_from_given_records() -> None:
    clock = Clock()
    records, tail = [5.0, 4.5005175, 3.5034241850204078], (2.0166309999999985, 2.499061185570463)
    average = utils.StatisticalAverage(clock.now, records, tail, clock=clock)
    assert average.total_recording_time() == 4.0 + tail[0]
    assert [average.get_records_mean(n) for n in (0.5, 1.0, 2.0, 4.0, 6.1)] == [5.0, *records, tail[1]]
    clock.now += 1.0
    average.record(6.0)
    assert average.total_recording_time() == pytest.approx(7.0166, abs=1e-4)
    expected = {
        1: 6.0,
        2: 5.5,
        3: (6 + 4.5005175 * 2) / 3,
        5: (6 + 3.5034241850204078 * 4) / 5,
        7: (6 + 2.499061185570463 * 6.016631) / 7,
    }
    for seconds, mean in expected.items():
        assert average.get_records_mean(seconds) == pytest.approx(mean, abs=0.1)
    assert average.record_tail == pytest.approx((3.016631, (6 + tail[1] * 6.016631) / 7.016631))
    assert average.last_update_time == clock.now
