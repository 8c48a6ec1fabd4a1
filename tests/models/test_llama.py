"""Llama: published counts, names, FLOPs, what it saves, impossible numbers, plans of the large ones."""

from __future__ import annotations

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
from models.llama.config import SIZES, Config
from models.llama.llama import build
from tests.problems import refused, replaced
from tests.support.profiles import without_times
from tests.support.quick import within_s
from tests.support.zoo import on_meta, parameters, preset
from tests.tiers import examples

ROOT = Path(__file__).parents[2]
SMALL = Config(layers=2, width=24, heads=6, kv_heads=2, hidden=20, sequence=5, vocabulary=7)

# preset: layers, width, heads, kv_heads, hidden, sequence, vocabulary, rope_theta, parameters
PRESETS: dict[str, tuple[float, ...]] = {
    "llama": (4, 64, 4, 2, 176, 64, 256, 1e4, 217_664),
    "llama2_7b": (32, 4096, 32, 32, 11008, 4096, 32000, 1e4, 6_738_415_616),
    "llama3_8b": (32, 4096, 32, 8, 14336, 8192, 128256, 5e5, 8_030_261_248),
    "llama3_70b": (80, 8192, 64, 8, 28672, 8192, 128256, 5e5, 70_553_706_496),
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_published_counts(name: str) -> None:
    config, (*keys, published) = preset(Config, name), PRESETS[name]
    assert [getattr(config, key) for key in (*SIZES, "rope_theta")] == keys
    assert (config.norm_eps, config.tied) == (1e-5, False)
    model = on_meta(build(config))
    assert (len(model), parameters(model)) == (config.layers + 3, published)
    assert build(config).name == "llama_" + "_".join(map(str, keys[:-1]))
    comment = (ROOT / "conf/model" / f"{name}.yaml").read_text().split("defaults")[0]
    assert comment.startswith("# Llama") and f"model={name}" in comment
    assert f"{published:,} parameters, {config.layers + 3} layers" in comment


def test_every_preset_is_listed() -> None:
    assert sorted(PRESETS) == sorted(file.stem for file in (ROOT / "conf/model").glob("llama*.yaml"))


def test_the_largest_is_built_in_no_time() -> None:
    within_s(1, lambda: on_meta(build(preset(Config, "llama3_70b"))))


@settings(max_examples=examples(20))
@given(
    layers=st.integers(1, 3), groups=st.integers(1, 3), kv_heads=st.integers(1, 3), pairs=st.integers(1, 4),
    hidden=st.integers(1, 9), sequence=st.integers(1, 9), vocabulary=st.integers(2, 300), tied=st.booleans(),
)  # fmt: skip
def test_counts_follow_the_closed_form(
    layers: int, groups: int, kv_heads: int, pairs: int, hidden: int, sequence: int, vocabulary: int, tied: bool
) -> None:
    heads = groups * kv_heads
    width = heads * 2 * pairs
    model = on_meta(build(Config("llama", layers, width, heads, kv_heads, hidden, sequence, vocabulary, tied=tied)))
    block = 2 * width * width + 2 * width * kv_heads * 2 * pairs + 3 * width * hidden + 2 * width
    assert parameters(model) == layers * block + vocabulary * width * (1 if tied else 2) + width
    assert len(model) == layers + 3


def test_names() -> None:
    layers = on_meta(build(SMALL))
    assert [name for name, _ in layers.named_children()] == ["embedding", "block_0", "block_1", "norm", "head"]
    assert [name for name, module in layers.block_0.named_modules() if isinstance(module, nn.Linear)] == [
        "attention.query", "attention.key", "attention.value", "attention.projection", "mlp.gate", "mlp.up", "mlp.down",
    ]  # fmt: skip
    model = build(SMALL)
    assert (model.name, model.task, model.input_shape, model.classes) == ("llama_2_24_6_2_20_5_7", "text", (5,), 7)
    assert build(replace(SMALL, tied=True)).name == "llama_2_24_6_2_20_5_7_tied"


@pytest.mark.usefixtures("computation")
def test_flops_of_the_large_ones() -> None:
    """Those of all matmuls; attention's are those of all query heads."""
    for name in ("llama2_7b", "llama3_8b"):
        config = preset(Config, name)
        s, w, d = config.sequence, config.width, config.width // config.heads
        block = 2 * s * (2 * w * w + 2 * w * config.kv_heads * d + 3 * w * config.hidden) + 4 * s * s * w
        profile = count(build(config), 1, "bfloat16")
        assert profile.sum("flops", 1, config.layers) == config.layers * block
        assert profile.layers[-1].flops == 2 * s * w * config.vocabulary


@pytest.mark.parametrize("keys", [{}, {"tied": True}, {"kv_heads": 4}], ids=str)
def test_counted_is_measured_without_times(keys: dict[str, Any]) -> None:
    """Every byte that autograd saves, among others."""

    model = build(Config(layers=1, **keys))
    counted = count(model, 3, "float32")
    assert without_times(counted) == without_times(measure(model, 3, "float32", "cpu", repeats=1))
    assert counted.layers[1].buffer_bytes == 2 * 4 * 64 * 8 and not counted.layers[1].shared_buffers


@pytest.mark.parametrize(
    ("keys", "right"),
    [
        ({"layers": 0}, {"model.layers": [4]}),
        ({"vocabulary": 1}, {"model.vocabulary": [256]}),
        ({"hidden": 0}, {"model.hidden": [176]}),
        ({"heads": 5, "kv_heads": 1}, {"model.heads": [4, 8]}),
        ({"kv_heads": 3}, {"model.kv_heads": [2, 4]}),
        ({"kv_heads": 8}, {"model.kv_heads": [4]}),
        ({"heads": 0}, {"model.heads": [4]}),
        ({"width": 12}, {"model.width": [16]}),
        ({"rope_theta": 0.0}, {"model.rope_theta": [10000.0]}),
        ({"norm_eps": float("nan")}, {"model.norm_eps": [1e-5]}),
    ],
)
def test_impossible_numbers_are_named(keys: dict[str, Any], right: dict[str, list[Any]]) -> None:
    with pytest.raises(CannotRun) as caught:
        build(Config(**keys))
    assert replaced(refused(caught)) == right


def test_config_does_not_import_torch() -> None:
    code = "import sys; import models.llama.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
