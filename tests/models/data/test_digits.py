"""scikit-learn's digits for classifiers."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from harness.core.problem import CannotRun, advice
from models.classification_model import ClassificationModel
from models.data.images.config import Config
from models.data.images.images import build
from tests.problems import keys, refused


def classifier(*shape: int, classes: int = 10) -> Any:
    return ClassificationModel("small", shape, classes)


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_model_decides_the_size() -> None:
    batch = build(Config(), classifier(3, 32, 24), seed=0).batch(0, 5)
    assert batch.inputs.shape == (5, 3, 32, 24) and batch.inputs.dtype == torch.float32
    assert batch.inputs.is_contiguous()
    assert torch.equal(batch.inputs[:, 0], batch.inputs[:, 2])
    assert batch.targets.shape == (5,) and batch.targets.dtype == torch.int64
    batch.inputs[:, 0].zero_()
    assert batch.inputs[:, 1].any(), "channels do not share memory"


@pytest.mark.parametrize("shape", [(3, 8, 8), (64,)])
def test_an_epoch_is_scikit_learns_digits_as_they_are(shape: tuple[int, ...]) -> None:
    """Each with its own class, unmirrored, in -1..1; of a model of numbers an image is a row."""
    digits = load_digits()
    batch = build(Config(), classifier(*shape), seed=3).batch(0, 1797)
    assert batch.inputs.shape == (1797, *shape)
    pixels = batch.inputs.reshape(1797, -1, 64)[:, 0]
    assert pixels.min() == -1 and pixels.max() == 1
    got = torch.cat([((pixels + 1) * 8).round(), batch.targets[:, None]], dim=1)
    want = np.concatenate([digits.images.reshape(1797, 64), digits.target[:, None]], axis=1)
    assert sorted(map(tuple, got.tolist())) == sorted(map(tuple, want.tolist()))
    assert not torch.equal(batch.targets, torch.from_numpy(digits.target)), "in another order"


def test_the_pool_has_one_channel_whatever_the_model_takes() -> None:
    assert build(Config(), classifier(3, 16, 16), seed=0).pool.images.shape == (1797, 1, 16, 16)


def test_more_classes_than_the_model_knows() -> None:
    for shape, reported in (((3, 8, 8), "model.classes=10"), ((64,), "model.widths=[...,10]")):
        with pytest.raises(CannotRun) as caught:
            build(Config(), classifier(*shape, classes=7), seed=0)
        (problem,) = caught.value.problems
        assert (problem.key, problem.value) == ("model.classes", 7) and "10 classes" in problem.message
        assert advice(problem) == reported
    build(Config(), classifier(3, 8, 8, classes=1000), seed=0)


def test_shape_and_classes_are_reported_at_once() -> None:
    with pytest.raises(CannotRun) as caught:
        build(Config(), classifier(60, classes=5), seed=0)
    assert keys(refused(caught)) == ["model", "model.classes"]


@pytest.mark.usefixtures("one_thread")
def test_a_linear_classifier_learns_them() -> None:
    model = classifier(64)
    data = build(Config(), model, seed=0)
    torch.manual_seed(0)
    weight = torch.zeros(64, 10, requires_grad=True)
    for step in range(150):
        batch = data.batch(step, 64)
        loss = model.loss(batch.inputs @ weight, batch.targets) / 64
        (gradient,) = torch.autograd.grad(loss, weight)
        weight = (weight - 0.05 * gradient).detach().requires_grad_()
    batch = data.batch(0, 1797)
    assert ((batch.inputs @ weight).argmax(1) == batch.targets).float().mean() > 0.9


def test_the_build_looks_at_the_protocol_alone() -> None:
    model = SimpleNamespace(name="mine", task="classification", input_shape=(3, 9, 9), classes=10)
    assert build(Config(), model, seed=0).batch(1, 2).inputs.shape == (2, 3, 9, 9)
