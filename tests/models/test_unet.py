"""U-Net (B, C): published counts, names, shapes and skips; impossible numbers."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from harness.core.model_profile import LayerProfile, ModelProfile, Skip
from harness.core.plan import Plan
from harness.core.problem import CannotRun
from harness.nn.skip import layer_skips
from harness.schedule.transfers import plan_transfers
from models.unet.config import Config
from models.unet.unet import build
from tests.problems import refused, replaced
from tests.support.zoo import on_meta, parameters, preset
from tests.tiers import examples

ROOT = Path(__file__).parents[2]

# preset: B, C, size, layers, parameters
PRESETS = {
    "unet": (2, 16, 128, 109, 4_519_160),
    "unet_5_64": (5, 64, 192, 241, 232_687_328),
    "unet_6_72": (6, 72, 192, 285, 362_157_516),
    "unet_11_128": (11, 128, 192, 505, 2_213_834_176),
    "unet_24_128": (24, 128, 192, 1077, 4_993_859_008),
    "unet_24_160": (24, 160, 192, 1077, 7_802_903_600),
    "unet_48_160": (48, 160, 192, 2133, 15_822_206_000),
}


def profile(model: nn.Sequential, size: int) -> ModelProfile:
    """Bytes are elements for each sample here."""
    x, layers = torch.empty(1, 3, size, size, device="meta"), []
    for name, layer in model.named_children():
        x = layer(x)
        layers.append(LayerProfile(name, output_bytes=x.numel()))
    skips = [
        Skip(s.source, s.target, layers[s.source].output_bytes, s.name) for s in layer_skips(model.named_children())
    ]
    return ModelProfile(tuple(layers), skips=tuple(skips), input_bytes=3 * size * size)


@pytest.fixture(scope="module")
def paper() -> ModelProfile:
    return profile(on_meta(build(Config(convs=5, channels=64, size=192))), 192)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_published_counts(name: str) -> None:
    config = preset(Config, name)
    convs, channels, size, layers, count = PRESETS[name]
    assert (config.convs, config.channels, config.size) == (convs, channels, size)
    model = on_meta(build(config))
    assert (len(model), parameters(model)) == (layers, count)
    comment = (ROOT / "conf/model" / f"{name}.yaml").read_text().split("defaults")[0]
    assert comment.startswith("# ") and f"model={name}" in comment
    assert f"{count:,} parameters, {layers} layers" in comment


def test_every_preset_is_listed() -> None:
    assert sorted(PRESETS) == sorted(file.stem for file in (ROOT / "conf/model").glob("unet*.yaml"))


@settings(max_examples=examples(20), deadline=None)
@given(convs=st.integers(1, 6), half=st.integers(1, 40))
def test_counts_follow_the_closed_form(convs: int, half: int) -> None:
    c = 2 * half
    down = [(3, c, c), (c, 2 * c, 2 * c), (2 * c, 4 * c, 4 * c), (4 * c, 8 * c, 8 * c), (8 * c, 16 * c, 16 * c)]
    up = [(32 * c, 8 * c, 8 * c), (16 * c, 4 * c, 4 * c), (8 * c, 2 * c, 2 * c), (4 * c, c, c), (2 * c, half, half)]
    products = 0
    for before, middle, after in [*down, (16 * c, 32 * c, 16 * c), *up]:
        if convs == 1:
            products += before * after
        else:
            products += before * middle + (convs - 2) * middle * middle + middle * after
    model = on_meta(build(Config(convs=convs, channels=c, size=192)))
    assert (len(model), parameters(model)) == (44 * convs + 21, 9 * products + half)


def test_names() -> None:
    names = [name for name, _ in on_meta(build(Config(convs=1, channels=2, size=192))).named_children()]
    assert names[:8] == [
        "encoder_0_encode_0_conv",
        "encoder_0_encode_0_dropout",
        "encoder_0_encode_0_norm",
        "encoder_0_encode_0_relu",
        "encoder_0_skip",
        "encoder_0_down",
        "encoder_1_encode_0_conv",
        "encoder_1_encode_0_dropout",
    ]
    assert names[28:36] == [
        "encoder_4_skip",
        "encoder_4_down",
        "bottleneck_0_0_conv",
        "bottleneck_0_0_dropout",
        "bottleneck_0_0_norm",
        "bottleneck_0_0_relu",
        "decoder_0_up",
        "decoder_0_skip",
    ]
    assert names[-3:] == ["decoder_4_decode_0_norm", "decoder_4_decode_0_relu", "segment"]


def test_outputs_of_5_64(paper: ModelProfile) -> None:
    """Elements for each sample at 192 x 192."""
    outputs = {layer.name: layer.output_bytes for layer in paper.layers}
    expected = {
        "encoder_0_encode_4_relu": 2_359_296,
        "encoder_0_down": 589_824,
        "encoder_4_skip": 147_456,
        "encoder_4_down": 36_864,
        "bottleneck_0_3_relu": 73_728,
        "bottleneck_0_4_relu": 36_864,
        "decoder_0_up": 147_456,
        "decoder_0_skip": 294_912,
        "decoder_0_decode_4_relu": 73_728,
        "decoder_4_skip": 4_718_592,
        "decoder_4_decode_4_relu": 1_179_648,
        "segment": 36_864,
    }
    assert {name: outputs[name] for name in expected} == expected


def test_skips_of_5_64(paper: ModelProfile) -> None:
    assert [(s.name, s.source, s.target, s.bytes) for s in paper.skips] == [
        ("skip_0", 20, 219, 2_359_296),
        ("skip_1", 42, 197, 1_179_648),
        ("skip_2", 64, 175, 589_824),
        ("skip_3", 86, 153, 294_912),
        ("skip_4", 108, 131, 147_456),
    ]


@pytest.mark.parametrize(
    "balance, boundaries, without, portals",
    [
        ((34, 76, 70, 61), [1_179_648, 36_864, 294_912], 11_980_800, 6_082_560),  # torchgpipe's table 1
        ((104, 137), [147_456], 4_571_136, 4_571_136),
        ((30, 66, 84, 61), [1_179_648, 147_456, 294_912], 11_943_936, 6_045_696),
        (
            (16, 27, 31, 44, 22, 57, 27, 17),
            [2_359_296, 1_179_648, 294_912, 73_728, 73_728, 1_179_648, 1_179_648],
            26_542_080,
            10_911_744,
        ),
    ],
)
def test_copied_elements(
    paper: ModelProfile, balance: tuple[int, ...], boundaries: list[int], without: int, portals: int
) -> None:
    plan = Plan.contiguous(balance)
    assert [
        transfer.bytes for transfer in plan_transfers(plan, paper, portals=True) if transfer.part == ""
    ] == boundaries
    assert sum(transfer.bytes for transfer in plan_transfers(plan, paper, portals=False)) == without
    assert sum(transfer.bytes for transfer in plan_transfers(plan, paper, portals=True)) == portals


def test_name_and_task() -> None:
    model = build(preset(Config, "unet_5_64"))
    assert (model.name, model.task) == ("unet_5_64_192", "segmentation")


@pytest.mark.parametrize(
    ("keys", "right"),
    [
        ({"convs": 0}, {"model.convs": [1]}),
        ({"channels": 15}, {"model.channels": [16]}),
        ({"channels": 0}, {"model.channels": [2]}),
        ({"channels": -3}, {"model.channels": [2]}),
        ({"size": 16}, {"model.size": [64]}),
        ({"size": 63}, {"model.size": [64]}),
        ({"dropout": 1.0}, {"model.dropout": [0.1]}),
        ({"dropout": float("nan")}, {"model.dropout": [0.1]}),
        ({"convs": 0, "size": 1}, {"model.convs": [1], "model.size": [64]}),
    ],
)
def test_impossible_numbers_are_named(keys: dict[str, Any], right: dict[str, list[Any]]) -> None:
    with pytest.raises(CannotRun) as caught:
        build(Config(**keys))
    assert replaced(refused(caught)) == right
    assert [problem.value for problem in refused(caught)] == pytest.approx([*keys.values()], nan_ok=True)


def test_the_smallest_model_trains() -> None:
    model = build(Config(convs=1, channels=2, size=64))
    model.loss(model.layers()(model.sample(1).inputs), model.sample(1).targets).backward()


def test_configs_do_not_import_torch() -> None:
    code = """if True:
        import sys
        import models.data.images.config, models.data.synthetic, models.unet.config
        sys.exit('torch' in sys.modules)
    """
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
