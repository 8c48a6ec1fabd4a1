"""Batches from a pool of images, and the pool that ships with scikit-learn."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from harness.core.problem import CannotRun
from models.data.images.config import Config
from models.data.images.image_pool import Pool
from models.data.images.images import Images, build
from models.unet.config import Config as UNetConfig
from models.unet.unet import build as unet
from tests.problems import Row, row

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
    return Images(Pool(images, torch.zeros(n, 1, 2, 2, dtype=torch.bool), mirrored=True), (3, 2, 2), seed=0)


def which(data: Images, step: int, size: int) -> list[int]:
    return [round((sample[0, 0, 0].item() + 1) * 127.5) for sample in data.batch(step, size).inputs]


def test_steps_walk_through_the_pool() -> None:
    data = numbered(7)
    walk = [i for step in range(5) for i in which(data, step, 4)]
    assert sorted(walk[:7]) == sorted(walk[7:14]) == list(range(7))


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
    assert not torch.equal(Images(data.pool, MODEL.input_shape, seed=1).batch(3, 4).inputs, before.inputs)


def test_a_batch_may_be_changed_in_place(data: Images) -> None:
    expected = data.batch(0, 4).inputs.clone()
    data.batch(0, 4).inputs.zero_()
    assert torch.equal(data.batch(0, 4).inputs, expected)


def test_images_and_masks_are_mirrored_together() -> None:
    image = torch.tensor([[255, 0, 0], [255, 255, 0]], dtype=torch.uint8)
    data = Images(Pool(image.expand(8, 3, 2, 3), (image > 0).expand(8, 1, 2, 3), mirrored=True), (3, 2, 3), seed=0)
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
    ink = data.pool.targets.float().mean((1, 2, 3))
    assert len(ink) == 256 and ink.min() > 0.01 and ink.max() < 0.5
    inside = data.pool.images[data.pool.targets.expand(-1, 3, -1, -1)]
    assert inside.float().mean() > 120  # bright ink
    assert len({image.numpy().tobytes() for image in data.pool.images}) == 256


@pytest.mark.usefixtures("at_length")
@pytest.mark.usefixtures("commands")
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
    share = data.pool.targets.float().mean()
    constant = -(share * share.log() + (1 - share) * (1 - share).log()).item()
    last = sum(losses[-5:]) / 5
    assert last < 0.66 * losses[0] and last < constant, (losses[0], last, constant)


@pytest.mark.parametrize(
    ("task", "shape", "found", "hint"),
    [
        ("text", (16,), ("data", "images", ["data=text", "data=synthetic"]), ""),
        ("segmentation", (1, 8, 8), ("model", "small", ["data=synthetic"]), ""),
        ("segmentation", (64,), ("model", "small", ["data=synthetic"]), ""),
        ("classification", (3, 8), ("model", "small", ["data=synthetic"]), ""),
        ("classification", (60,), ("model", "small", ["data=synthetic"]), "model.widths=[64,...]"),
    ],
)
def test_models_that_take_no_images(task: str, shape: tuple[int, ...], found: Row, hint: str) -> None:
    model = SimpleNamespace(name="small", task=task, input_shape=shape, classes=10)
    with pytest.raises(CannotRun) as caught:
        build(Config(), model, seed=0)
    (problem,) = caught.value.problems
    assert (row(problem), problem.hint) == (found, hint)


def test_conf() -> None:
    text = (Path(__file__).parents[3] / "conf/data/images.yaml").read_text()
    assert text.startswith("# ") and "data=images" in text.split("defaults")[0]
    assert OmegaConf.create(text) == {"defaults": ["_images", "_self_"]}
    assert OmegaConf.structured(Config) == {"name": "images", "folder": None}
