"""Batches from a pool of images, and the pool that ships with scikit-learn."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from harness.problem import CannotRun
from models.data.images.config import Config, build
from models.data.images.images import Images, Pool
from models.unet.config import Config as UNetConfig
from models.unet.config import build as unet

MODEL = unet(UNetConfig(convs=1, channels=16, size=64))


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def data() -> Images:
    return build(Config(), MODEL, seed=0)


def numbered(n: int) -> Images:
    """Image i is i all over."""
    images = torch.arange(n, dtype=torch.uint8)[:, None, None, None].expand(n, 3, 2, 2)
    return Images(Pool(images, torch.zeros(n, 1, 2, 2, dtype=torch.bool)), seed=0)


def which(data: Images, step: int, size: int) -> list[int]:
    return [round((sample[0, 0, 0].item() + 1) * 127.5) for sample in data.batch(step, size).inputs]


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 20), size=st.integers(1, 30), steps=st.integers(1, 8))
def test_each_image_comes_once_in_an_epoch(n: int, size: int, steps: int) -> None:
    data = numbered(n)
    walk = [i for step in range(steps) for i in which(data, step, size)]
    assert len(walk) == steps * size
    for first in range(0, len(walk) - n + 1, n):
        assert sorted(walk[first : first + n]) == list(range(n))
    assert len(set(walk[: min(n, len(walk))])) == min(n, len(walk))


def test_epochs_have_different_orders() -> None:
    data = numbered(20)
    assert which(data, 0, 20) != which(data, 1, 20)
    assert which(data, 0, 20) != list(range(20))


def test_a_batch_depends_on_seed_step_and_size_alone(data: Images) -> None:
    before = data.batch(3, 4)
    torch.manual_seed(1)
    expected = torch.rand(4)
    torch.manual_seed(1)
    again = build(Config(), MODEL, seed=0).batch(3, 4)
    assert torch.equal(torch.rand(4), expected), "torch's generator was used"
    assert torch.equal(again.inputs, before.inputs) and torch.equal(again.targets, before.targets)
    assert not torch.equal(data.batch(4, 4).inputs, before.inputs)
    assert not torch.equal(build(Config(), MODEL, seed=1).batch(3, 4).inputs, before.inputs)
    assert not torch.equal(Images(data.pool, seed=1).batch(3, 4).inputs, before.inputs)


def test_a_batch_may_be_changed_in_place(data: Images) -> None:
    expected = data.batch(0, 4).inputs.clone()
    data.batch(0, 4).inputs.zero_()
    assert torch.equal(data.batch(0, 4).inputs, expected)


def test_images_and_masks_are_mirrored_together() -> None:
    image = torch.tensor([[255, 0, 0], [255, 255, 0]], dtype=torch.uint8)
    data = Images(Pool(image.expand(8, 3, 2, 3), (image > 0).expand(8, 1, 2, 3)), seed=0)
    batch = data.batch(0, 8)
    assert torch.equal((batch.inputs[:, :1] + 1) / 2, batch.targets)
    rows = {tuple(sample[0, 0].tolist()) for sample in batch.targets}
    assert rows == {(1, 0, 0), (0, 0, 1)}


def test_types_shapes_and_range(data: Images) -> None:
    batch = data.batch(0, 300)
    assert batch.inputs.shape == (300, 3, 64, 64) and batch.targets.shape == (300, 1, 64, 64)
    assert batch.inputs.dtype == batch.targets.dtype == torch.float32
    assert -1 <= batch.inputs.min() < -0.9 and 0.9 < batch.inputs.max() <= 1
    assert batch.targets.unique().tolist() == [0, 1]


def test_digits_are_real_ink_on_photographs(data: Images) -> None:
    ink = data.pool.masks.float().mean((1, 2, 3))
    assert len(ink) == 256 and ink.min() > 0.01 and ink.max() < 0.5
    inside = data.pool.images[data.pool.masks.expand(-1, 3, -1, -1)]
    assert inside.float().mean() > 120  # bright ink
    assert len({image.numpy().tobytes() for image in data.pool.images}) == 256


@pytest.mark.usefixtures("one_thread")
def test_the_loss_falls(data: Images) -> None:
    """Plain SGD, lr 0.1: to two thirds, and below what a model reaches that knows the share of the ink alone."""
    torch.manual_seed(0)
    layers, losses = MODEL.layers(), []
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    for step in range(60):
        batch = data.batch(step, 8)
        loss = MODEL.loss(layers(batch.inputs), batch.targets) / 8
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    share = data.pool.masks.float().mean()
    constant = -(share * share.log() + (1 - share) * (1 - share).log()).item()
    last = sum(losses[-5:]) / 5
    assert last < 0.66 * losses[0] and last < constant, (losses[0], last, constant)


def test_another_task_is_a_problem() -> None:
    model = SimpleNamespace(name="gpt", task="text", input_shape=(16,))
    with pytest.raises(CannotRun) as caught:
        build(Config(), model, seed=0)
    (problem,) = caught.value.problems
    assert (problem.key, problem.what) == ("data images", "is for segmentation, gpt does text")
    assert "data=synthetic" in problem.mend


def test_conf() -> None:
    text = (Path(__file__).parents[3] / "conf/data/images.yaml").read_text()
    assert text.startswith("# ") and "data=images" in text.split("defaults")[0]
    assert OmegaConf.create(text) == {"defaults": ["_images", "_self_"]}
    assert OmegaConf.structured(Config) == {"name": "images", "folder": None}
