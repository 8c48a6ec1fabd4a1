"""Synthetic data: one resident batch, drawn by the seed alone."""

from pathlib import Path

import torch
from omegaconf import OmegaConf

from models.data.synthetic import Config, build
from models.unet.config import Config as UNetConfig
from models.unet.unet import build as unet

MODEL = unet(UNetConfig(size=64))


def test_every_step_has_the_same_resident_batch() -> None:
    data = build(Config(), MODEL, seed=5)
    first, _, third = (data.batch(step, 3) for step in range(3))
    assert data.batch(7, 3) is third
    assert torch.equal(first.inputs, third.inputs) and torch.equal(first.targets, third.targets)
    assert len(first) == 3 and len(data.batch(7, 2)) == 2
    assert first.inputs.dtype == first.targets.dtype == torch.float32
    assert first.targets.min() == 1


def test_steps_that_work_in_place_change_no_other_step() -> None:
    """The next batch is asked for before a step has run."""
    data = build(Config(), MODEL, seed=5)
    expected = build(Config(), MODEL, seed=5).batch(0, 2)
    batch, following = data.batch(0, 2), data.batch(1, 2)
    for step in range(2, 6):
        assert torch.equal(batch.inputs, expected.inputs) and torch.equal(batch.targets, expected.targets)
        batch.inputs.sub_(0.5)
        batch, following = following, data.batch(step, 2)


def test_the_seed_alone_decides() -> None:
    torch.manual_seed(1)
    one = build(Config(), MODEL, seed=5).batch(0, 2)
    torch.manual_seed(2)
    assert torch.equal(build(Config(), MODEL, seed=5).batch(3, 2).inputs, one.inputs)
    assert not torch.equal(build(Config(), MODEL, seed=6).batch(0, 2).inputs, one.inputs)


def test_it_is_the_models_own_sample() -> None:
    torch.manual_seed(5)
    sample = MODEL.sample(2)
    assert torch.equal(build(Config(), MODEL, seed=5).batch(0, 2).inputs, sample.inputs)


def test_torchs_generator_stays_as_it_was() -> None:
    torch.manual_seed(1)
    expected = torch.rand(4)
    torch.manual_seed(1)
    build(Config(), MODEL, seed=5).batch(0, 2)
    assert torch.equal(torch.rand(4), expected)


def test_the_batch_is_on_the_cpu() -> None:
    with torch.device("meta"):
        assert build(Config(), MODEL, seed=5).batch(0, 2).inputs.device.type == "cpu"


def test_conf() -> None:
    text = (Path(__file__).parents[3] / "conf/data/synthetic.yaml").read_text()
    assert text.startswith("# ") and "data=synthetic" in text.split("defaults")[0]
    assert OmegaConf.create(text) == {"defaults": ["_synthetic", "_self_"]}
