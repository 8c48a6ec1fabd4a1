"""Running statistics of a mini-batch that comes in micro-batches, against torch's own batch norm of all of it."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from engines.gpipe.gpipe_module import GPipe
from harness.nn import batchnorm
from harness.nn.batchnorm import DeferredBatchNorm, combined
from tests.tiers import examples

KINDS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def deferred_after(norm: nn.Module, batches: list[Tensor], chunks: int) -> DeferredBatchNorm:
    sequence = batchnorm.deferred(nn.Sequential(copy.deepcopy(norm)), chunks)
    for batch in batches:
        parts = batch.tensor_split(chunks)
        batchnorm.begin(sequence, len(parts))
        for part in parts:
            sequence(part)
    found = sequence[0]
    assert isinstance(found, DeferredBatchNorm)
    return found


@settings(max_examples=examples(25), deadline=None, derandomize=True)
@given(
    st.integers(2, 5), st.integers(1, 5), st.sampled_from([0.1, 1.0, None]),
    st.floats(-1e3, 1e3), st.floats(1e-2, 1e2), st.integers(0, 99),
)  # fmt: skip
def test_statistics_are_those_of_the_whole_batch(
    dims: int, chunks: int, momentum: float | None, shift: float, scale: float, seed: int
) -> None:
    drawn = torch.Generator().manual_seed(seed)
    plain = KINDS[dims](3, momentum=momentum).double()
    shape = (2 * chunks + seed % 3, 3, 2, 3, 2)[:dims]
    batches = [shift + scale * torch.randn(shape, dtype=torch.float64, generator=drawn) for _ in range(2)]
    found = deferred_after(plain, batches, chunks)
    for batch in batches:
        plain(batch)
    assert list(found.state_dict()) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], value, rtol=1e-9, atol=1e-9 * scale**2)


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize(("mean", "deviation"), [(1000.0, 0.01), (-3000.0, 1.0), (0.0, 1.0)])
def test_large_means_leave_the_variance_exact(mean: float, deviation: float, chunks: int) -> None:
    x = mean + deviation * torch.randn(64, 3, 8, 8)
    found = deferred_after(nn.BatchNorm2d(3, momentum=1.0), [x], chunks)
    assert found.running_mean is not None and found.running_var is not None
    exact = x.double()
    torch.testing.assert_close(found.running_mean.double(), exact.mean((0, 2, 3)), rtol=1e-6, atol=1e-3 * deviation)
    torch.testing.assert_close(found.running_var.double(), exact.var((0, 2, 3)), rtol=2e-2, atol=0.0)


@pytest.mark.parametrize(
    ("dtype", "mean", "deviation"), [(torch.float16, 300.0, 1.0), (torch.bfloat16, 3.0, 0.3), (torch.float16, 0.0, 1.0)]
)
def test_half_precision_is_summed_in_float32(dtype: torch.dtype, mean: float, deviation: float) -> None:
    x = (mean + deviation * torch.randn(64, 3, 8, 8)).to(dtype)
    found = deferred_after(nn.BatchNorm2d(3, momentum=1.0).to(dtype), [x], 4)
    assert found.running_mean is not None and found.running_var is not None
    assert found.running_var.dtype is dtype
    exact = x.double()
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(found.running_mean.double(), exact.mean((0, 2, 3)), rtol=eps, atol=eps)
    torch.testing.assert_close(found.running_var.double(), exact.var((0, 2, 3)), rtol=2 * eps, atol=eps)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 99))
@settings(max_examples=examples(40), deadline=None, derandomize=True)
def test_moments_of_parts_make_those_of_all(sizes: list[int], seed: int) -> None:
    drawn = torch.Generator().manual_seed(seed)
    parts = [10 * k + torch.randn(n, 3, dtype=torch.float64, generator=drawn) for k, n in enumerate(sizes)]
    means, variances = torch.stack([p.mean(0) for p in parts]), torch.stack([p.var(0, correction=0) for p in parts])
    mean, variance = combined(means, variances, torch.tensor(sizes))
    torch.testing.assert_close(mean, torch.cat(parts).mean(0))
    torch.testing.assert_close(variance, torch.cat(parts).var(0, correction=0))


class Both(nn.Module):
    """Calls a norm twice."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(2 * x + self.norm(x))
        return y


def test_a_layer_in_several_places_has_one_replacement() -> None:
    norm = nn.BatchNorm1d(3)
    found = batchnorm.deferred(nn.Sequential(norm, nn.Linear(3, 3), norm, Both(norm)), 4)
    assert isinstance(found[0], DeferredBatchNorm)
    assert found[0] is found[2] is found[3].norm


@pytest.mark.parametrize("mode", ["never", "except_last", "always"])
@pytest.mark.parametrize("places", [1, 2])
def test_each_use_of_a_layer_has_the_statistics_of_the_whole_batch(places: int, mode: str) -> None:
    norm, wanted = nn.BatchNorm1d(3).double(), nn.BatchNorm1d(3).double()
    plain = nn.Sequential(Both(norm), nn.Linear(3, 3).double(), *[nn.Identity(), norm][: 2 * (places - 1)])
    pipe = GPipe(copy.deepcopy(plain), [len(plain)], ["cpu"], 4, mode, deferred_batch_norm=True)
    inputs: list[Tensor] = []
    norm.register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach()))
    for _ in range(2):
        x = torch.randn(15, 3, dtype=torch.float64)
        pipe(x).sum().backward()
        inputs.clear()
        for part in x.tensor_split(4):
            plain(part)
        uses = len(inputs) // 4
        for use in range(uses):
            wanted(torch.cat(inputs[use::uses]))
    pipe.close()
    for name, value in wanted.state_dict().items():
        torch.testing.assert_close(pipe.state_dict()[f"0.norm.{name}"], value, rtol=1e-9, atol=1e-9)
