"""What of a model is split: the channels of its convolutions, and what is kept whole."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
import torch
from torch import Tensor, nn

from harness.counting import count
from harness.profile import ModelProfile
from harness.sbp.chain import Matmul, chain_of
from harness.sbp.grid import Grid
from tests.engines import zoo
from tests.engines.sbp.plans import costs_of, flat
from tests.harness.nets import Net

SAMPLES = 4
CONVOLUTIONS = sorted(name for name in zoo.SIZES if not name.startswith(("gpt", "mlp")))
SIDE = 15
CASES: dict[str, nn.Conv2d] = {
    "padded": nn.Conv2d(16, 32, 3, padding=1),
    "strided": nn.Conv2d(16, 32, 3, stride=2, padding=1),
    "unpadded": nn.Conv2d(16, 32, 3),
    "strided and unpadded": nn.Conv2d(16, 32, 5, stride=3),
    "strided, of one place": nn.Conv2d(16, 32, 1, stride=2),
    "oblong": nn.Conv2d(16, 32, (1, 7), stride=(2, 1)),
    "dilated": nn.Conv2d(16, 32, 3, dilation=2),
    "padded by itself": nn.Conv2d(16, 32, 3, padding="same", padding_mode="circular"),
}
WHOLE: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "groups": (nn.Conv2d(16, 32, 3, groups=4), (16, SIDE, SIDE)),
    "transposed": (nn.ConvTranspose2d(16, 32, 2, stride=2), (16, SIDE, SIDE)),
    "of a row": (nn.Conv1d(16, 32, 3), (16, SIDE)),
    "of a room": (nn.Conv3d(16, 32, 1), (16, 3, 3, 3)),
    "a pool before": (nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(16, 32, 1)), (16, SIDE, SIDE)),
    "a pool behind": (nn.Sequential(nn.Conv2d(16, 32, 1), nn.MaxPool2d(2)), (16, SIDE, SIDE)),
}


def profile_of(layer: nn.Module, shape: tuple[int, ...], autocast: str | None = None) -> ModelProfile:
    return count(Net(lambda: nn.Sequential(layer), shape), SAMPLES, "float32", autocast)


def only(profile: ModelProfile) -> Matmul:
    (item,) = chain_of(profile).matmuls
    return item


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_channels_of_the_zoo_are_those_of_its_modules(name: str) -> None:
    """And the images, where a product is split: what is sent."""
    model = zoo.model(name)
    layers, seen = model.layers(), {}

    def see(path: str) -> None:
        layers.get_submodule(path).register_forward_hook(lambda _, given, out: seen.update({path: (given[0], out)}))

    modules = {path: module for path, module in layers.named_modules() if isinstance(module, nn.Conv2d)}
    for path in modules:
        see(path)
    layers(model.sample(SAMPLES).inputs) if not count(model, 1, "float32").skips else None
    found = {item.name: item for item in chain_of(count(model, SAMPLES, "float32")).matmuls}
    assert modules.keys() <= found.keys()
    for path, module in modules.items():
        item = found[path]
        assert (item.inputs, item.outputs) == (module.in_channels, module.out_channels)
        if not item.whole:
            assert (item.input_elements, item.output_elements) == tuple(x.numel() for x in seen[path])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("autocast", [None, "bfloat16"])
def test_channels_of_a_convolution(case: str, autocast: str | None) -> None:
    layer = nn.Sequential(nn.BatchNorm2d(16), CASES[case], nn.ReLU())
    item = only(profile_of(layer, (16, SIDE, SIDE), autocast))
    assert (item.inputs, item.outputs, item.whole, item.conv) == (16, 32, False, True)
    shape = CASES[case](torch.ones(SAMPLES, 16, SIDE, SIDE)).shape
    assert (item.input_elements, item.output_elements) == (SAMPLES * 16 * SIDE**2, prod(shape))


@pytest.mark.parametrize("case", WHOLE)
def test_what_cannot_be_split_exactly_is_kept_whole(case: str) -> None:
    """What is sent for it is what enters and leaves its layer."""
    layer, shape = WHOLE[case]
    item = only(profile_of(layer, shape))
    assert item.whole
    allowed = costs_of(profile_of(layer, shape), flat(2), 1).strategies(item)
    assert allowed == [Grid(1, 2).strategy((2, 1, 1))]
    out: Tensor = layer(torch.ones(SAMPLES, *shape))
    assert (item.input_elements, item.output_elements) == (SAMPLES * prod(shape), out.numel())


def test_a_profile_that_tells_no_images_keeps_convolutions_whole() -> None:
    """An older one: nobody knows the channels."""
    profile = profile_of(CASES["padded"], (16, SIDE, SIDE))
    (layer,) = profile.layers
    older = replace(layer, products=tuple(replace(product, image=()) for product in layer.products))
    assert only(replace(profile, layers=(older,))).whole
