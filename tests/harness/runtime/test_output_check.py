"""Samples of outputs: equal to rounding, or refused, on any device and of any layout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from harness.runtime import output_check


def same(was: Tensor, new: Tensor) -> bool:
    try:
        output_check.compare(output_check.samples([was]), [new], "stage 0")
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64])
@pytest.mark.parametrize("shape", [(), (0,), (7,), (33, 65), (4, 8, 16, 16)])
def test_rounding_is_no_difference(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=dtype)
    assert same(x, x.clone())
    assert same(x, x * (1 + torch.finfo(dtype).eps))
    assert not x.numel() or not same(x, x + 1)


@pytest.mark.parametrize(
    ("dtype", "change"), [(torch.float64, 1e-12), (torch.float32, 1e-4), (torch.complex128, 1e-12)]
)
def test_a_small_change_is_a_difference(dtype: torch.dtype, change: float) -> None:
    x = torch.randn(7, dtype=dtype)
    assert not same(x, x * (1 + change))


def test_one_sample_of_a_micro_batch_that_differs_is_seen() -> None:
    x = torch.randn(16, 1000)
    y = x.clone()
    y[5] = 0
    assert not same(x, y)


def test_strides_do_not_matter() -> None:
    x = torch.randn(4, 8, 16, 16)
    assert same(x, x.to(memory_format=torch.channels_last))
    assert same(x, x.transpose(1, 2).contiguous().transpose(1, 2))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite(value: float) -> None:
    x, y = torch.ones(3), torch.tensor([1.0, value, 1.0])
    assert same(y, y.clone())
    assert not same(x, y) and not same(y, x) and not same(y, 2 * y)


def test_shapes_types_and_numbers_count() -> None:
    x = torch.arange(6)
    assert same(x, x.clone()) and not same(x, x + (x == 3))
    assert not same(x, x.reshape(2, 3)) and not same(x, x.double())
    with pytest.raises(RuntimeError):
        output_check.compare(output_check.samples([x]), [x, x], "stage 0")


def test_a_gpu_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a result that says it is elsewhere: it is read later, once."""

    class Elsewhere(Tensor):
        device = torch.device("cuda")

    differ = output_check._differs
    monkeypatch.setattr(output_check, "_differs", lambda was, new: differ(was, new).as_subclass(Elsewhere))
    assert same(torch.ones(2), torch.ones(2))
    assert same(torch.ones(2), torch.zeros(2))
    with pytest.raises(RuntimeError, match="stage 0"):
        output_check.raise_differences()
    output_check.raise_differences()
