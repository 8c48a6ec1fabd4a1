"""ResNet, DenseNet, Inception, VGG and mlp: published counts, layer by layer; training in small; impossible values."""

from __future__ import annotations

import csv
import gzip
import importlib
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.core.model_profile import ModelProfile
from harness.core.problem import CannotRun
from harness.measure.count_model import count
from tests.problems import refused, replaced
from tests.support.zoo import preset_keys

ROOT = Path(__file__).parents[2]
FLOAT = 4
NETWORKS = ("resnet", "densenet", "inception", "vgg", "mlp")

# preset: network, model name, layers, parameters
PRESETS = {
    "resnet": ("resnet", "resnet_3_4_6_3_16_64_10", 19, 1_486_106),
    "resnet50": ("resnet", "resnet_3_4_6_3_64_224_1000", 19, 25_557_032),
    "resnet50_1000": ("resnet", "resnet_3_4_6_3_64_1000_1000", 19, 25_557_032),
    "resnet101": ("resnet", "resnet_3_4_23_3_64_224_1000", 36, 44_549_160),
    "resnet101_1000": ("resnet", "resnet_3_4_23_3_64_1000_1000", 36, 44_549_160),
    "resnet101_layers": ("resnet", "resnet_3_4_23_3_64_224_1000_layers", 370, 44_549_160),
    "densenet": ("densenet", "densenet_6_12_24_16_8_64_10", 65, 454_634),
    "densenet121": ("densenet", "densenet_6_12_24_16_32_224_1000", 65, 7_978_856),
    "densenet121_1000": ("densenet", "densenet_6_12_24_16_32_1000_1000", 65, 7_978_856),
    "inception": ("inception", "inception_8_128_10", 19, 346_830),
    "inception_v3": ("inception", "inception_1_299_1000", 19, 23_834_568),
    "inception_v3_1000": ("inception", "inception_1_1000_1000", 19, 23_834_568),
    "vgg": ("vgg", "vgg_16_32_64_128_128_256_64_10", 33, 2_262_938),
    "vgg13": ("vgg", "vgg_64_128_256_512_512_4096_224_1000", 33, 133_047_848),
    "mlp": ("mlp", "mlp_64_128_128_10", 5, 25_856),
    "mlp_autoddl": ("mlp", "mlp_32768_16384_4096_2048_512", 7, 613_416_960),
}

# profile written down elsewhere: preset, forward GMAC of an image, GB of all layers' inputs for 8 images
PROFILES = {
    "resnet50_224": ("resnet50", 4.089, None),
    "resnet50_1000": ("resnet50_1000", 82.611, 4.28),
    "resnet101_224": ("resnet101", 7.801, None),
    "resnet101_1000": ("resnet101_1000", 157.783, 6.49),
    "densenet121_224": ("densenet121", 2.834, None),
    "densenet121_1000": ("densenet121_1000", 56.225, 7.33),
    "inception_v3_299": ("inception_v3", 5.713, None),
    "inception_v3_1000": ("inception_v3_1000", 70.359, 2.84),
    "vgg13_224": ("vgg13", 11.308, None),
}

# the smallest of each that may be built: its keys, and the next smaller size with its fix
SMALLEST: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, list[Any]]]] = {
    "resnet": (
        {"channels": 1, "size": 33},
        {"size": 32},
        {"model.size": [33]},
    ),
    "densenet": (
        {"growth": 1, "size": 61},
        {"size": 60},
        {"model.size": [61]},
    ),
    "inception": (
        {"divisor": 16, "size": 107},
        {"size": 106},
        {"model.size": [107]},
    ),
    "vgg": (
        {"channels": [1] * 5, "dense": 1, "size": 32},
        {"size": 31},
        {"model.size": [32]},
    ),
    "mlp": (
        {"widths": [1, 2]},
        {"widths": [2]},
        {"model.widths": [[64, 128, 128, 10]]},
    ),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small layers are slow with several threads where other processes compute, too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build(network: str, keys: dict[str, Any]) -> Any:
    config = importlib.import_module(f"models.{network}.config").Config(**keys)
    return importlib.import_module(f"models.{network}.{network}").build(config)


def preset(name: str) -> Any:
    network = PRESETS[name][0]
    return build(network, preset_keys(network, name))


def comment_of(name: str) -> str:
    return (ROOT / "conf/model" / f"{name}.yaml").read_text().split("defaults")[0]


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_published_counts(name: str) -> None:
    _, model_name, layers, parameters = PRESETS[name]
    model = preset(name)
    with torch.device("meta"):
        chain = model.layers()
    assert model.name == model_name
    assert (len(chain), sum(p.numel() for p in chain.parameters())) == (layers, parameters)
    assert f"{parameters:,} parameters, {layers} layers: " in comment_of(name)
    assert f" model={name}" in comment_of(name).splitlines()[1]


def test_every_preset_is_listed() -> None:
    files = [file.stem for network in NETWORKS for file in (ROOT / "conf/model").glob(f"{network}*.yaml")]
    assert sorted(PRESETS) == sorted(files)


@pytest.mark.usefixtures("computation")
@pytest.mark.parametrize("name", PROFILES)
def test_every_layer(name: str) -> None:
    """Names, parameters, inputs, outputs and work against numbers that were written down without these models."""
    source, gmac, inputs_gb = PROFILES[name]
    profile = count(preset(source), 1, "float32")
    with gzip.open(ROOT / "tests/fixtures" / f"{name}.csv.gz", "rt") as file:
        rows = list(csv.DictReader(file))
    layers, inputs = profile.layers, layer_inputs(profile)
    assert [layer.name for layer in layers] == [row["layer"].replace(".", "_") for row in rows]
    assert [layer.param_bytes for layer in layers] == [FLOAT * int(row["params"]) for row in rows]
    assert inputs == [FLOAT * int(row["in_elems_per_sample"]) for row in rows]
    assert [layer.output_bytes for layer in layers] == [FLOAT * int(row["out_elems_per_sample"]) for row in rows]
    assert [layer.flops for layer in layers] == [2 * int(row["fwd_macs_per_sample"]) for row in rows]
    assert round(sum(layer.flops for layer in layers) / 2e9, 3) == gmac
    assert inputs_gb is None or round(8 * sum(inputs) / 1e9, 2) == inputs_gb
    assert profile.skips == ()


def layer_inputs(profile: ModelProfile) -> list[int]:
    return [profile.boundary_bytes(index) for index in range(len(profile.layers))]


@pytest.mark.parametrize("network", NETWORKS)
def test_the_default_learns_its_batch(network: str) -> None:
    torch.manual_seed(0)
    model = preset(network)
    layers, batch = model.layers(), model.sample(8)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = model.loss(layers(batch.inputs), batch.targets) / len(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(model.classes), abs=0.4)
    assert losses[-1] < losses[0] - 0.03, losses


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_smallest_trains_on_a_single_sample(network: str, dtype: torch.dtype) -> None:
    """No batch norm sees a single value for a channel, which torch refuses."""
    torch.manual_seed(0)
    model = build(network, SMALLEST[network][0])
    layers, batch = model.layers().to(dtype), model.sample(1)
    output = layers(batch.inputs.to(dtype))
    assert (output.shape, output.dtype) == ((1, model.classes), dtype)
    model.loss(output, batch.targets).backward()
    for name, parameter in layers.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("network", NETWORKS)
def test_what_is_just_too_small(network: str) -> None:
    _, keys, right = SMALLEST[network]
    with pytest.raises(CannotRun) as caught:
        build(network, keys)
    assert replaced(refused(caught)) == right


@pytest.mark.parametrize(
    ("network", "keys", "right"),
    [
        (
            "resnet",
            {"blocks": [3, 0], "channels": 0, "size": -7, "classes": 1, "cut": "stage"},
            {"blocks": [3, 1], "channels": 16, "size": 9, "classes": 10, "cut": "block"},
        ),
        (
            "densenet",
            {"blocks": [], "growth": 0, "size": 16, "classes": 0},
            {"blocks": [6, 12, 24, 16], "growth": 8, "size": 61, "classes": 10},
        ),
        (
            "inception",
            {"divisor": 3, "size": 75, "classes": 1, "dropout": 1.0},
            {"divisor": 8, "size": 107, "classes": 10, "dropout": 0.5},
        ),
        (
            "vgg",
            {"channels": [8, -1, 8], "dense": 0, "size": 7, "classes": 1, "dropout": -0.1},
            {"channels": [8, 1, 8], "dense": 256, "size": 8, "classes": 10, "dropout": 0.5},
        ),
        ("mlp", {"widths": [64, 0, 10]}, {"widths": [64, 128, 128, 10]}),
        ("mlp", {"widths": [64, 1]}, {"widths": [64, 128, 128, 10]}),
    ],
    ids=["resnet", "densenet", "inception", "vgg", "mlp", "mlp of one class"],
)
def test_impossible_values_are_named_all_at_once(network: str, keys: dict[str, Any], right: dict[str, Any]) -> None:
    with pytest.raises(CannotRun) as caught:
        build(network, keys)
    found = refused(caught)
    assert {problem.key: problem.value for problem in found} == {f"model.{key}": value for key, value in keys.items()}
    assert replaced(found) == {f"model.{key}": [value] for key, value in right.items()}


def test_configs_do_not_import_torch() -> None:
    imports = ", ".join(f"models.{network}.config" for network in NETWORKS)
    code = f"import sys, {imports}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
