"""Cross entropy over classes on several devices against torch's, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from engines.sbp.exchange import Exchanger
from engines.sbp.layout import Dim, Mesh
from engines.sbp.loss import SplitClasses, split_loss
from harness.sbp.grid import Grid
from tests.engines.sbp.blocks import on

MESH = Mesh(Grid(1, 4))
SAMPLES, CLASSES = 5, 12
SPLITS = [(0,), (1,), (0, 1), (1, 0)]


def tokens(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits, targets, reduction="sum") / 3


def drawn(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Large numbers, too: their exponentials must not overflow."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(SAMPLES, CLASSES, generator=generator, dtype=torch.float64) * 10
    logits[0, 3], logits[1, 7] = 900.0, -900.0
    return logits.to(dtype), torch.tensor([3, 7, 0, 11, 4])


def losses(dtype: torch.dtype) -> list[tuple[Tensor, list[list[tuple[Tensor, Tensor, dict[str, int]]]]]]:
    """For each split what the ranks have: the loss, their block's gradient, bytes."""

    def run(by: Exchanger) -> list[tuple[Tensor, Tensor, dict[str, int]]]:
        found = []
        for axes in SPLITS:
            mine = torch.from_numpy(Dim(axes, frozenset(axes)).mine(CLASSES, MESH, by.groups.rank).copy())
            logits, targets = drawn(dtype)
            own = logits[:, mine].requires_grad_()
            loss = split_loss(tokens, own, targets, SplitClasses(mine, CLASSES, tuple(sorted(axes)), by))
            loss.backward()
            assert own.grad is not None
            found.append((loss.detach(), own.grad, dict(by.tally.take()[1])))
        return found

    return on(MESH, run)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)]
)
def test_as_torch_has_it(dtype: torch.dtype, tolerance: float) -> None:
    logits, targets = drawn(dtype)
    whole = logits.clone().requires_grad_()
    wide = whole.float() if dtype is torch.bfloat16 else whole
    want = tokens(wide, targets)
    want.backward()
    assert want > 50 and whole.grad is not None
    for rank, told in enumerate(losses(dtype)):
        for axes, (loss, gradient, sent) in zip(SPLITS, told, strict=True):
            mine = torch.from_numpy(Dim(axes, frozenset(axes)).mine(CLASSES, MESH, rank).copy())
            torch.testing.assert_close(loss, want.detach(), rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(gradient, whole.grad[:, mine], rtol=tolerance, atol=tolerance)
            members = MESH.size(axes)
            width = 8 if dtype is torch.float64 else 4
            # the maximum, and (sum of exponentials, hit) in one: never the logits themselves
            each = 2 * (members - 1) * width * SAMPLES
            assert sent == {"all_reduce@statistics": each // members + 2 * each // members}


def test_whole_classes_are_the_models_own_affair() -> None:
    logits, targets = drawn(torch.float64)
    assert torch.equal(split_loss(tokens, logits, targets, None), tokens(logits, targets))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_mean_over_split_classes_is_refused(reduction: str) -> None:
    def run(by: Exchanger) -> str:
        logits, targets = drawn(torch.float64)
        mine = torch.arange(6)
        with SplitClasses(mine, CLASSES, (0,), by), pytest.raises(ValueError) as caught:
            functional.cross_entropy(logits[:, :6], targets, reduction=reduction)
        return str(caught.value)

    assert set(on(Mesh(Grid(1, 2)), run)) == {'a loss over split classes is cross_entropy(..., reduction="sum")'}


def test_other_functions_go_on_as_they_are() -> None:
    def run(by: Exchanger) -> bool:
        x = torch.arange(6.0).view(2, 3)
        with SplitClasses(torch.arange(3), 6, (0,), by):
            return torch.equal(functional.softmax(x, 1).sum(1), torch.ones(2)) and not by.tally.take()[1]

    assert all(on(Mesh(Grid(1, 2)), run))
