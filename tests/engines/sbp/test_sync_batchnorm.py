"""Batch norm over split samples: what is sent, and how exact it is. That it is torch's is in test_modules.py."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import engines.sbp
from engines.sbp import batchnorm_passes
from engines.sbp.batchnorm_passes import BY_TORCH, Affine, Running, passes
from engines.sbp.block_collectives import BlockCollectives
from engines.sbp.block_layout import Layout, Mesh
from engines.sbp.sync_batchnorm import normed
from harness.sbp.device_grid import Grid
from tests.support.sbp_blocks import block, on

MESH, ALL = Mesh(Grid(1, 4)), (0, 1)
ROWS = Layout().split(rows=ALL)
EPS = 1e-5


@pytest.fixture(params=["compiled", "torch"], autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test by compiled kernels, and where there are none."""
    if request.param == "torch":
        monkeypatch.setattr(batchnorm_passes, "compiled", lambda: None)
    else:
        assert batchnorm_passes.compiled() is not None


def running() -> Running:
    """Which are the new ones after a single micro-batch, the variance unbiased."""
    return Running(torch.zeros(3), torch.zeros(3), 1.0)


def drawn(dtype: torch.dtype, mean: float = 0.0) -> Tensor:
    """(16, 3, 2, 2); samples of each device lie around another mean."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, 3, 2, 2, generator=generator, dtype=torch.float64)
    return (x + mean + torch.arange(16).view(-1, 1, 1, 1) / 8).to(dtype)


@pytest.mark.parametrize("first", [False, True])
def test_one_gathering_each_way(first: bool) -> None:
    """Of two numbers for each channel; back only if the input wants a gradient."""

    def run(by: BlockCollectives) -> list[dict[str, int]]:
        x = block(drawn(torch.float64), ROWS, MESH, by.groups.rank).requires_grad_(not first)
        weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
        y = normed(x, Affine(weight, None, EPS), None, ALL, by)
        forward = dict(by.counter.take()[1])
        y.square().sum().backward()
        return [forward, dict(by.counter.take()[1])]

    once = {"all_gather@statistics": 3 * 2 * 3 * 8}  # to three others
    assert on(MESH, run) == [[once, {} if first else once]] * 4


def test_short_numbers_with_a_large_mean() -> None:
    """A mean of squares less a squared mean would have no digit left of a variance of 1 next to a mean of 1e4."""
    x = drawn(torch.float32, 1e4)
    exact = x.double().requires_grad_()
    back = drawn(torch.float64)
    (functional.batch_norm(exact, None, None, training=True, eps=EPS) * back).sum().backward()
    others, variance = (0, 2, 3), exact.detach().var((0, 2, 3))

    def run(by: BlockCollectives) -> tuple[Tensor, ...]:
        own = block(x, ROWS, MESH, by.groups.rank).requires_grad_()
        mean, found, _ = given = running()
        y = normed(own, Affine(None, None, EPS), given, ALL, by)
        (y * block(back.float(), ROWS, MESH, by.groups.rank)).sum().backward()
        assert own.grad is not None
        return mean, found, own.grad

    for rank, (mean, found, gradient) in enumerate(on(MESH, run)):
        torch.testing.assert_close(mean.double(), exact.detach().mean(others), rtol=1e-6, atol=0.0)
        torch.testing.assert_close(found.double(), variance, rtol=1e-3, atol=0.0)
        assert exact.grad is not None
        torch.testing.assert_close(gradient.double(), block(exact.grad, ROWS, MESH, rank), rtol=0.0, atol=5e-3)


def test_bfloat16_has_statistics_in_float32() -> None:
    x = drawn(torch.bfloat16)

    def run(by: BlockCollectives) -> tuple[Tensor, ...]:
        own = block(x, ROWS, MESH, by.groups.rank).requires_grad_()
        mean, variance, _ = given = running()
        y = normed(own, Affine(None, None, EPS), given, ALL, by)
        y.float().square().sum().backward()
        assert own.grad is not None and own.grad.dtype is torch.bfloat16
        return y.detach(), mean, variance

    want = functional.batch_norm(x.float(), None, None, training=True, eps=EPS)
    for rank, (y, mean, variance) in enumerate(on(MESH, run)):
        assert y.dtype is torch.bfloat16, "as torch's, which layers after it are made for"
        torch.testing.assert_close(y.float(), block(want, ROWS, MESH, rank), rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(mean, x.float().mean((0, 2, 3)))
        torch.testing.assert_close(variance, x.float().var((0, 2, 3)))


class Alone:
    """One device, which gathers what it has."""

    mesh = Mesh(Grid(1, 1))

    def gathered(self, x: Tensor, digits: object) -> Tensor:
        return x.unsqueeze(0)


class Arguments(TorchDispatchMode):
    """Keeps what the backward kernel of batch norms is given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: tuple[Any, ...] = ()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.native_batch_norm_backward.default:
            self.seen = args
        return func(*args, **(kwargs or {}))


def test_every_statistic_is_there_for_kernels_that_read_it() -> None:
    """CUDA's for channels that lie next to each other reads the saved ones, which others do without."""
    x = drawn(torch.float32).to(memory_format=torch.channels_last).requires_grad_()
    y = normed(x, Affine(None, None, EPS), None, (), Alone())  # type: ignore[arg-type]
    with Arguments() as kernel:
        y.square().sum().backward()
    torch.testing.assert_close(kernel.seen[5], x.detach().mean((0, 2, 3)))
    torch.testing.assert_close(kernel.seen[6], (x.detach().var((0, 2, 3), correction=0) + EPS).rsqrt())
    assert kernel.seen[7] is False


def test_gradients_in_another_order_of_dimensions() -> None:
    """As of an expanded mean, or of a layer with channels last: dy is not in one piece."""
    x, back = drawn(torch.float64).requires_grad_(), drawn(torch.float64)[:, :, :1, :1].expand(16, 3, 2, 2)
    whole = functional.batch_norm(x, None, None, training=True, eps=EPS)
    y = normed(x, Affine(None, None, EPS), None, (), Alone())  # type: ignore[arg-type]
    wanted, found = (torch.autograd.grad(one, x, back)[0] for one in (whole, y))
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_who_computes(dtype: torch.dtype, request: pytest.FixtureRequest) -> None:
    """Compiled kernels where all tensors are of one dtype and in one piece."""
    x, short = torch.zeros(2, 3, 4, 4, dtype=dtype), torch.zeros(3, dtype=torch.bfloat16)
    none, own = Affine(None, None, EPS), Affine(torch.ones(3, dtype=dtype), torch.ones(3, dtype=dtype), EPS)
    running = Running(own.bias, own.bias, 0.1)  # type: ignore[arg-type]
    found = [passes(x, none, None), passes(x, own, running), passes(x[:, :, 0, 0].clone(), own, running)]
    compiled = request.node.callspec.params["kernels"] == "compiled"
    assert [one is not BY_TORCH for one in found] == [compiled] * 3
    for given in (
        (x.bfloat16(), none, None),
        (x.transpose(2, 3), none, None),
        (x, Affine(short, None, EPS), None),
        (x, own, Running(short, short, 0.1)),
        (x.to("meta"), none, None),
    ):
        assert passes(*given) is BY_TORCH


def test_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # what the fixture has replaced
    monkeypatch.setitem(sys.modules, "engines.sbp.compiled_batchnorm", None)
    monkeypatch.delattr(engines.sbp, "compiled_batchnorm", raising=False)
    batchnorm_passes.compiled.cache_clear()
    try:
        assert batchnorm_passes.compiled() is None
    finally:
        batchnorm_passes.compiled.cache_clear()
