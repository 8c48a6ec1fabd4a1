"""Layers on blocks against whole ones: outputs, gradients, running statistics, masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engines.sbp import batchnorm_passes
from engines.sbp.block_collectives import BlockCollectives
from engines.sbp.block_layout import Dim, Layout, Mesh
from engines.sbp.sharded_layers import BatchNorm, BlockDropout, LayerNorm, RMSNorm
from harness.nn import dropout
from harness.nn.dropout import Dropout
from harness.sbp.device_grid import Grid
from tests.support.sbp_blocks import block, on

MESH = Mesh(Grid(1, 4))
Trained = tuple[Tensor, Tensor, dict[str, Tensor], dict[str, Tensor]]
"""Output, gradient of the input, gradients of parameters, buffers."""


def filled(module: nn.Module) -> nn.Module:
    """With parameters that are neither 0 nor 1."""
    generator = torch.Generator().manual_seed(2)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return module.double()


def drawn(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 + 2 * torch.randn(shape, generator=generator, dtype=torch.float64)


def trained(module: nn.Module, passes: list[tuple[Tensor, Tensor]]) -> Trained:
    """Forward and backward on each (input, weight of the output)."""
    for given, weight in passes:
        x = given.clone().requires_grad_()
        y = module(x)
        (y * weight).sum().backward()
    assert x.grad is not None
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return y.detach(), x.grad, gradients, dict(module.named_buffers())


def check(make: Callable[[], nn.Module], put: Callable[[Any, BlockCollectives], nn.Module], layout: Layout, *shape: int,
          digits: tuple[int, ...]) -> None:  # fmt: skip
    """Of a layer whose parameters are split as the columns, and summed over the digits of the rows."""
    passes = [(drawn(2 * n, *shape), drawn(2 * n + 1, *shape)) for n in range(2)]

    def run(by: BlockCollectives) -> Trained:
        rank = by.groups.rank
        mine = [(block(x, layout, MESH, rank), block(weight, layout, MESH, rank)) for x, weight in passes]
        module = put(filled(make()), by)
        for key, parameter in list(module.named_parameters()):
            module.register_parameter(key, nn.Parameter(features(parameter.data, layout, rank)))
        y, x, gradients, buffers = trained(module, mine)
        summed = {name: by.summed(gradient, digits) if digits else gradient for name, gradient in gradients.items()}
        return y, x, summed, buffers

    y, x, gradients, buffers = trained(filled(make()), passes)
    for rank, (own_y, own_x, own_gradients, own_buffers) in enumerate(on(MESH, run)):
        torch.testing.assert_close(own_y, block(y, layout, MESH, rank), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(own_x, block(x, layout, MESH, rank), rtol=1e-11, atol=1e-11)
        assert own_gradients.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(own_gradients[name], features(gradient, layout, rank), rtol=1e-11, atol=1e-11)
        assert own_buffers.keys() == buffers.keys()
        for name, value in buffers.items():
            torch.testing.assert_close(own_buffers[name], value, rtol=1e-12, atol=1e-12)


def features(vector: Tensor, layout: Layout, rank: int) -> Tensor:
    return vector[torch.from_numpy(layout.columns.mine(len(vector), MESH, rank).copy())]


@pytest.mark.parametrize("layout", [Layout().split(columns=(1, 0)), Layout().split(rows=(0,), columns=(1,))])
@pytest.mark.parametrize("affine", [True, False])
def test_layer_norm_over_split_features(layout: Layout, affine: bool) -> None:
    digits = tuple(sorted(layout.columns.split))
    check(lambda: nn.LayerNorm(8, elementwise_affine=affine), lambda norm, by: LayerNorm(norm, digits, by), layout,
          4, 3, 8, digits=tuple(sorted(layout.rows.split)))  # fmt: skip


@pytest.mark.parametrize("layout", [Layout().split(columns=(1, 0)), Layout().split(rows=(0,), columns=(1,))])
@pytest.mark.parametrize("keys", [{"eps": 0.1}, {}, {"elementwise_affine": False}], ids=str)
def test_rms_norm_over_split_features(layout: Layout, keys: dict[str, Any]) -> None:
    """Without an eps it is that of the dtype."""
    digits = tuple(sorted(layout.columns.split))
    check(lambda: nn.RMSNorm(8, **keys), lambda norm, by: RMSNorm(norm, digits, by), layout, 4, 3, 8,
          digits=tuple(sorted(layout.rows.split)))  # fmt: skip


def test_rms_norm_of_short_numbers_is_torchs() -> None:
    """Squares are summed in float32, and the result has the dtype of the input."""
    x, layout = drawn(1, 2, 256).bfloat16(), Layout().split(columns=(0, 1))

    def run(by: BlockCollectives) -> Tensor:
        found: Tensor = RMSNorm(nn.RMSNorm(256, elementwise_affine=False), (0, 1), by)(
            block(x, layout, MESH, by.groups.rank)
        )
        return found

    whole = nn.RMSNorm(256, elementwise_affine=False)(x)
    for rank, found in enumerate(on(MESH, run)):
        assert found.dtype == whole.dtype == torch.bfloat16
        torch.testing.assert_close(found, block(whole, layout, MESH, rank), rtol=2**-8, atol=0)


def test_layer_norm_of_short_numbers_computes_in_float32() -> None:
    """As torch does: a sum of bfloat16 in bfloat16 would be off by a percent."""

    def run(by: BlockCollectives) -> Tensor:
        x = block(drawn(1, 2, 256).bfloat16(), Layout().split(columns=(0, 1)), MESH, by.groups.rank)
        found: Tensor = LayerNorm(nn.LayerNorm(256, elementwise_affine=False), (0, 1), by)(x)
        return found

    whole = nn.LayerNorm(256, elementwise_affine=False)(drawn(1, 2, 256).bfloat16().float())
    for rank, mine in enumerate(on(MESH, run)):
        torch.testing.assert_close(mine, block(whole, Layout().split(columns=(0, 1)), MESH, rank))


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.BatchNorm1d(3), (8, 3)),
        (lambda: nn.BatchNorm2d(3, momentum=0.3), (8, 3, 2, 2)),
        (lambda: nn.BatchNorm2d(3, momentum=None), (8, 3, 2, 2)),
        (lambda: nn.BatchNorm2d(3, affine=False, track_running_stats=False), (4, 3, 2, 1)),
    ],
    ids=["1d", "momentum", "mean of all", "without statistics"],
)
@pytest.mark.parametrize("axes", [(0, 1), (1,)])
@pytest.mark.parametrize("kernels", ["compiled", "torch"])
def test_batch_norm_over_split_samples(
    make: Callable[[], nn.Module],
    shape: tuple[int, ...],
    axes: tuple[int, ...],
    kernels: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Statistics are those of the whole micro-batch, and so are the running ones after two of them."""
    if kernels == "torch":
        monkeypatch.setattr(batchnorm_passes, "compiled", lambda: None)
    digits = tuple(sorted(axes))
    check(make, lambda norm, by: BatchNorm(norm, digits, by), Layout().split(rows=axes), *shape, digits=digits)


@pytest.mark.parametrize("layout", [Layout().split(rows=(1, 0)), Layout().split(columns=(0,)),
                                    Layout().split(rows=(0,), columns=(1,))])  # fmt: skip
@pytest.mark.parametrize(("shape", "channels", "column"), [((8, 8), False, None), ((4, 3, 8), False, None),
                                                          ((4, 8, 2, 2), True, None), ((4, 8, 5, 5), False, 1)],
)  # fmt: skip
def test_masks_are_those_of_the_whole_tensor(
    layout: Layout, shape: tuple[int, ...], channels: bool, column: int | None
) -> None:
    """Features, channels, and attention's heads (dimension 1)."""
    source = Dropout(0.5, channels)
    x = drawn(0, *shape)

    def run(by: BlockCollectives) -> Tensor:
        module = BlockDropout(source, layout, by, column)
        with dropout.keyed(1, 2, 3):
            found: Tensor = module(block(x, layout, MESH, by.groups.rank))
        return found

    with dropout.keyed(1, 2, 3):
        whole = source(x)
    assert 0 < (whole == 0).sum() < whole.numel()
    for rank, mine in enumerate(on(MESH, run)):
        assert torch.equal(mine, block(whole, layout, MESH, rank))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("make", [nn.Dropout, nn.Dropout2d])
def test_masks_of_torchs_modules_are_those_of_the_whole_tensor(make: type[nn.Module], turned: bool) -> None:
    """As torch's generator draws them, also for a tensor whose dimensions stand in another order in memory."""
    layout, source = Layout().split(rows=(0,), columns=(1,)), make(0.5)

    def ordered(x: Tensor) -> Tensor:
        return x.contiguous(memory_format=torch.channels_last) if turned else x.contiguous()

    x = ordered(drawn(0, 4, 8, 3, 5))

    def run(by: BlockCollectives) -> Tensor:
        torch.manual_seed(5)
        found: Tensor = BlockDropout(source, layout, by, None)(ordered(block(x, layout, MESH, by.groups.rank)))
        return found

    found = on(MESH, run)
    torch.manual_seed(5)
    whole = source(x)
    assert 0 < (whole == 0).sum() < whole.numel()
    for rank, mine in enumerate(found):
        assert torch.equal(mine, block(whole, layout, MESH, rank))


def test_a_mask_where_nothing_is_dropped() -> None:
    def run(by: BlockCollectives) -> bool:
        x, layout = torch.ones(2, 2), Layout(Dim(), Dim((0,), frozenset((0,))))
        none = BlockDropout(Dropout(0.0), layout, by, None)
        evaluated = BlockDropout(Dropout(0.5), layout, by, None).eval()
        return none(x) is x and evaluated(x) is x

    assert all(on(MESH, run))
