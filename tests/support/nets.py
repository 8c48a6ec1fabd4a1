"""Little models for the tests of counting and profiling: skips, tuples, integers, tied weights, attention."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.interfaces import Batch
from harness.nn.dropout import Dropout
from harness.nn.skip import Skippable


class Net:
    """A model of given layers; its samples are normal numbers, or token numbers for task "text"."""

    classes = 0

    def __init__(self, make: Callable[[], nn.Sequential], shape: tuple[int, ...], task: str = "segmentation") -> None:
        self.make, self.input_shape, self.task, self.name = make, shape, task, "net"

    def layers(self) -> nn.Sequential:
        return self.make()

    def sample(self, n: int) -> Batch:
        shape = (n, *self.input_shape)
        inputs = torch.randint(11, shape) if self.task == "text" else torch.randn(shape)
        return Batch(inputs, torch.zeros(n))

    def loss(self, output: Tensor | tuple[Tensor, ...], target: Tensor) -> Tensor:
        return (output if isinstance(output, Tensor) else output[0]).square().sum()


class Remember(Skippable):
    stashes = ("shortcut",)

    def forward(self, x: Tensor) -> Tensor:
        self.stash("shortcut", x)
        return x


class Join(Skippable):
    pops = ("shortcut",)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.pop("shortcut")], dim=1)


class Fork(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x.relu(), x, x.detach()


class Cell(nn.Module):
    """(now, before, unused) -> (next, now, before): two tensors that matter, one without gradient."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.now, self.before = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, value: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        now, before, _ = value
        return torch.tanh(self.now(now) + self.before(before)), now, before


class TiedHead(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight)


def images() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), Dropout(0.5, channels=True), nn.InstanceNorm2d(8),
        nn.LeakyReLU(0.01), Remember(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8),
        nn.ReLU(inplace=True), nn.Sequential(nn.Dropout(0.0), nn.Conv2d(8, 8, 1), nn.ReLU(inplace=True)),
        nn.Upsample(scale_factor=2), Join(), nn.Conv2d(16, 1, 1), nn.Sigmoid(),
    )  # fmt: skip


def pairs() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), Fork(), Cell(6), Cell(6), Cell(6))


def text() -> nn.Sequential:
    embedding = nn.Embedding(11, 6)
    return nn.Sequential(
        embedding, nn.LayerNorm(6), nn.Linear(6, 6), nn.GELU(), Dropout(0.1), TiedHead(embedding.weight)
    )


def flat_first() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.Identity(), nn.Linear(4, 2))


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(x, x, x, is_causal=True)


def attention() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), Attention(), nn.Conv1d(5, 5, 3), nn.ConvTranspose1d(5, 4, 3))


NETS = {
    "images": Net(images, (3, 16, 16)),
    "pairs": Net(pairs, (6,)),
    "text": Net(text, (5,), "text"),
    "flat first": Net(flat_first, (3, 4)),
    "attention": Net(attention, (5, 8)),
}
