"""What a user's callable may return, and the model that is made of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from harness.capture import unsplit, verify
from harness.cli.compose import compose
from harness.config import registry
from harness.core.problem import CannotRun
from harness.interfaces import Model
from harness.measure import check_model
from harness.user_model import reference
from tests.harness.user_model import nets

HEAD = "import torch\nfrom torch import nn\nfrom harness import Classifier, Custom, LanguageModel, Regression\n\n\n"
SEQUENTIAL = "nn.Sequential(nn.Linear(4, 3))"


def made(folder: Path, text: str, *overrides: str) -> Model:
    """The model as a worker makes it: from the YAML that its parent leaves."""
    config = compose([*reference.typed([f"model={nets.write(folder, HEAD + text)}"]), *overrides])
    model: Model = registry.build("model", OmegaConf.create(OmegaConf.to_yaml(config, resolve=True)).model)
    return model


def refused(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(CannotRun) as raised:
        made(folder, text, *overrides)
    assert len(raised.value.problems) == 1
    return str(raised.value)


@pytest.mark.usefixtures("commands")
def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, harness; from harness import race, plan, simulate; assert 'torch' not in sys.modules; "
    code += "from harness import Classifier; print(Classifier)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=registry.ROOT, check=True)
    assert "harness.user_model.wrappers.Classifier" in done.stdout
    import harness

    with pytest.raises(AttributeError, match="nothing_such"):
        _ = harness.nothing_such


@pytest.mark.parametrize(
    ("keys", "task", "inputs", "targets", "output"),
    [
        (("task=classification", "input=[4]", "classes=3"), "classification", (5, 4), (5,), (5, 3)),
        (("task=regression", "input=[4]", "output=[3]"), "regression", (5, 4), (5, 3), (5, 3)),
        (("task=text", "vocabulary=7", "sequence=6"), "text", (5, 6), (5, 6), (5, 6, 7)),
    ],
)
def test_tasks_by_keys(
    keys: tuple[str, ...], task: str, inputs: Any, targets: Any, output: Any, tmp_path: Path
) -> None:
    """Losses are sums over the samples: that of all is that of two parts, one by one."""
    model = made(tmp_path, f"def build():\n    return {SEQUENTIAL}\n", *(f"model.{key}" for key in keys))
    batch = model.sample(5)
    assert (model.task, batch.inputs.shape, batch.targets.shape) == (task, inputs, targets)
    assert model.input_shape == inputs[1:] and model.name == f"net.py:build {' '.join(keys)}"
    out = torch.randn(output, dtype=torch.float64)
    parts = sum(model.loss(out[i:j], batch.targets[i:j]) for i, j in ((0, 2), (2, 5)))
    assert model.loss(out, batch.targets).item() == pytest.approx(float(parts))


def test_layers_are_made_again_each_time(tmp_path: Path) -> None:
    text = f"def build(width: int = 3):\n    return Classifier({SEQUENTIAL}, (4,), 3)\n"
    model = made(tmp_path, text, "model.width=5")
    assert model.name == "net.py:build width=5"
    torch.manual_seed(1)
    first, second = model.layers(), model.layers()
    torch.manual_seed(1)
    again = model.layers()
    assert torch.equal(first[0].weight, again[0].weight) and not torch.equal(first[0].weight, second[0].weight)
    with torch.device("meta"):
        assert model.layers()[0].weight.is_meta
        assert model.sample(2).inputs.is_meta


def test_building_leaves_the_random_generator(tmp_path: Path) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    made(tmp_path, f"def build():\n    return Classifier({SEQUENTIAL}, (4,), 3)\n")
    assert torch.equal(before, torch.get_rng_state())


def test_a_callable_that_looks_at_values_is_made_on_the_cpu(tmp_path: Path) -> None:
    text = (
        "def build():\n    rates = [x.item() for x in torch.linspace(0, 0.5, 2)]\n"
        "    return Classifier(nn.Sequential(nn.Linear(4, 3), *map(nn.Dropout, rates)), (4,), 3)\n"
    )
    model = made(tmp_path, text)
    with torch.device("meta"):
        layers = model.layers()
    assert layers[0].weight.is_meta and layers[2].p == 0.5
    assert not model.layers()[0].weight.is_meta


def test_a_custom_loss_on_examples(tmp_path: Path) -> None:
    text = (
        f"def loss(output, target):\n    return (output - target).abs().mean(1)\n\n\n"
        f"def build():\n    return Custom({SEQUENTIAL}, (torch.arange(12.0).reshape(3, 4), torch.ones(3, 3)), loss)\n"
    )
    model = made(tmp_path, text)
    assert (model.task, model.input_shape, model.classes) == ("custom", (4,), 0)
    batch = model.sample(7)
    assert batch.inputs[:, 0].tolist() == [0, 4, 8, 0, 4, 8, 0], "the example's samples in turn"
    assert model.loss(torch.zeros(7, 3), batch.targets).item() == 7
    with torch.device("meta"):
        assert model.sample(7).inputs.shape == (7, 4)
    assert torch.equal(model.sample(7).inputs, batch.inputs)


@pytest.mark.parametrize("branch", [False, True])
def test_nested_inputs_are_the_arguments_of_the_module(tmp_path: Path, branch: bool) -> None:
    """Words, numbers and a mask of each sample pass; weights for all belong to the layers, also without memory."""
    text = nets.MASKED
    if branch:
        text = text.replace("x = x.masked_fill", "x = x if bool(hidden.all()) else x.masked_fill")
    model: Any = made(tmp_path, text.removeprefix(HEAD))
    batch = model.sample(8)
    assert [tuple(tensor.shape) for tensor in batch.inputs] == [(8, 5), (8, 4), (8, 5)]
    with torch.device("meta"):
        apart = model.layers()
    assert (len(apart) == 1) == branch and bool(unsplit(apart)) == branch
    captured = model.captured()
    words, numbers, hidden = batch.inputs[0], batch.inputs[1].double(), batch.inputs[2]
    captured.chain.double()
    given: dict[str, Any] = {"batch": {"words": words, "numbers": numbers}, "hidden": hidden}
    expected = captured.module(**given, weights=torch.arange(5.0), scale=0.5, extra=None)
    found = captured.chain((words, numbers, hidden))
    torch.testing.assert_close(found[0], expected["all"])
    losses = (expected["all"].mean(1) - batch.targets).square().sum(1) + expected["first"].abs().sum(1)
    assert model.loss(found, batch.targets).item() == pytest.approx(losses.sum().item())
    check_model.check(model, 2, "float64")


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ("()", "the inputs of example_batch must be a tensor of (samples, ...), got ()"),
        ("(torch.ones(5, 4), torch.ones(3, 4))", "example_batch has 5 inputs and 3 targets"),
        ("{'x': torch.tensor(1.0)}", "the inputs of example_batch must be a tensor of (samples, ...), got tensor(1.)"),
    ],
)
def test_inputs_without_samples(tmp_path: Path, inputs: str, said: str) -> None:
    text = f"def build():\n    example = ({inputs}, torch.ones(3, 3))\n    return Custom({SEQUENTIAL}, example, abs)\n"
    message = refused(tmp_path, text)
    assert said in " ".join(message.split()) and "net.py" in message and "wrappers.py" not in message


def test_weights_that_wait_for_a_first_pass_have_had_it(tmp_path: Path) -> None:
    text = (
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.first, self.norm, self.last = nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.LazyLinear(3)\n"
        "    def forward(self, x):\n        return self.last(self.norm(self.first(x)))\n\n\n"
        "def build():\n    return Classifier(Net(), (4,), 3)\n"
    )
    model: Any = made(tmp_path, text)
    check_model.check(model, 2, "float64")
    torch.manual_seed(0)
    layers = model.layers()
    assert sum(weight.numel() for weight in layers.parameters()) == 4 * 8 + 8 + 16 + 8 * 3 + 3
    assert layers.training and all(float(buffer.sum()) in (0.0, 8.0) for buffer in layers.buffers())


@pytest.mark.usefixtures("computation")
def test_experts_of_the_users_own_network_run_in_float64(tmp_path: Path) -> None:
    text = (
        "def build():\n    from transformers import MixtralConfig, MixtralForCausalLM\n"
        "    sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=3)\n"
        "    heads = dict(num_attention_heads=2, num_key_value_heads=1, num_local_experts=4)\n"
        "    return LanguageModel(MixtralForCausalLM(MixtralConfig(**sizes, **heads)), 32, 8)\n"
    )
    model: Any = made(tmp_path, text)
    check_model.check(model, 2, "float64")
    captured = model.captured()
    assert len(captured.chain) >= 5 and not unsplit(captured.chain)
    verify(captured.module, captured.chain, captured.args, captured.kwargs, captured.select)


def test_an_object_with_the_whole_interface(tmp_path: Path) -> None:
    text = (
        "from harness.interfaces import Batch\n\n\nclass Mine:\n"
        "    name, task, input_shape, classes = 'mine_3', 'other', (4,), 0\n"
        f"    def layers(self):\n        return {SEQUENTIAL}\n"
        "    def sample(self, n):\n        return Batch(torch.randn(n, 4), torch.randn(n, 3))\n"
        "    def loss(self, output, target):\n        return (output - target).sum()\n\n\n"
        "def build():\n    return Mine()\n"
    )
    model = made(tmp_path, text)
    assert (type(model).__name__, model.name) == ("Mine", "mine_3")
    said = refused(tmp_path, text.replace("    def loss", "    def no_loss"))
    assert "returns a Mine without loss, which a model has" in " ".join(said.split())


@pytest.mark.usefixtures("computation")
def test_a_module_that_is_no_sequential_is_one_layer_or_more(tmp_path: Path) -> None:
    text = (
        "class Net(nn.Module):\n    def __init__(self, width: int = 4):\n        super().__init__()\n"
        "        self.first, self.last = nn.Linear(4, width), nn.Linear(width, 3)\n"
        "    def forward(self, x):\n        return self.last(self.first(x))\n\n\nbuild = Net\n"
    )
    model = made(tmp_path, text, *nets.KEYS, "model.width=6")
    layers = model.layers()
    assert isinstance(layers, torch.nn.Sequential)
    assert sum(p.numel() for p in layers.parameters()) == 4 * 6 + 6 + 6 * 3 + 3
    assert layers(model.sample(2).inputs).shape == (2, 3)


def test_a_module_that_cannot_be_split_says_why(tmp_path: Path) -> None:
    layers = made(tmp_path, nets.BRANCH).layers()
    why = unsplit(layers)
    line = (HEAD + nets.BRANCH).splitlines().index("        if x.sum() > 0:") + 1
    assert len(layers) == 1 and why
    assert (Path(why.file).name, why.line, why.code) == ("net.py", line, "if x.sum() > 0:")
    assert "value of a tensor" in why.reason


@pytest.mark.usefixtures("commands")
def test_arguments_have_the_types_of_the_annotations(tmp_path: Path) -> None:
    text = (
        "import enum\n\n\nclass Act(enum.Enum):\n    A = 1\n    B = 2\n\n\n"
        "def build(a: tuple[int, ...] = (1,), b: Act = Act.A, c: float = 1, d=(1, 2), e: list[Act] = [Act.A],\n"
        "          name='own', task: str = 'mine', classes: int = 3):\n"
        "    import json, pathlib\n    given = [a, str(b), c, d, [str(x) for x in e], name, task, classes]\n"
        "    pathlib.Path(__file__).with_name('given').write_text(json.dumps([repr(x) for x in given]))\n"
        f"    return Classifier({SEQUENTIAL}, (4,), classes)\n"
    )
    made(tmp_path, text, "model.a=[4,5]", "model.b=B", "model.c=2", "model.d=[3,4]", "model.e=[B,A]", "model.task=x")
    given = json.loads((tmp_path / "given").read_text())
    expected = ["(4, 5)", "'Act.B'", "2.0", "(3, 4)", "['Act.B', 'Act.A']", "'own'", "'x'", "3"]
    assert given == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("None", "returns None, it must return a model   -> return the module"),
        ("nn.Linear", "returns the class Linear, it must return a model"),
        ("3", "returns int 3, it must return a model"),
        ("nn.Sequential()", "returns a Sequential without layers"),
        ("Classifier(3, (4,), 3)", "TypeError: Classifier takes an nn.Module, it got int: 3"),
        (f"Classifier({SEQUENTIAL}, 4, 3)", "TypeError: input_shape must be a shape, as (4,), got 4"),
        (f"Classifier({SEQUENTIAL}, (4,), 0)", "ValueError: classes must be whole numbers of at least 1, got 0"),
        (f"Custom({SEQUENTIAL}, (torch.ones(3, 4), torch.ones(2)), print)", "example_batch has 3 inputs and 2 targets"),
        (
            f"Custom({SEQUENTIAL}, (torch.ones(2, 4), 2 * [{{'box': torch.ones(4)}}]), print)",
            "are 2 of dict, one for each",
        ),
        (f"Custom({SEQUENTIAL}, (torch.ones(3, 4), 2), print)", "the targets of example_batch must be a tensor"),
        (f"Custom({SEQUENTIAL}, (torch.ones(3), torch.ones(3)), 'mse')", "loss must be a function of"),
        ("[].pop()", "IndexError: pop from empty list"),
        ("exit()", "raises SystemExit when it is called"),
    ],
)
def test_what_is_no_model(value: str, message: str, tmp_path: Path) -> None:
    said = refused(tmp_path, f"def build():\n    return {value}\n")
    assert " ".join(message.split()) in " ".join(said.split())
    assert "harness/user_model/load" not in said


def test_a_plain_module_lacks_what_the_message_shows(tmp_path: Path) -> None:
    """Its lines are complete: with each of them the model is made."""
    text = f"def build():\n    return {SEQUENTIAL}\n"
    said = refused(tmp_path, text)
    assert "returns a Sequential alone: what are its input, its target and its loss?" in " ".join(said.split())
    lines = [line.split() for line in said.splitlines() if line.strip().startswith("model.task=")]
    assert [made(tmp_path, text, *line).task for line in lines] == ["classification", "text", "regression"]
    wrappers = [line.strip() for line in said.splitlines() if "from harness import" in line]
    assert len(wrappers) == 4
    for line in wrappers:
        before = f"module, inputs, targets, loss = {SEQUENTIAL}, torch.ones(2, 4), torch.ones(2, 3), print"
        made(tmp_path, f"def build():\n    {before}\n    {line}\n")


def test_what_is_given_is_in_the_lines_that_are_shown(tmp_path: Path) -> None:
    said = refused(tmp_path, f"def build():\n    return {SEQUENTIAL}\n", "model.classes=7")
    assert "model.task=classification model.input=[3,32,32] model.classes=7" in said


def test_what_a_wrapper_says_is_not_given_again(tmp_path: Path) -> None:
    text = f"def build():\n    return Classifier({SEQUENTIAL}, (4,), 3)\n"
    said = refused(tmp_path, text, "model.classes=4", "model.input=[4]")
    assert (
        "returns a Classifier, which says what it is trained on -> without model.input and model.classes"
        in " ".join(said.split())
    )


def test_modules_next_to_the_file(tmp_path: Path) -> None:
    """Imported plainly by a file, relatively in a package; the user's models/ does not hide ours."""
    for name in ("blocks.py", "package/blocks.py"):
        nets.write(tmp_path / Path(name).parent, f"WIDTH = {len(name)}\n", Path(name).name)
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "models.py").write_text("raise ValueError\n")
    body = "def build():\n    return Classifier(nn.Sequential(nn.Linear(4, WIDTH)), (4,), WIDTH)\n"
    assert made(tmp_path, f"from blocks import WIDTH\n\n\n{body}").classes == 9
    assert made(tmp_path / "package", f"from .blocks import WIDTH\n\n\n{body}").classes == 17
    said = refused(tmp_path, f"import models.blocks\n\n\n{body}")
    assert "models is a package of this project: give yours another name" in said


def test_our_classes_are_in_the_package_itself(tmp_path: Path) -> None:
    said = refused(tmp_path, "from harness.tasks import Model\n\n\ndef build():\n    return Model\n")
    assert "from harness import Classifier" in said


def test_a_module_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nets.write(tmp_path / "their_nets", nets.WRAPPED, "small.py")
    nets.write(tmp_path / "planners", nets.WRAPPED, "small.py")
    monkeypatch.chdir(tmp_path)
    typed, others = (reference.typed([f"model={name}.small:build"]) for name in ("their_nets", "planners"))
    monkeypatch.chdir("/")
    assert registry.build("model", compose(typed).model).name == "their_nets.small:build"
    with pytest.raises(CannotRun, match="planners is a package of this project, too"):
        registry.build("model", compose(others).model)


RESULT = """
from dataclasses import dataclass
from torch.nn import functional


@dataclass
class Output:
    logits: torch.Tensor
    hidden: list


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        hidden = torch.relu(self.inner(x))
        return RESULT


def loss(output, target):
    return functional.cross_entropy(LOGITS, target, reduction="none")


def build():
    return WRAPPER
"""
CUSTOM = "Custom(Net(), (torch.randn(6, 4), torch.randint(3, (6,))), loss)"
OBJECT, DICTIONARY = "Output(self.head(hidden), [hidden])", "{'features': hidden, 'out': self.head(hidden)}"


@pytest.mark.parametrize(
    ("result", "logits", "wrapper", "tensors"),
    [
        (OBJECT, "output", "Classifier(Net(), (4,), 3)", 1),
        (OBJECT, "output.logits", CUSTOM, 2),
        (DICTIONARY, "output['out']", CUSTOM, 2),
        ("self.head(hidden), None", "output[0]", CUSTOM, 1),
    ],
)
def test_a_loss_takes_what_the_module_gives(
    result: str, logits: str, wrapper: str, tensors: int, tmp_path: Path
) -> None:
    """Layers pass tensors: a loss of the user's own gets the containers around them, others the logits."""
    text = RESULT.replace("RESULT", result).replace("LOGITS", logits).replace("WRAPPER", wrapper)
    model = made(tmp_path, text)
    torch.manual_seed(0)
    layers, batch = model.layers(), model.sample(5)
    output = layers(batch.inputs)
    assert (len(output) if isinstance(output, tuple) else 1) == tensors
    wanted = output[result == DICTIONARY] if isinstance(output, tuple) else output
    mean = torch.nn.functional.cross_entropy(wanted, batch.targets)
    torch.testing.assert_close(model.loss(output, batch.targets), 5 * mean)
    check_model.check(model, 2, "float32")


def test_a_file_may_import_torchvision(tmp_path: Path, commands: None) -> None:
    """Also where torchvision is built for another torch, in a process that has not imported it before."""
    text = f"import torchvision\n{HEAD}def build():\n    return Classifier(nn.Linear(4, 3), (4,), 3)\n"
    code = "import sys; from harness.user_model import load, reference; load.load(reference.parse(sys.argv[1]))"
    command = [sys.executable, "-c", code, nets.write(tmp_path, text)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=registry.ROOT, check=False)
    assert done.returncode == 0, done.stderr


def test_what_torchscript_has_compiled_is_refused(tmp_path: Path) -> None:
    text = "def build():\n    return Classifier(nn.Sequential(torch.jit.script(nn.Linear(4, 3))), (4,), 3)\n"
    model: Any = made(tmp_path, text)
    with pytest.raises(CannotRun, match=r"is compiled by TorchScript \(its module '0'\)"):
        model.layers()
