"""What of a model is split: the channels of its convolutions, and what is kept whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.products import Product
from harness.measure.count_model import count
from harness.sbp.device_grid import Grid
from harness.sbp.matmul_chain import Matmul, chain_from_profile
from tests.engines import zoo
from tests.support.nets import Net
from tests.support.sbp_plans import costs_of, flat

ROOT = Path(__file__).parents[3]
SAMPLES = 4
CONVOLUTIONS = sorted(name for name in zoo.SIZES if not name.startswith(("gpt", "mlp")))
SIDE = 15
CASES: dict[str, Callable[[], nn.Module]] = {
    "padded": lambda: nn.Conv2d(16, 32, 3, padding=1),
    "strided": lambda: nn.Conv2d(16, 32, 3, stride=2, padding=1),
    "unpadded": lambda: nn.Conv2d(16, 32, 3),
    "strided and unpadded": lambda: nn.Conv2d(16, 32, 5, stride=3),
    "strided, of one place": lambda: nn.Conv2d(16, 32, 1, stride=2),
    "oblong": lambda: nn.Conv2d(16, 32, (1, 7), stride=(2, 1)),
    "dilated": lambda: nn.Conv2d(16, 32, 3, dilation=2),
}
WHOLE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "groups": (lambda: nn.Conv2d(16, 32, 3, groups=4), (16, SIDE, SIDE)),
    "transposed": (lambda: nn.ConvTranspose2d(16, 32, 2, stride=2), (16, SIDE, SIDE)),
    "of rows": (lambda: nn.Conv1d(16, 32, 3), (16, SIDE)),
    "of rooms": (lambda: nn.Conv3d(16, 32, 1), (16, 3, 3, 3)),
    "padded by a copy": (lambda: nn.Conv2d(16, 32, 3, padding=1, padding_mode="circular"), (16, SIDE, SIDE)),
    "a pool before": (lambda: nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(16, 32, 1)), (16, SIDE, SIDE)),
    "a pool after it": (lambda: nn.Sequential(nn.Conv2d(16, 32, 1), nn.MaxPool2d(2)), (16, SIDE, SIDE)),
}


def profile_of(make: Callable[[], nn.Module], shape: tuple[int, ...], autocast: str | None = None) -> ModelProfile:
    return count(Net(lambda: nn.Sequential(make()), shape), SAMPLES, "float32", autocast)


def only(profile: ModelProfile) -> Matmul:
    (item,) = chain_from_profile(profile).matmuls
    return item


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_channels_of_the_zoo_are_those_of_its_modules(name: str) -> None:
    model = zoo.model(name)
    profile = count(model, SAMPLES, "float32")
    found = {item.name: item for item in chain_from_profile(profile).matmuls}
    for path, module in model.layers().named_modules():
        if isinstance(module, nn.Conv2d):
            assert (found[path].inputs, found[path].outputs) == (module.in_channels, module.out_channels)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("autocast", [None, "bfloat16"])
def test_channels_of_a_convolution(case: str, autocast: str | None) -> None:
    profile = profile_of(
        lambda: nn.Sequential(nn.BatchNorm2d(16), CASES[case](), nn.ReLU()), (16, SIDE, SIDE), autocast
    )
    item = only(profile)
    assert (item.inputs, item.outputs, item.whole, item.conv) == (16, 32, False, True)
    shape = CASES[case]()(torch.ones(SAMPLES, 16, SIDE, SIDE)).shape
    assert (item.input_elements, item.output_elements) == (SAMPLES * 16 * SIDE**2, prod(shape))


@pytest.mark.parametrize("case", WHOLE)
def test_what_cannot_be_split_exactly_is_kept_whole(case: str) -> None:
    """What is sent for it is what enters and leaves its layer."""
    make, shape = WHOLE[case]
    profile = profile_of(make, shape)
    item = only(profile)
    assert item.whole
    assert costs_of(profile, flat(2), 1).strategies(item) == [Grid(1, 2).strategy((2, 1, 1))]
    out: Tensor = make()(torch.ones(SAMPLES, *shape))
    assert (item.input_elements, item.output_elements) == (SAMPLES * prod(shape), out.numel())


def test_a_profile_that_has_no_images_keeps_convolutions_whole() -> None:
    """An older one: nobody knows the channels."""
    profile = profile_of(CASES["padded"], (16, SIDE, SIDE))
    (layer,) = profile.layers
    older = replace(layer, products=tuple(replace(product, image=()) for product in layer.products))
    assert only(replace(profile, layers=(older,))).whole


@pytest.mark.parametrize("path", sorted((ROOT / "sweeps" / "profiles").glob("*_1000.json")), ids=lambda path: path.stem)
def test_stored_profiles_have_images(path: Path) -> None:
    products = [product for layer in ModelProfile.load(path).layers for product in layer.products]
    convolutions = [product for product in products if product.kind == "conv"]
    assert convolutions
    assert all(product.image and product.in_ % product.image[0] == 0 for product in convolutions)


def test_a_layer_is_kept_whole_where_products_stand_in_no_submodule() -> None:
    """They may be parallel to each other, or to those that are."""
    profile = profile_of(lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), (5, 8))
    names = [product.name for product in profile.layers[0].products if product.weight_bytes]
    assert names == ["self_attn", "self_attn.out_proj", "linear1", "linear2"]
    assert all(item.whole for item in chain_from_profile(profile).matmuls)


class Named(nn.Module):
    """Its submodules are called as kinds of matmuls are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.linear(x))


def test_matmuls_have_the_names_of_their_modules() -> None:
    """Also where one is called as its layer is, or as a kind of matmul."""
    layers = lambda: nn.Sequential(  # noqa: E731
        nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Sequential(nn.ReLU(), nn.Linear(8, 8)),
        Named(),
    )  # fmt: skip
    profile = count(Net(layers, (8,)), SAMPLES, "float32")
    names = [item.name for item in chain_from_profile(profile).matmuls]
    assert names == ["0", "1.0", "1.1", "2.1", "3.linear", "3.out"]
    for name in names:
        assert isinstance(layers().get_submodule(name), nn.Linear)


@pytest.mark.parametrize(("kept", "whole"), [(("qkv",), False), (("query", "key", "value"), True)])
def test_attention_is_split_where_one_matmul_has_queries_keys_and_values(kept: tuple[str, ...], whole: bool) -> None:
    """Nobody knows what each matmul of these profiles reads: with three of them the last has the values alone."""
    hidden, heads, tokens = 16, 4, 3
    first = [Product(f"attention.{name}", "linear", tokens, hidden, 3 * hidden // len(kept), 4) for name in kept]
    scores = Product("scores", "attention", tokens, hidden // heads, tokens, heads=heads)
    values = Product("values", "attention", tokens, tokens, hidden // heads, heads=heads)
    last = Product("attention.projection", "linear", tokens, hidden, hidden, 4)
    layer = LayerProfile("block", param_bytes=16, output_bytes=64, products=(*first, scores, values, last))
    assert all(one.whole is whole for one in chain_from_profile(ModelProfile((layer,))).matmuls)
