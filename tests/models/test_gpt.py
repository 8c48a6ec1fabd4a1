"""GPT: published counts and FLOPs, names, what it saves, impossible numbers."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from harness.core.problem import CannotRun
from harness.measure.count_model import count
from harness.measure.profile_model import measure
from models.gpt.config import Config
from models.gpt.gpt import build
from tests.problems import refused, replaced
from tests.support.profiles import without_times
from tests.support.quick import within_s
from tests.support.zoo import on_meta, parameters, preset
from tests.tiers import examples

ROOT = Path(__file__).parents[2]
SMALL = Config(layers=2, hidden=12, heads=3, sequence=5, vocabulary=7)

# preset: layers, hidden, heads, sequence, vocabulary, parameters
OWN = ("gpt_28_32",)
"""Of no paper."""
PRESETS = {
    "gpt": (4, 64, 4, 64, 256, 220_544),
    "gpt_110m": (12, 768, 12, 512, 51200, 124_770_816),
    "gpt_12b": (48, 4512, 24, 512, 51200, 11_962_440_000),
    "gpt_24b": (48, 6336, 36, 512, 51200, 23_455_073_664),
    "gpt_50b": (96, 6528, 48, 512, 51200, 49_437_967_104),
    "gpt_100b": (96, 9360, 60, 512, 51200, 101_421_983_520),
    "gpt_6_8b": (8, 8192, 64, 1024, 51200, 6_871_138_304),
    "gpt_16_5b": (20, 8192, 64, 1024, 51200, 16_536_092_672),
    "gpt_35_8b": (44, 8192, 64, 1024, 51200, 35_866_001_408),
    "gpt_24_1024": (24, 1024, 16, 1024, 51200, 355_788_800),
    "gpt_28_4096": (28, 4096, 32, 1024, 51200, 5_852_553_216),
    "gpt_36_4096": (36, 4096, 32, 1024, 51200, 7_463_591_936),
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_published_counts(name: str) -> None:
    config, (*sizes, published) = preset(Config, name), PRESETS[name]
    assert [config.layers, config.hidden, config.heads, config.sequence, config.vocabulary] == sizes
    assert (config.tied, config.dropout, config.attention_dropout) == (True, 0, 0)
    model = on_meta(build(config))
    assert (len(model), parameters(model)) == (config.layers + 4, published)
    assert build(config).name == "gpt_" + "_".join(map(str, sizes))
    comment = (ROOT / "conf/model" / f"{name}.yaml").read_text().split("defaults")[0]
    assert comment.startswith("# GPT") and f"model={name}" in comment
    assert f"{published:,} parameters, {config.layers + 4} layers" in comment


def test_every_preset_is_listed() -> None:
    assert sorted([*PRESETS, *OWN]) == sorted(file.stem for file in (ROOT / "conf/model").glob("gpt*.yaml"))


def test_gpt_2_small() -> None:
    """With its own vocabulary and sequence."""
    config = replace(preset(Config, "gpt_110m"), vocabulary=50257, sequence=1024)
    assert parameters(on_meta(build(config))) == 124_439_808


def test_the_largest_is_built_in_no_time() -> None:
    within_s(1, lambda: on_meta(build(preset(Config, "gpt_100b"))))


@settings(max_examples=examples(20))
@given(
    layers=st.integers(1, 3), heads=st.integers(1, 5), width=st.integers(1, 8), sequence=st.integers(1, 9),
    vocabulary=st.integers(2, 300), tied=st.booleans(),
)  # fmt: skip
def test_counts_follow_the_closed_form(
    layers: int, heads: int, width: int, sequence: int, vocabulary: int, tied: bool
) -> None:
    h = heads * width
    model = on_meta(build(Config("gpt", layers, h, heads, sequence, vocabulary, tied)))
    head = 0 if tied else vocabulary * h
    assert parameters(model) == layers * (12 * h * h + 13 * h) + vocabulary * h + sequence * h + 2 * h + head
    assert len(model) == layers + 4


def test_names() -> None:
    layers = on_meta(build(SMALL))
    assert [name for name, _ in layers.named_children()] == [
        "embedding", "position", "block_0", "block_1", "norm", "head",
    ]  # fmt: skip
    assert [name for name, module in layers.block_0.named_modules() if isinstance(module, nn.Linear)] == [
        "attention.qkv", "attention.projection", "mlp.up", "mlp.down",
    ]  # fmt: skip
    model = build(SMALL)
    assert (model.name, model.task, model.input_shape, model.classes) == ("gpt_2_12_3_5_7", "text", (5,), 7)
    assert build(replace(SMALL, tied=False)).name == "gpt_2_12_3_5_7_untied"


@pytest.mark.usefixtures("computation")
@pytest.mark.parametrize(("name", "published"), [("gpt_12b", 8.1345e17), ("gpt_100b", 6.8589e18)])
def test_flops_are_those_of_the_paper(name: str, published: float) -> None:
    """F = 96 b s l h^2 (1 + s / (6 h) + V / (16 l h)) for b = 16384 samples.

    A block runs forward twice and backward, which is twice as much; the head's output is not recomputed.
    """
    config = preset(Config, name)
    s, l, h, v = config.sequence, config.layers, config.hidden, config.vocabulary  # noqa: E741
    profile = count(build(config), 1, "float32")
    blocks, head = profile.sum("flops", 0, l + 2), profile.layers[-1].flops
    assert (blocks, head) == (24 * s * l * h * h + 4 * s * s * l * h, 2 * s * v * h)
    assert 16384 * (4 * blocks + 3 * head) == pytest.approx(published, rel=1e-5)


@pytest.mark.parametrize(
    "keys",
    [{}, {"tied": False}, {"dropout": 0.2, "attention_dropout": 0.2}],
    ids=["tied", "untied", "dropout"],
)
def test_counted_is_measured_without_times(keys: dict[str, Any]) -> None:
    """Every byte that autograd saves, among others."""

    model = build(Config(layers=1, **keys))
    counted = count(model, 3, "float32")
    assert without_times(counted) == without_times(measure(model, 3, "float32", "cpu", repeats=1))
    assert counted.layers[0].saved_bytes == counted.input_bytes == 3 * 64 * 8


@pytest.mark.parametrize(
    ("keys", "right"),
    [
        ({"layers": 0}, {"model.layers": [4]}),
        ({"sequence": -1}, {"model.sequence": [64]}),
        ({"vocabulary": 0}, {"model.vocabulary": [256]}),
        ({"heads": 5}, {"model.heads": [4, 8]}),
        ({"heads": 65}, {"model.heads": [64]}),
        ({"heads": 2, "hidden": 3}, {"model.heads": [1, 3]}),
        ({"dropout": 1.0}, {"model.dropout": [0.1]}),
        ({"attention_dropout": -0.1}, {"model.attention_dropout": [0.1]}),
        ({"dropout": float("nan")}, {"model.dropout": [0.1]}),
        (
            {"layers": 0, "heads": 5, "dropout": 2.0},
            {"model.layers": [4], "model.heads": [4, 8], "model.dropout": [0.1]},
        ),
        ({"hidden": 0, "heads": 0}, {"model.hidden": [64], "model.heads": [4]}),
    ],
)
def test_impossible_numbers_are_named(keys: dict[str, Any], right: dict[str, list[Any]]) -> None:
    with pytest.raises(CannotRun) as caught:
        build(Config(**keys))
    assert replaced(refused(caught)) == right


def test_config_does_not_import_torch() -> None:
    code = "import sys; import models.gpt.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
