"""Cross entropy over classes on several devices against torch's, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from engines.sbp.block_collectives import BlockCollectives
from engines.sbp.block_layout import Dim, Mesh
from engines.sbp.sharded_cross_entropy import SplitClasses, split_loss
from harness.sbp.device_grid import Grid
from tests.support.sbp_blocks import on

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

    def run(by: BlockCollectives) -> list[tuple[Tensor, Tensor, dict[str, int]]]:
        found = []
        for axes in SPLITS:
            mine = torch.from_numpy(Dim(axes, frozenset(axes)).mine(CLASSES, MESH, by.groups.rank).copy())
            logits, targets = drawn(dtype)
            own = logits[:, mine].requires_grad_()
            loss = split_loss(tokens, own, targets, SplitClasses(mine, CLASSES, tuple(sorted(axes)), by))
            loss.backward()
            assert own.grad is not None
            found.append((loss.detach(), own.grad, dict(by.counter.take()[1])))
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
    for rank, reported in enumerate(losses(dtype)):
        for axes, (loss, gradient, sent) in zip(SPLITS, reported, strict=True):
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


WEIGHT = torch.linspace(0.1, 2.0, CLASSES, dtype=torch.float64)
VARIANTS: dict[str, dict[str, Any]] = {
    "ignored": {"ignore_index": 7},
    "the default ignored": {},
    "smoothed": {"label_smoothing": 0.1},
    "weighted": {"weight": WEIGHT},
    "all": {"weight": WEIGHT, "label_smoothing": 0.3, "ignore_index": 0},
}


def several(seed: int = 2) -> tuple[Tensor, Tensor]:
    """Pixels, of which some have no class; a class that cannot be."""
    generator = torch.Generator().manual_seed(seed)
    logits = 5 * torch.randn(SAMPLES, CLASSES, 3, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, CLASSES, (SAMPLES, 3), generator=generator)
    targets[0, 0], targets[1, 1], targets[2, 2] = -100, 7, 0
    return logits, targets


def in_halves() -> list[dict[str, tuple[Tensor, Tensor]]]:
    """Of 2 ranks: the loss and its block's gradient, by variant."""

    def run(by: BlockCollectives) -> dict[str, tuple[Tensor, Tensor]]:
        found, mine = {}, torch.arange(6) + 6 * by.groups.rank
        for name, more in VARIANTS.items():
            logits, targets = drawn_for(more)
            own = logits[:, mine].requires_grad_()
            loss = split_loss(asked(more), own, targets, SplitClasses(mine, CLASSES, (0,), by))
            loss.backward()
            assert own.grad is not None
            found[name] = loss.detach(), own.grad
        return found

    return on(Mesh(Grid(1, 2)), run)


def drawn_for(more: dict[str, Any]) -> tuple[Tensor, Tensor]:
    logits, targets = several()
    return logits, targets.where(targets != -100, more.get("ignore_index", -100))


def asked(more: dict[str, Any]) -> Callable[[Tensor, Tensor], Tensor]:
    return torch.nn.CrossEntropyLoss(reduction="sum", **more)


def test_every_key_of_torchs_cross_entropy() -> None:
    halves = in_halves()
    for name, more in VARIANTS.items():
        logits, targets = drawn_for(more)
        whole = logits.clone().requires_grad_()
        want = asked(more)(whole, targets)
        want.backward()
        assert whole.grad is not None and want > 10
        for rank, reported in enumerate(halves):
            loss, gradient = reported[name]
            torch.testing.assert_close(loss, want.detach(), rtol=1e-13, atol=0, msg=name)
            torch.testing.assert_close(gradient, whole.grad[:, 6 * rank : 6 * rank + 6], rtol=1e-12, atol=1e-13)


def test_a_class_that_cannot_be() -> None:
    """Its logit is minus infinity; it is the first one of a device that has no target of some samples."""

    def run(by: BlockCollectives) -> tuple[Tensor, Tensor]:
        logits, targets = drawn(torch.float64)
        logits[:, 6] = -torch.inf
        own = logits[:, torch.arange(6) + 6 * by.groups.rank].requires_grad_()
        loss = split_loss(tokens, own, targets, SplitClasses(torch.arange(6) + 6 * by.groups.rank, CLASSES, (0,), by))
        loss.backward()
        assert own.grad is not None
        return loss.detach(), own.grad

    whole, targets = drawn(torch.float64)
    whole[:, 6] = -torch.inf
    whole.requires_grad_()
    want = tokens(whole, targets)
    want.backward()
    assert whole.grad is not None
    for rank, (loss, gradient) in enumerate(on(Mesh(Grid(1, 2)), run)):
        torch.testing.assert_close(loss, want.detach(), rtol=1e-13, atol=0)
        torch.testing.assert_close(gradient, whole.grad[:, 6 * rank : 6 * rank + 6], rtol=1e-12, atol=1e-13)


SAID = (
    'a loss over split classes is a cross_entropy(..., reduction="sum") of targets that are classes'
    " -> planner.ends=batch_split, which splits the output by samples alone"
)
REFUSED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda x, y: functional.cross_entropy(x, y, reduction="mean"),
    "none": lambda x, y: functional.cross_entropy(x, y, reduction="none").sum(),
    "mean, as it was once asked": lambda x, y: functional.cross_entropy(x, y, None, True, reduction="sum"),
    "probabilities": lambda x, y: functional.cross_entropy(x, x.detach().softmax(1), reduction="sum"),
    "another loss": lambda x, y: functional.nll_loss(functional.log_softmax(x, 1), y % 6, reduction="sum"),
}


def test_other_losses_over_split_classes_are_refused_with_the_fix() -> None:
    def run(by: BlockCollectives) -> dict[str, str]:
        logits, targets = drawn(torch.float64)
        found = {}
        for name, loss in REFUSED.items():
            with pytest.raises(ValueError) as caught:
                split_loss(loss, logits[:, :6], targets, SplitClasses(torch.arange(6), CLASSES, (0,), by))
            found[name] = str(caught.value)
        return found

    assert on(Mesh(Grid(1, 2)), run) == [dict.fromkeys(REFUSED, SAID)] * 2


@pytest.mark.parametrize("wrong", [-1, CLASSES])
def test_a_target_that_is_no_class(wrong: int) -> None:
    """As torch says it: it is never another class."""

    def run(by: BlockCollectives) -> str:
        logits, targets = drawn(torch.float64)
        with pytest.raises(IndexError) as caught:
            split_loss(tokens, logits[:, :6], targets.fill_(wrong), SplitClasses(torch.arange(6), CLASSES, (0,), by))
        return str(caught.value)

    assert all("out of" in said for said in on(Mesh(Grid(1, 2)), run))


def test_other_functions_go_on_as_they_are() -> None:
    def run(by: BlockCollectives) -> bool:
        x = torch.arange(6.0).view(2, 3)
        with SplitClasses(torch.arange(3), 6, (0,), by):
            return torch.equal(functional.softmax(x, 1).sum(1), torch.ones(2)) and not by.counter.take()[1]

    assert all(on(Mesh(Grid(1, 2)), run))
