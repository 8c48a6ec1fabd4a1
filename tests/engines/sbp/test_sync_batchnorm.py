"""Batch norm over split samples: what is sent, and how exact it is. That it is torch's is in test_modules.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from engines.sbp.block_collectives import BlockCollectives
from engines.sbp.block_layout import Layout, Mesh
from engines.sbp.sync_batchnorm import normed
from harness.sbp.device_grid import Grid
from tests.support.sbp_blocks import block, on

MESH, ALL = Mesh(Grid(1, 4)), (0, 1)
ROWS = Layout().split(rows=ALL)
EPS = 1e-5


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
        y, _, _ = normed(x, weight, None, EPS, ALL, by)
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
    others, variance = (0, 2, 3), exact.detach().var((0, 2, 3), correction=0)

    def run(by: BlockCollectives) -> tuple[Tensor, ...]:
        own = block(x, ROWS, MESH, by.groups.rank).requires_grad_()
        y, mean, found = normed(own, None, None, EPS, ALL, by)
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
        y, mean, variance = normed(own, None, None, EPS, ALL, by)
        y.float().square().sum().backward()
        assert own.grad is not None and own.grad.dtype is torch.bfloat16
        return y.detach(), mean, variance

    want = functional.batch_norm(x.float(), None, None, training=True, eps=EPS)
    for rank, (y, mean, variance) in enumerate(on(MESH, run)):
        assert y.dtype is torch.bfloat16, "as torch's, which layers after it are made for"
        torch.testing.assert_close(y.float(), block(want, ROWS, MESH, rank), rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(mean, x.float().mean((0, 2, 3)))
        torch.testing.assert_close(variance, x.float().var((0, 2, 3), correction=0))


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
    x = drawn(torch.float32).requires_grad_()
    y, mean, variance = normed(x, None, None, EPS, (), Alone())  # type: ignore[arg-type]
    with Arguments() as kernel:
        y.square().sum().backward()
    torch.testing.assert_close(kernel.seen[5], mean)
    torch.testing.assert_close(kernel.seen[6], (variance + EPS).rsqrt())
    assert kernel.seen[7] is False
