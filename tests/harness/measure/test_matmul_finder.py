"""Products of little layers by hand, on real and on fake tensors, and of random ones against torch's FLOP counter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from harness.core.products import Product
from harness.measure.count_model import count
from harness.measure.profile_model import measure
from tests.support.nets import Net
from tests.tiers import examples

FLOAT = 4


class Layer(nn.Module):
    """Computes `run(self, x)` with parameters of the shapes given."""

    def __init__(self, run: Callable[[nn.Module, Tensor], Tensor], **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.run = run
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.ones(shape)))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


class Twice(nn.Module):
    """Two uses of one linear layer, with another one within a submodule between them."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.Linear(4, 4)
        self.inner = nn.Sequential(nn.Linear(4, 4, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(self.outer(x)))


class Places(nn.Module):
    """Tokens and their places, looked up in two tables."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(11, 6), nn.Embedding(5, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.tokens(x) + self.places(torch.arange(5, device=x.device))


def split(x: Tensor, heads: int = 2) -> Tensor:
    """(n, s, h) -> (n, heads, s, h / heads)."""
    return x.unflatten(2, (heads, -1)).transpose(1, 2)


def fused(_: nn.Module, x: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(split(x), split(x), split(x), is_causal=True)


def explicit(_: nn.Module, x: Tensor) -> Tensor:
    return (split(x) @ split(x).transpose(2, 3)).softmax(-1) @ split(x)[..., :2]


S, H = 5, 8  # a sample's rows and columns
CASES: dict[str, tuple[Callable[[], nn.Module], list[Product]]] = {
    "bias": (lambda: nn.Linear(H, 3), [Product("", "linear", S, H, 3, 3 * H * FLOAT)]),
    "no bias": (lambda: nn.Linear(H, 3, bias=False), [Product("", "linear", S, H, 3, 3 * H * FLOAT)]),
    "a submodule": (
        lambda: nn.Sequential(nn.Sequential(nn.Linear(H, 3)), nn.ReLU(), nn.Linear(3, 2)),
        [Product("0.0", "linear", S, H, 3, 3 * H * FLOAT), Product("2", "linear", S, 3, 2, 3 * 2 * FLOAT)],
    ),
    "in the middle of a parameter": (
        lambda: Layer(lambda m, x: functional.linear(x, m.w[2:5]), w=(9, H)),
        [Product("", "linear", S, H, 3, 9 * H * FLOAT)],
    ),
    "a cast of one's own": (
        lambda: Layer(lambda m, x: x.bfloat16() @ m.w.to(torch.bfloat16).t(), w=(3, H)),
        [Product("", "linear", S, H, 3, 3 * H * FLOAT)],
    ),
    "a weight on the left": (
        lambda: Layer(lambda m, x: m.w @ x.flatten(0, 1).t(), w=(3, H)),
        [Product("", "linear", S, H, 3, 3 * H * FLOAT)],
    ),
    "a weight spread over a batch": (
        lambda: Layer(lambda m, x: torch.bmm(x, m.w.expand(len(x), H, 3)), w=(H, 3)),
        [Product("", "linear", S, H, 3, 3 * H * FLOAT)],
    ),
    "a sum of products": (
        lambda: Layer(lambda m, x: torch.baddbmm(m.b, x, m.w.expand(len(x), H, 3)), w=(H, 3), b=(3,)),
        [Product("", "linear", S, H, 3, 3 * H * FLOAT)],
    ),
    "a weight for each head": (
        lambda: Layer(lambda m, x: split(x) @ m.w, w=(2, H // 2, 3)),
        [Product("", "linear", S, H // 2, 3, 3 * H * FLOAT, heads=2)],
    ),
    "experts": (
        lambda: Layer(lambda m, x: torch.bmm(x.flatten(0, 1).expand(3, -1, -1), m.w), w=(3, H, 2)),
        [Product("", "linear", S, H, 2, 6 * H * FLOAT, heads=3)],
    ),
    "fused attention": (
        lambda: Layer(fused),
        [Product("scores", "attention", S, H // 2, S, heads=2), Product("values", "attention", S, S, 4, heads=2)],
    ),
    "explicit attention": (
        lambda: Layer(explicit),
        [Product("attention", "attention", S, H // 2, S, heads=2), Product("attention", "attention", S, S, 2, heads=2)],
    ),
    "fewer keys than queries": (
        lambda: Layer(
            lambda _, x: functional.scaled_dot_product_attention(split(x), split(x)[:, :, :3], split(x)[:, :, :3])
        ),
        [Product("scores", "attention", S, 4, 3, heads=2), Product("values", "attention", S, 3, 4, heads=2)],
    ),
    "samples times samples": (
        lambda: Layer(lambda _, x: x.flatten(1) @ x.flatten(1).t()),
        [Product("attention", "attention", 1, S * H, 4)],
    ),
    "two weights": (
        lambda: Layer(lambda m, x: functional.linear(x, m.a @ m.b), a=(3, 2), b=(2, H)),
        [Product("", "once", 3, 2, H, 2 * H * FLOAT), Product("attention", "attention", S, H, 3)],
    ),
    "a batch that is none of samples": (
        lambda: Layer(lambda _, x: torch.bmm(x[0, :, :3].expand(3, -1, -1), x[0, :3].expand(3, -1, -1))),
        [Product("attention", "once", S, 3, H, heads=3)],
    ),
    "convolution": (
        lambda: nn.Conv1d(S, 6, 3, stride=2, padding="valid"),
        [Product("", "conv", 3, S * 3, 6, 6 * S * 3 * FLOAT, image=(S, H))],
    ),
    "groups": (
        lambda: Layer(lambda m, x: functional.conv1d(x[:, :4], m.w, groups=2), w=(6, 2, 3)),
        [Product("", "conv", 6, 2 * 3, 3, 6 * 2 * 3 * FLOAT, heads=2, image=(4, H))],
    ),
    "a transposed convolution": (
        lambda: Layer(lambda m, x: functional.conv_transpose1d(x[:, :4], m.w, stride=3, groups=2), w=(4, 7, 3)),
        [Product("", "conv", H, 2, 7 * 3, 4 * 7 * 3 * FLOAT, heads=2)],
    ),
    "a convolution with a kernel that is none of a weight": (
        lambda: Layer(lambda _, x: functional.conv1d(x, x[:3, :, :3])),
        [Product("conv", "conv", 6, S * 3, 3, image=(S, H))],
    ),
    "a convolution of several images of a sample": (
        lambda: Layer(lambda m, x: functional.conv1d(x.reshape(-1, 1, H), m.w), w=(3, 1, 2)),
        [Product("", "conv", S * (H - 1), 2, 3, 3 * 2 * FLOAT)],
    ),
    "no product": (lambda: nn.Sequential(nn.LayerNorm(H), nn.GELU()), []),
}


def found(layer: Callable[[], nn.Module], shape: tuple[int, ...], task: str = "", **options: str) -> list[Product]:
    """Counted, which must be what is measured."""
    net = Net(lambda: nn.Sequential(layer()), shape, task)
    (counted,) = count(net, 4, "float32", **options).layers
    (measured,) = measure(net, 4, "float32", "cpu", 1, **options).layers
    assert counted.products == measured.products
    assert sum(product.flops(4) for product in counted.products) == counted.flops == measured.flops
    return list(counted.products)


@pytest.mark.parametrize("case", CASES)
def test_products_by_hand(case):
    layer, expected = CASES[case]
    assert found(layer, (S, H)) == expected
    assert found(layer, (S, H), autocast="bfloat16") == expected


def test_a_layer_used_twice_has_two_products():
    outer, inner = Product("outer", "linear", 1, 4, 4, 64), Product("inner.0", "linear", 1, 4, 4, 64)
    assert found(Twice, (4,)) == found(Twice, (4,), autocast="bfloat16") == [outer, inner, outer]


def forgetful(m: nn.Module, x: Tensor) -> Tensor:
    """Casts a weight for nothing, again and again; between that, products of activations as large come and go."""
    for _ in range(5):
        m.w.double()
        x = (x.double() @ x.double().transpose(1, 2)).float()
    return x


def test_what_comes_to_lie_where_a_copy_of_a_weight_was_is_none():
    products = found(lambda: Layer(forgetful, w=(5, 5)), (5, 5))
    assert products == [Product("attention", "attention", 5, 5, 5)] * 5


def test_tables():
    """Each sample looks up its own tokens and all places."""
    tokens, places = Product("tokens", "embedding", 5, 11, 6, 264), Product("places", "embedding", 5, 5, 6, 120)
    assert found(Places, (5,), "text") == [tokens, places]
    assert found(lambda: nn.Embedding(11, 6), (5,), "text") == [Product("", "embedding", 5, 11, 6, 264)]


@settings(max_examples=examples(30))
@given(
    samples=st.integers(1, 4), heads=st.integers(1, 3), queries=st.integers(1, 5), keys=st.integers(1, 5),
    size=st.integers(1, 9), causal=st.booleans(),
)  # fmt: skip
def test_attention_has_the_flops_of_its_two_products(samples, heads, queries, keys, size, causal):
    """torch's counter knows no fused kernel of the CPU, so it counts the explicit one."""

    def attend(_: nn.Module, x: Tensor) -> Tensor:
        x = x[:, :, None].expand(-1, -1, max(queries, keys), -1)
        return functional.scaled_dot_product_attention(
            x[:, :, :queries], x[:, :, :keys], x[:, :, :keys], is_causal=causal
        )

    (layer,) = count(Net(lambda: nn.Sequential(Layer(attend)), (heads, size)), samples, "float32").layers
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        attend(nn.Module(), torch.ones(samples, heads, size))
    assert layer.flops == counter.get_total_flops() == sum(product.flops(samples) for product in layer.products)
    assert layer.elementwise_bytes == 0
    assert [product.name for product in layer.products] == ["scores", "values"]


@settings(max_examples=examples(30))
@given(
    samples=st.integers(1, 4), groups=st.integers(1, 3), inside=st.integers(1, 3), outside=st.integers(1, 3),
    kernel=st.integers(1, 3), stride=st.integers(1, 3), transposed=st.booleans(),
)  # fmt: skip
def test_convolutions_have_the_flops_of_their_product(samples, groups, inside, outside, kernel, stride, transposed):
    made = nn.ConvTranspose2d if transposed else nn.Conv2d
    net = Net(
        lambda: nn.Sequential(made(groups * inside, groups * outside, kernel, stride, groups=groups)),
        (groups * inside, 5, 6),
    )
    (layer,) = count(net, samples, "float32").layers
    with FlopCounterMode(display=False) as counter:
        net.layers()(torch.ones(samples, *net.input_shape))
    (product,) = layer.products
    assert product.flops(samples) == layer.flops == counter.get_total_flops()
    assert (product.kind, product.heads, product.in_ * product.out * groups * FLOAT) == (
        "conv", groups, product.weight_bytes
    )  # fmt: skip
