"""AmoebaNet-D (L, D): published counts, names, shapes and work; impossible numbers."""

import csv
import gzip
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from harness.core.model_profile import ModelProfile
from harness.core.problem import CannotRun
from harness.measure.count_model import count
from models.amoebanet.amoebanet import AmoebaNet, build
from models.amoebanet.config import Config
from tests.problems import refused, replaced
from tests.support.quick import within_s
from tests.support.zoo import on_meta, parameters, preset

ROOT = Path(__file__).parents[2]

# preset: L, D, size, classes, layers, parameters
PRESETS = {
    "amoebanet": (3, 32, 64, 10, 9, 391_354),
    "amoebanet_18_208": (18, 208, 224, 1000, 24, 81_505_540),
    "amoebanet_18_256": (18, 256, 224, 1000, 24, 122_470_120),
    "amoebanet_18_416": (18, 416, 224, 1000, 24, 319_024_120),
    "amoebanet_18_544": (18, 544, 224, 1000, 24, 542_734_840),
    "amoebanet_36_544": (36, 544, 224, 1000, 42, 1_055_832_376),
    "amoebanet_72_512": (72, 512, 224, 1000, 78, 1_844_858_344),
}


def outputs(config: Config, n: int = 1) -> dict[str, Any]:
    """What leaves each layer for n samples on the meta device."""
    value: Any = torch.empty(n, 3, config.size, config.size, device="meta")
    found = {}
    for name, layer in on_meta(build(config)).named_children():
        found[name] = value = layer(value)
    return found


def shape(value: Tensor | tuple[Tensor, ...]) -> str:
    """Of one sample, as the fixture has it: 384x56x56|64x112x112 for a pair."""
    values = [value] if isinstance(value, Tensor) else value
    return "|".join("x".join(map(str, one.shape[1:])) for one in values)


@pytest.fixture(scope="module")
def paper() -> ModelProfile:
    return count(build(preset(Config, "amoebanet_18_256")), 40, "float32")


@pytest.fixture(scope="module")
def rows() -> list[dict[str, str]]:
    with gzip.open(ROOT / "tests/fixtures/amoebanet_18_256_224.csv.gz", "rt") as text:
        return list(csv.DictReader(text))


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_published_counts(name: str) -> None:
    config = preset(Config, name)
    depth, channels, size, classes, layers, total = PRESETS[name]
    assert (config.layers, config.channels, config.size, config.classes) == (depth, channels, size, classes)
    model = within_s(1, lambda: on_meta(build(config)))
    assert (len(model), parameters(model)) == (layers, total)
    comment = (ROOT / "conf/model" / f"{name}.yaml").read_text().split("defaults")[0]
    assert comment.startswith("# ") and f"model={name}" in comment
    assert f"{total:,} parameters, {layers} layers" in comment


def test_every_preset_is_listed() -> None:
    assert sorted(PRESETS) == sorted(file.stem for file in (ROOT / "conf/model").glob("amoebanet*.yaml"))


def test_the_default_is_the_preset_without_keys() -> None:
    assert Config() == preset(Config, "amoebanet")


@settings(max_examples=10, deadline=None)
@given(groups=st.integers(1, 3), eighths=st.integers(1, 12), classes=st.integers(2, 50))
def test_counts_follow_the_closed_form(groups: int, eighths: int, classes: int) -> None:
    d = 8 * eighths
    c = last = earlier = d // 4
    expected, after_reduction = 27 * c + 2 * c, False
    for reduction in [True, True, *[False] * groups, True, *[False] * groups, True, *[False] * groups]:
        c *= 2 if reduction else 1
        expected += last * c + 2 * c + (earlier * c + 2 * c if after_reduction or earlier != c else 0)
        expected += (55 * c * c + 136 * c) // 16 if reduction else (23 * c * c + 52 * c) // 4
        earlier, last, after_reduction = last, (3 if reduction else 4) * c, reduction
    expected += 16 * d * classes + classes
    model = on_meta(build(Config(layers=3 * groups, channels=d, classes=classes)))
    assert (len(model), parameters(model)) == (3 * groups + 6, expected)


@pytest.mark.usefixtures("computation")
def test_parameters_of_some_layers_of_18_256(paper: ModelProfile) -> None:
    own = {layer.name: layer.param_bytes // 4 for layer in paper.layers}
    expected = {"stem1": 1_856, "stem2": 74_304, "stem3": 343_168, "cell1_normal1": 676_096, "cell1_normal2": 839_936,
                "cell1_normal3": 905_472, "cell1_normal6": 905_472, "cell5_normal6": 14_435_328,
                "classify": 4_097_000}  # fmt: skip
    assert {name: own[name] for name in expected} == expected
    assert paper.model == "amoebanet_18_256_224" and paper.skips == ()


@pytest.mark.usefixtures("computation")
def test_each_layer_of_18_256_has_the_fixture_s_figures(paper: ModelProfile, rows: list[dict[str, str]]) -> None:
    """Name, parameters, elements in and out, multiply-accumulates: exact."""
    n = paper.micro_batch
    for index, (layer, row) in enumerate(zip(paper.layers, rows, strict=True)):
        assert layer.name == row["layer"]
        assert layer.param_bytes == 4 * int(row["params"]), layer.name
        assert paper.boundary_bytes(index) == 4 * n * int(row["in_elems_per_sample"]), layer.name
        assert layer.output_bytes == 4 * n * int(row["out_elems_per_sample"]), layer.name
        assert layer.flops == 2 * n * int(row["fwd_macs_per_sample"]), layer.name
    assert paper.sum("flops", 0, 23) == pytest.approx(2 * n * 15.170e9, rel=1e-4)


def test_saved_bytes_of_18_256(paper: ModelProfile) -> None:
    """What autograd keeps of a micro-batch of 40: int64 indices of max pools, batch norm's statistics and all."""
    saved = {layer.name: layer.saved_bytes for layer in paper.layers}
    expected = {"stem1": 152_535_552, "stem2": 2_697_468_160, "cell1_normal1": 1_156_072_448,
                "cell1_normal6": 931_283_968, "cell2_reduction": 867_066_880, "cell5_normal6": 232_886_272,
                "classify": 32_768_000}  # fmt: skip
    assert {name: saved[name] for name in expected} == expected
    assert sum(saved.values()) == 16_065_831_168


@pytest.mark.usefixtures("computation")
def test_shapes_of_18_256(rows: list[dict[str, str]]) -> None:
    found = outputs(preset(Config, "amoebanet_18_256"))
    assert [(name, shape(value)) for name, value in found.items()] == [
        (row["layer"], row["out_shape_per_sample"]) for row in rows
    ]


@pytest.mark.usefixtures("computation")
def test_outputs_of_the_parts_of_18_256(rows: list[dict[str, str]]) -> None:
    """The sum over the innermost modules of a layer: ReLUs, convolutions, batch norms, pools, identities."""
    seen: list[int] = []
    layers, value = on_meta(build(preset(Config, "amoebanet_18_256"))), torch.empty(1, 3, 224, 224, device="meta")
    for module in layers.modules():
        if not list(module.children()):
            module.register_forward_hook(lambda module, inputs, output: seen.append(output.numel()))
    for layer, row in zip(layers, rows, strict=True):
        seen.clear()
        value = layer(value)
        assert sum(seen) == int(row["leaf_output_elems_per_sample"]), row["layer"]


def test_names() -> None:
    assert list(outputs(Config(layers=6, channels=8))) == [
        "stem1", "stem2", "stem3", "cell1_normal1", "cell1_normal2", "cell2_reduction", "cell3_normal1",
        "cell3_normal2", "cell4_reduction", "cell5_normal1", "cell5_normal2", "classify",
    ]  # fmt: skip


@pytest.mark.parametrize("size", [64, 96, 224, 320])
def test_any_multiple_of_32_pixels_has_the_same_parameters(size: int) -> None:
    config = Config(channels=8, size=size)
    sides = {"stem1": 2, "stem2": 4, "stem3": 8, "cell1_normal1": 8, "cell2_reduction": 16, "cell3_normal1": 16,
             "cell4_reduction": 32, "cell5_normal1": 32}  # fmt: skip
    found = outputs(config, n=2)
    for (name, shrink), (_, before) in zip(list(sides.items())[1:], sides.items(), strict=False):
        assert [tensor.shape[2:] for tensor in found[name]] == [(size // shrink,) * 2, (size // before,) * 2], name
    assert found["classify"].shape == (2, 10)
    assert parameters(on_meta(build(config))) == parameters(on_meta(build(Config(channels=8))))


def test_name_task_and_sample() -> None:
    model = build(preset(Config, "amoebanet_18_256"))
    assert isinstance(model, AmoebaNet)
    assert (model.name, model.task, model.input_shape, model.classes) == (
        "amoebanet_18_256_224", "classification", (3, 224, 224), 1000,
    )  # fmt: skip
    batch = build(Config(classes=4)).sample(50)
    assert batch.inputs.shape == (50, 3, 64, 64)
    assert sorted(set(batch.targets.tolist())) == [0, 1, 2, 3]


def test_a_sample_s_loss_is_its_cross_entropy() -> None:
    logits = torch.tensor([[0.0, 0.0], [1.0, -1.0]])
    loss = build(Config(classes=2)).loss(logits, torch.tensor([0, 1]))
    assert loss.item() == pytest.approx(math.log(2) + math.log(1 + math.exp(2)), abs=1e-6)


@pytest.mark.parametrize(
    ("keys", "right"),
    [
        ({"layers": 4}, {"model.layers": [6]}),
        ({"layers": 0}, {"model.layers": [3]}),
        ({"layers": -3}, {"model.layers": [3]}),
        ({"channels": 18}, {"model.channels": [24]}),
        ({"channels": 12}, {"model.channels": [16]}),
        ({"channels": 0}, {"model.channels": [8]}),
        ({"size": 100}, {"model.size": [128]}),
        ({"size": 32}, {"model.size": [64]}),
        ({"size": -64}, {"model.size": [64]}),
        ({"classes": 1}, {"model.classes": [10]}),
        (
            {"layers": 1, "channels": 1, "size": 1, "classes": 0},
            {"model.layers": [3], "model.channels": [8], "model.size": [64], "model.classes": [10]},
        ),
    ],
)
def test_impossible_numbers_are_named(keys: dict[str, Any], right: dict[str, list[Any]]) -> None:
    with pytest.raises(CannotRun) as caught:
        build(Config(**keys))
    assert replaced(refused(caught)) == right


def test_the_keys_do_not_import_torch() -> None:
    code = "import sys, models.amoebanet.config as c; c.check(c.Config()); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
