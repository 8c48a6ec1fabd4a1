"""What a module is trained for follows from the batch: tasks, samples and losses, and what is wrong with them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from harness import Classifier, Custom, LanguageModel, Regression
from harness.core.problem import CannotRun
from harness.interfaces import Batch
from harness.user_model.on_batch import on_batch

CLASSES = torch.tensor([2, 0, 4, 1])
INPUTS = torch.randn(4, 6)
TOKENS = torch.arange(12).reshape(4, 3) % 5


def module() -> nn.Module:
    return nn.Linear(6, 5)


def taken(*arguments: Any, **further: Any) -> Any:
    return on_batch(*arguments, **further)


def refused(*arguments: Any, **further: Any) -> str:
    with pytest.raises(CannotRun) as raised:
        on_batch(*arguments, **further)
    (problem,) = raised.value.problems
    return f"{problem.statement} -> {problem.hint}"


@pytest.mark.parametrize(
    ("batch", "task", "outputs", "expected"),
    [
        ((INPUTS, CLASSES), "classification", (4, 5), functional.cross_entropy),
        ((INPUTS, CLASSES.to(torch.uint8)), "classification", (4, 9), functional.cross_entropy),
        (Batch(INPUTS, INPUTS[:, :3]), "regression", (4, 3), functional.mse_loss),
        ([INPUTS, INPUTS[:, 0]], "regression", (4,), functional.mse_loss),
        ((TOKENS, TOKENS), "text", (4, 3, 5), lambda out, to: functional.cross_entropy(out.transpose(1, 2), to)),
    ],
)
def test_the_task_of_a_plain_module(batch: Any, task: str, outputs: Any, expected: Any) -> None:
    """The loss is the sum of the samples' losses: torch's mean, times four."""
    model = taken(module(), batch)
    inputs, targets = vars(batch).values() if isinstance(batch, Batch) else batch
    wanted = targets if targets.is_floating_point() else targets.long()
    sample, out = model.sample(4), torch.randn(outputs)
    assert model.task == task
    assert torch.equal(sample.inputs, inputs) and torch.equal(sample.targets, wanted)
    torch.testing.assert_close(model.loss(out, sample.targets), 4 * expected(out, wanted))


def test_samples_are_those_of_the_batch_in_turn() -> None:
    sample = taken(module(), (INPUTS, CLASSES)).sample(7)
    assert torch.equal(sample.inputs, torch.cat([INPUTS, INPUTS[:3]]))
    assert torch.equal(sample.targets, torch.cat([CLASSES, CLASSES[:3]]))


def test_a_loss_of_the_users() -> None:
    model = taken(module(), (INPUTS, CLASSES), loss=lambda out, target: (out.sum(1) - target).abs())
    assert isinstance(model, Custom)
    assert model.loss(torch.ones(4, 5), CLASSES) == (5 - CLASSES).abs().sum()


def boxes_and_classes(output: torch.Tensor, targets: dict[str, Any]) -> torch.Tensor:
    near, (classes,) = targets["boxes"], targets["others"]
    return (output[:, :2] - near).square().sum(1) + functional.cross_entropy(output[:, 2:], classes, reduction="none")


def test_targets_may_be_nested() -> None:
    """The loss gets them as in the batch, also those of a part of the samples."""
    targets = {"boxes": INPUTS[:, :2], "others": [(CLASSES % 3).int()], "name": "mine"}
    model, out = taken(module(), (INPUTS, targets), loss=boxes_and_classes), torch.randn(4, 5)
    expected = boxes_and_classes(out, {"boxes": INPUTS[:, :2], "others": [CLASSES % 3]})
    sample = model.sample(6)
    assert len(sample) == 6 and all(torch.equal(each[4:], each[:2]) for each in sample.targets)
    torch.testing.assert_close(model.loss(out[:3], tuple(each[:3] for each in sample.targets)), expected[:3].sum())
    other = taken(model, ([INPUTS[:2], {**targets, "boxes": INPUTS[:2, :2], "others": [CLASSES[:2] % 3]}]))
    torch.testing.assert_close(other.loss(out[:2], other.sample(2).targets), expected[:2].sum())


@pytest.mark.parametrize(
    ("wrapper", "batch"),
    [
        (Classifier(module(), (6,), 10), (INPUTS, CLASSES)),
        (Regression(module(), (6,), (5,)), (INPUTS, torch.randn(4, 5))),
        (LanguageModel(module(), 10, 3), (TOKENS, TOKENS)),
        (Custom(module(), (INPUTS[:1], CLASSES[:1]), nn.CrossEntropyLoss(reduction="sum")), (INPUTS, CLASSES)),
    ],
)
def test_a_wrapper_keeps_its_task_and_takes_the_samples(wrapper: Any, batch: Any) -> None:
    model = taken(wrapper, batch)
    assert torch.equal(model.sample(4).inputs, batch[0]) and model.module is wrapper.module
    assert (model.task, model.classes, model.input_shape) == (wrapper.task, wrapper.classes, wrapper.input_shape)
    assert model.output_shape_of(3) == wrapper.output_shape_of(3)
    result = SimpleNamespace(logits=3)
    assert model.select(result) is wrapper.select(result)
    assert taken(wrapper, None) is wrapper


def test_what_has_its_task_is_left_as_it_is() -> None:
    plain = module()
    assert taken(plain, None, named=True) is plain


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((nn.Linear, (INPUTS, CLASSES)), "model Linear is a class, not a module -> Linear(...)"),
        ((3, (INPUTS, CLASSES)), "model int is no model -> an nn.Module, the name of a model, or Classifier("),
        ((module(), None), "model Linear is a module alone: what are its input, its target and its loss? -> a batch"),
        ((module(), None, nn.MSELoss(), True), "loss needs a batch"),
        ((module(), (INPUTS, CLASSES), None, True), "model.task is given, and so is a batch"),
        ((module(), INPUTS), "batch is a Tensor, it must be (inputs, targets)"),
        ((module(), {"x": INPUTS}), "batch is a dict"),
        ((module(), ([1], CLASSES)), "batch has inputs that are a list"),
        ((module(), (INPUTS, torch.tensor(3))), "batch has targets of (), they must be a tensor of (samples, ...)"),
        ((module(), (INPUTS, CLASSES[:3])), "batch has 4 inputs and 3 targets"),
        ((module(), (INPUTS, {"x": 3})), "batch has targets that are a dict"),
        ((module(), (INPUTS, [INPUTS, CLASSES[:3]])), "batch has 4 inputs and 3 targets"),
        ((module(), (INPUTS, (INPUTS, CLASSES))), "targets that are a tuple, which does not say what"),
        ((Classifier(module(), (6,), 5), (INPUTS, {"y": CLASSES})), "targets that are a dict, a Classifier takes one"),
        (
            (Custom(module(), (INPUTS, {"y": CLASSES}), print), (INPUTS, {"z": CLASSES})),
            "has targets that are a dict, a Custom takes others",
        ),
        ((module(), (INPUTS, TOKENS)), "targets of int64 of (4, 3), which do not say what the module is trained for"),
        ((module(), (INPUTS, CLASSES > 1)), "targets of bool of (4,), which do not say"),
        ((module(), (INPUTS, CLASSES), "mse"), "batch loss must be a function of (output, targets), got 'mse'"),
        ((Classifier(module(), (7,), 5), (INPUTS, CLASSES)), "batch has inputs of (4, 6), a Classifier takes (n, 7)"),
        ((Classifier(module(), (6,), 4), (INPUTS, CLASSES)), "has targets of 0 to 4, a Classifier of 4 classes takes"),
        (
            (Classifier(module(), (6,), 5), (INPUTS, INPUTS)),
            "has targets of float32 of (4, 6), a Classifier takes int64",
        ),
        ((Classifier(module(), (6,), 5), None, nn.MSELoss()), "loss is given, a Classifier has its own"),
    ],
)
def test_what_is_no_batch_or_no_module_is_refused(arguments: Any, message: str) -> None:
    assert message in refused(*arguments)


def test_a_model_with_the_whole_interface_has_samples_of_its_own() -> None:
    class Whole:
        name = task = "mine"
        input_shape, classes, layers, sample, loss = (6,), 0, print, print, print

    model = Whole()
    assert taken(model, None) is model
    with pytest.raises(CannotRun) as raised:
        on_batch(model, (INPUTS, CLASSES), nn.MSELoss())
    assert [problem.key for problem in raised.value.problems] == ["batch", "loss"]


def test_an_output_that_the_targets_do_not_fit_is_named() -> None:
    model = taken(module(), (INPUTS, CLASSES))
    with pytest.raises(ValueError, match=r"targets of 0 to 4 need an output of \(4, 5 or more\), it is \(4, 3\)"):
        model.loss(torch.randn(4, 3), CLASSES)
    with pytest.raises(ValueError, match=r"it is \(4, 2, 5\)"):
        model.loss(torch.randn(4, 2, 5), CLASSES)
