"""What each product reads, by hand: on tensors without memory and on real ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.products import INPUT, Read
from harness.measure.count_model import count
from harness.measure.profile_model import measure
from harness.nn.dropout import Dropout
from tests.engines import zoo
from tests.support.nets import Net

MIXED = Read()
ALONE = Read((INPUT,), 0)


class Layer(nn.Module):
    """Computes `run(self, x)` with linear layers of the sizes given, and an RMS norm."""

    def __init__(self, run: Callable[[nn.Module, Tensor], Tensor], **sizes: tuple[int, int]) -> None:
        super().__init__()
        self.run, self.norm, self.dropout = run, nn.RMSNorm(8), Dropout(0.5)
        for name, (inputs, outputs) in sizes.items():
            self.add_module(name, nn.Linear(inputs, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def reads(layer: Callable[[], nn.Module], shape: tuple[int, ...] = (5, 8)) -> list[Read]:
    """Counted, which must be what is measured, of one sample or of several, with and without autocast."""
    net = Net(lambda: nn.Sequential(layer()), shape)
    (counted,) = count(net, 4, "float32").layers
    for other in (
        count(net, 1, "float32"),
        count(net, 4, "float32", "bfloat16"),
        measure(net, 4, "float32", "cpu", 1),
    ):
        assert other.layers[0].reads == counted.reads
    return list(counted.reads)


CASES: dict[str, tuple[Callable[[nn.Module, Tensor], Tensor], dict[str, tuple[int, int]], list[Read]]] = {
    "one product": (lambda m, x: m.a(x), {"a": (8, 4)}, [ALONE, Read((0,), 1)]),
    "two of one tensor": (
        lambda m, x: m.a(x) * m.b(x.flatten(0, 1)).view(len(x), -1, 4), {"a": (8, 4), "b": (8, 4)},
        [ALONE, ALONE, Read((0, 1), 2)],
    ),
    "two of equal tensors": (
        lambda m, x: m.a(x) * m.b(x + 0), {"a": (8, 4), "b": (8, 4)}, [ALONE, Read((INPUT,), 1), Read((0, 1), 2)]
    ),
    "a copy changed in place": (
        lambda m, x: m.a(x) + m.b(x.clone().tanh_()), {"a": (8, 8), "b": (8, 8)},
        [ALONE, Read((INPUT,), 1), Read((0, 1), 2)],
    ),
    "a norm, dropout and a function": (
        lambda m, x: m.a(functional.gelu(m.dropout(m.norm(x)))), {"a": (8, 4)}, [ALONE, Read((0,), 1)]
    ),
    "a norm by hand": (lambda m, x: m.a(x / x.norm(dim=-1, keepdim=True)), {"a": (8, 4)}, [MIXED, Read((0,), 1)]),
    "a norm of tokens": (
        lambda m, x: m.a(x - x.mean(1, keepdim=True)), {"a": (8, 4)}, [ALONE, Read((0,), 1)]
    ),
    "a norm of heads": (
        lambda m, x: m.a(functional.rms_norm(x.unflatten(-1, (2, 4)), (4,)).flatten(-2)), {"a": (8, 4)},
        [MIXED, Read((0,), 1)],
    ),
    "as many columns, of half as many": (
        lambda m, x: m.a(torch.cat((x[..., 4:], x[..., :4]), -1)), {"a": (8, 4)}, [MIXED, Read((0,), 1)]
    ),
    "columns there and back": (
        lambda m, x: m.a(x.unflatten(-1, (2, 4)).transpose(-1, -2).tanh().transpose(-1, -2).flatten(-2)),
        {"a": (8, 4)}, [ALONE, Read((0,), 1)],
    ),
    "columns that stay elsewhere": (
        lambda m, x: m.a(x.unflatten(-1, (2, 4)).transpose(-1, -2).flatten(-2)), {"a": (8, 4)}, [MIXED, Read((0,), 1)]
    ),
    "a sum with another order": (lambda m, x: m.a(x + x.flip(-1)), {"a": (8, 4)}, [MIXED, Read((0,), 1)]),
    "one column for all": (lambda m, x: m.a(x * x[..., :1]), {"a": (8, 4)}, [MIXED, Read((0,), 1)]),
    "tokens as columns": (lambda m, x: m.a(x.transpose(1, 2)), {"a": (5, 4)}, [MIXED, Read((0,), 1)]),
    "a part of the output": (lambda m, x: m.a(x)[..., :4], {"a": (8, 8)}, [ALONE, MIXED]),
    "fewer tokens": (lambda m, x: m.a(x[:, ::2]), {"a": (8, 8)}, [ALONE, Read((0,), 1)]),
}  # fmt: skip
"""What is done with which linear layers, what each of them reads, and what the layer gives."""


@pytest.mark.parametrize("case", CASES)
def test_reads_by_hand(case: str) -> None:
    run, sizes, expected = CASES[case]
    found = reads(lambda: Layer(run, **sizes))
    assert found == expected


def block(name: str) -> LayerProfile:
    return next(layer for layer in count(zoo.model(name), 3, "float32").layers if layer.name == "block_0")


@pytest.mark.parametrize("name", ["gpt", "gpt with dropout, untied"])
def test_a_block_of_gpt(name: str) -> None:
    """Fused attention and that of two products."""
    after, whole = (INPUT, 3), (INPUT, 3, 5)
    scores = Read((0,), heads=2)
    assert block(name).reads == (
        ALONE, scores, scores, Read((0,), 3), Read(after, 4), Read((4,), 5), Read(whole, 6)
    )  # fmt: skip


def test_a_block_of_llama() -> None:
    """Query, key and value read one tensor, gate and up another one; four heads of queries have two of keys."""
    heads, after = Read((0, 1, 2), heads=2), Read((INPUT, 5), 6)
    assert block("llama").reads == (
        ALONE, ALONE, ALONE, heads, heads, Read((0, 1, 2), 5), after, after, Read((6, 7), 8), Read((INPUT, 5, 8), 9),
    )  # fmt: skip


LAYERS: dict[str, tuple[Callable[[], nn.Module], Read]] = {
    "softmax": (lambda: nn.Softmax(-1), MIXED),
    "softmax of tokens": (lambda: nn.Softmax(1), ALONE),
    "norm": (lambda: nn.LayerNorm(8), ALONE),
    "norm of tokens and columns": (lambda: nn.LayerNorm((5, 8)), MIXED),
    "gated": (lambda: nn.GLU(), MIXED),
    "attention without heads": (lambda: Layer(lambda m, x: functional.scaled_dot_product_attention(x, x, x)), MIXED),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_without_weights(name: str) -> None:
    layer, expected = LAYERS[name]
    assert reads(layer)[-1] == expected


def test_nobody_knows_of_images_and_of_several_tensors() -> None:
    assert reads(lambda: nn.Conv2d(3, 3, 1), (3, 4, 4)) == []
    assert not any(layer.reads for layer in count(zoo.model("amoebanet"), 2, "float32").layers[:3])


def test_tokens_have_no_columns() -> None:
    net = Net(lambda: nn.Sequential(nn.Identity(), nn.Embedding(11, 6)), (5,), "text")
    assert [layer.reads for layer in count(net, 2, "float32").layers] == [(), (MIXED, Read((0,), 1))]


def test_a_profile_keeps_them(tmp_path: Path) -> None:
    profile = count(zoo.model("llama"), 2, "float32")
    profile.save(tmp_path / "profile.json")
    assert ModelProfile.load(tmp_path / "profile.json") == profile
