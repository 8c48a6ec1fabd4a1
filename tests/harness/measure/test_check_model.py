"""A model of a user's own is tried before it is measured: what its layers, its output and its loss must be."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.core.problem import CannotRun
from harness.measure import check_model
from harness.user_model import keys, plugin, reference
from tests.harness.user_model import nets

HEAD = "import torch\nfrom torch import nn\nfrom harness import Classifier, Custom, LanguageModel, Regression\n\n\n"
NET = "class Net(nn.Module):\n    def forward(self, x):\n        {}\n\n\n"
CUSTOM = "Custom(nn.Sequential(nn.Linear(4, 3)), (torch.randn(4, 4), torch.{}), {})"


PAIR = "Custom(nn.Sequential(nn.Linear(4, 3), Net()), (torch.randn(4, 4), torch.randint(3, (4,))), lambda o, t: {})"


def check(folder: Path, value: str, before: str = "", samples: int = 2, whole: bool = False) -> None:
    place = reference.parse(nets.write(folder, f"{HEAD}{before}def build():\n    return {value}\n"))
    settings = vars(keys.schema(place)())
    check_model.check(plugin.build(settings), samples, "float32", whole=whole)


@pytest.mark.parametrize(
    "value",
    [
        "Classifier(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3)), (4,), 3)",
        "LanguageModel(nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9)), 9, 5)",
        "Regression(nn.Sequential(nn.Linear(4, 6), nn.Unflatten(1, (2, 3))), (4,), (2, 3))",
        CUSTOM.format("randint(3, (4,))", "nn.CrossEntropyLoss(reduction='none')"),
        CUSTOM.format("randint(3, (4,))", "nn.CrossEntropyLoss(reduction='sum')"),
        CUSTOM.format("rand(4, 3)", "lambda o, t: (o - t).square().mean(1)"),
    ],
)
def test_what_is_right_passes(value: str, tmp_path: Path) -> None:
    check(tmp_path, value)


def test_a_sum_over_samples_of_several_outputs_passes(tmp_path: Path) -> None:
    net = NET.format("return x, x.square().mean(1)")
    for loss in ("nn.functional.cross_entropy(o[0], t, reduction='sum') + o[1].sum()", "o[1] * t"):
        check(tmp_path, PAIR.format(loss), net)


def test_what_is_no_sum_may_train_on_a_batch_that_is_not_split(tmp_path: Path) -> None:
    """A contrastive loss compares the samples with each other."""
    value = CUSTOM.format("rand(4, 3)", "lambda o, t: (o @ o.T).exp().sum(1).log()")
    check(tmp_path, value, whole=True)
    with pytest.raises(CannotRun, match="is the mean over the samples"):
        check(tmp_path, CUSTOM.format("randint(3, (4,))", "nn.functional.cross_entropy"), whole=True)


def test_a_loss_that_draws_is_left(tmp_path: Path) -> None:
    check(tmp_path, CUSTOM.format("rand(4, 3)", "lambda o, t: (o * torch.rand(())).sum(1)"))


def test_an_example_stays_as_it_is_where_a_model_of_one_layer_is_tried(tmp_path: Path) -> None:
    """Its module leads to the example, which was made fake for good: the pass for real then had no values."""
    forward = "y = self.last(x)\n        self.seen = y[y > 9].sum() + y\n        return self.seen"
    head = "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    net = f"{head}        self.last = nn.Linear(4, 3)\n    def forward(self, x):\n        {forward}\n\n\n"
    check(tmp_path, "Custom(Net(), (torch.randn(4, 4), torch.rand(4, 3)), lambda o, t: o.sum(1))", net)


def test_code_that_looks_at_values_is_run_for_real(tmp_path: Path) -> None:
    net = NET.format("return x * 2 if x.sum().item() > 0 else x")
    check(tmp_path, "Classifier(nn.Sequential(Net(), nn.Linear(4, 3)), (4,), 3)", net)


@pytest.mark.parametrize(
    ("before", "value", "message"),
    [
        (
            "",
            "Classifier(nn.Sequential(nn.Linear(4, 8), nn.Linear(9, 3)), (4,), 3)",
            "raises RuntimeError in its layers on 2 samples, inputs of (2, 4): RuntimeError: mat1 and mat2 shapes",
        ),
        (
            "",
            "Classifier(nn.Sequential(nn.Linear(4, 3)), (4,), 5)",
            "gives (2, 3) for 2 samples, a model for classification must give (2, 5) -> a last layer of 5, or 3",
        ),
        (
            "",
            "LanguageModel(nn.Sequential(nn.Embedding(9, 9), nn.Flatten()), 9, 5)",
            "gives (2, 45) for 2 samples, a model for text must give (2, 5, 9)",
        ),
        (
            "",
            "Regression(nn.Sequential(nn.Linear(4, 2)), (4,), (1,))",
            "gives (2, 2) for 2 samples, a model for regression must give (2, 1)",
        ),
        (
            "",
            CUSTOM.format("randn(4, 2)", "lambda o, t: (o - t).square()"),
            "raises RuntimeError in its loss on an output of (2, 3) and targets of (2, 2):",
        ),
        ("", CUSTOM.format("randint(3, (4,))", "nn.functional.cross_entropy"), "has a loss that is the mean over the"),
        (
            NET.format("return x, x.square().mean(1)"),
            PAIR.format("nn.functional.cross_entropy(o[0], t)"),
            "has a loss that is the mean over the",
        ),
        ("", CUSTOM.format("rand(4, 3)", "lambda o, t: 3.0"), "TypeError: loss must return a tensor, one"),
        ("", CUSTOM.format("rand(4, 3)", "lambda o, t: None"), "number for each sample or their sum, got None"),
        (
            "",
            CUSTOM.format("rand(4, 3)", "lambda o, t: (o @ o.T).exp().sum(1).log()"),
            "has a loss of its samples together: that of two is not the sum of theirs",
        ),
        (
            NET.format("return x.square().mean()"),
            PAIR.format("o"),
            "has a loss that is the mean over the samples",
        ),
        (
            NET.format("return x, x.square().mean()"),
            PAIR.format("nn.functional.cross_entropy(o[0], t, reduction='sum') + o[1]"),
            "has a loss of its samples together",
        ),
        (
            NET.format("return x + self.missing"),
            "Classifier(nn.Sequential(nn.Linear(4, 3), Net()), (4,), 3)",
            "in forward return x + self.missing",
        ),
        (
            NET.format("raise ValueError('it is mine')"),
            "Classifier(nn.Sequential(Net()), (4,), 4)",
            "in forward raise ValueError('it is mine')",
        ),
        (
            NET.format("return {'x': x}"),
            "Classifier(nn.Sequential(Net()), (4,), 4)",
            "gives a dict: between layers there are tensors",
        ),
        (
            NET.format("return x[:1]"),
            "Classifier(nn.Sequential(Net()), (4,), 4)",
            "gives (1, 4) for 2 samples",
        ),
        ("", "Classifier(nn.Sequential(nn.Flatten(), nn.Tanh()), (4,), 4)", "has no weight that requires a gradient"),
        (
            "",
            "Classifier(nn.Linear(4, 3).requires_grad_(False), (4,), 3)",
            "has no weight that requires a gradient -> requires_grad_(True)",
        ),
        (
            NET.format("return x.detach()"),
            "Classifier(nn.Sequential(nn.Linear(4, 3), Net()), (4,), 3)",
            "has a loss that depends on none of its weights",
        ),
        ("", CUSTOM.format("rand(4, 3)", "lambda o, t: (o.argmax(1) != t[:, 0]).float()"), "depends on none of its"),
        (
            NET.format("y = x.exp()\n        y.mul_(2)\n        return y"),
            "Classifier(nn.Sequential(nn.Linear(4, 3), Net()), (4,), 3)",
            "raises RuntimeError in its backward pass: RuntimeError: one of the variables needed for gradient",
        ),
    ],
)
def test_what_is_wrong_is_one_message(before: str, value: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(CannotRun) as raised:
        check(tmp_path, value, before)
    assert len(raised.value.problems) == 1
    said = " ".join(str(raised.value).split())
    assert message in said
    assert "/harness/" not in said.replace("raised", ""), "the user's traceback alone"


def test_what_is_the_same_in_each_call_is_named_where_a_pass_fails(tmp_path: Path) -> None:
    """An input that was meant for each sample, of another number of them, is such a tensor for the wrapper."""
    net = "class Net(nn.Linear):\n    def forward(self, x, scale):\n        return super().forward(x) * scale\n\n\n"
    example = "({'x': torch.randn(4, 4), 'scale': torch.randn(5, 3)}, torch.randn(4, 3))"
    value = f"Custom(Net(4, 3), {example}, lambda o, t: (o - t).sum(1))"
    with pytest.raises(CannotRun) as raised:
        check(tmp_path, value, net)
    (found,) = raised.value.problems
    assert "must match the size of tensor b" in found.message
    assert found.hint.endswith("its first size is not the number of samples: inputs['scale'] of (5, 3)")


def test_a_batch_norm_that_gets_one_sample(tmp_path: Path) -> None:
    """The micro-batch of the run is tried, no other one."""
    value = "Classifier(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), (4,), 3)"
    check(tmp_path, value)
    with pytest.raises(CannotRun, match="Expected more than 1 value per channel"):
        check(tmp_path, value, samples=1)
