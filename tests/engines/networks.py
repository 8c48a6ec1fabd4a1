"""Small networks for tests, each with what breaks a careless engine: skips, pairs, tokens, batch norm, dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.interfaces import Batch
from harness.nn.dropout import Dropout
from harness.nn.skip import Skippable, Stash
from harness.runtime.values import tensors_of


class Network:
    """A `harness.interfaces.Model` made of a few layers."""

    task = "test"
    classes = 0

    def __init__(self, name: str, layers: Callable[[], list[nn.Module]], inputs: Callable[[int], Any],
                 targets: Callable[[int], Any], loss: Callable[[Any, Any], Tensor]) -> None:  # fmt: skip
        self.name = name
        self._layers, self._inputs, self._targets, self._loss = layers, inputs, targets, loss
        self.input_shape = tuple(tensors_of(inputs(1))[0].shape[1:])

    def layers(self) -> nn.Sequential:
        return nn.Sequential(*self._layers())

    def sample(self, n: int) -> Batch:
        return Batch(self._inputs(n), self._targets(n))

    def loss(self, output: Any, target: Any) -> Tensor:
        return self._loss(output, target)


class Recall(Skippable):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.pops = (name,)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.5 * self.pop(self.pops[0])


class Split(nn.Module):
    """x -> (x, x / 2)."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x / 2


class Cell(nn.Module):
    """A pair to a pair, as between AmoebaNet's cells."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, previous = pair
        return torch.tanh(self.left(x) + self.right(previous)), x


class Merge(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] + pair[1]


def _squares(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).flatten(1).mean(1).sum()


def _tokens(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum") / target.size(1)


def skips() -> Network:
    """Nested and crossing skips of different lengths, with dropout."""

    def layers() -> list[nn.Module]:
        return [
            Stash("a"), nn.Linear(6, 6), Dropout(0.3), Stash("b"), nn.Tanh(), nn.Linear(6, 6), Stash("c"),
            Recall("a"), nn.Linear(6, 6), nn.Tanh(), Recall("c"), nn.Linear(6, 6), Recall("b"), nn.Linear(6, 3),
        ]  # fmt: skip

    return Network("skips", layers, lambda n: torch.randn(n, 6), lambda n: torch.randn(n, 3), _squares)


class Relay(Skippable):
    """Uses a skip, and passes it on as another one."""

    def __init__(self, taken: str, given: str) -> None:
        super().__init__()
        self.pops, self.stashes = (taken,), (given,)
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.pop(self.pops[0])
        self.stash(self.stashes[0], skip)
        return torch.tanh(self.left(x) + self.right(skip))


def relayed() -> Network:
    """One skip from layer to layer, as a decoder's blocks hand on the encoder's output; also in a layer in a layer."""

    def layers() -> list[nn.Module]:
        return [
            nn.Linear(6, 6), Stash("a"), nn.Linear(6, 6), Relay("a", "b"), nn.Tanh(), Relay("b", "c"),
            nn.Linear(6, 6), nn.Sequential(nn.Tanh(), Relay("c", "d")), nn.Linear(6, 6), Recall("d"), nn.Linear(6, 3),
        ]  # fmt: skip

    return Network("relayed", layers, lambda n: torch.randn(n, 6), lambda n: torch.randn(n, 3), _squares)


def pairs() -> Network:
    """Pairs of tensors between layers."""

    def layers() -> list[nn.Module]:
        return [nn.Linear(4, 4), Split(), Cell(4), Cell(4), Cell(4), Merge(), Dropout(0.2), nn.Linear(4, 2)]

    return Network("pairs", layers, lambda n: torch.randn(n, 4), lambda n: torch.randn(n, 2), _squares)


def tokens() -> Network:
    """Integers into the first layer."""

    def layers() -> list[nn.Module]:
        return [nn.Embedding(11, 8), Dropout(0.1), nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 11)]

    def draw(n: int) -> Tensor:
        return torch.randint(11, (n, 5))

    return Network("tokens", layers, draw, draw, _tokens)


class Padded(Skippable):
    """Zeros where a skip of integers is 0."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.pops = (name,)

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.pop(self.pops[0]) > 0)[..., None]


def padded() -> Network:
    """Integers as skips, and numbers that are one, too: padding masks, as attention has them."""

    def layers() -> list[nn.Module]:
        return [
            Stash("a"), Stash("b"), nn.Embedding(11, 6), Stash("c"), nn.Linear(6, 6), nn.GELU(), Padded("a"),
            nn.Linear(6, 6), Padded("b"), Recall("c"), nn.Linear(6, 11),
        ]  # fmt: skip

    def draw(n: int) -> Tensor:
        return torch.randint(11, (n, 5))

    return Network("padded", layers, draw, draw, _tokens)


class Detached(Skippable):
    """Looks at a skip of numbers, and gives it no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.pops = ("a",)

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(self.pop("a") > 0, x, -x)


def detached() -> Network:
    """A skip of numbers that gets no gradient."""

    def layers() -> list[nn.Module]:
        return [nn.Linear(6, 6), Stash("a"), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), Detached(), nn.Linear(6, 3)]

    return Network("detached", layers, lambda n: torch.randn(n, 6), lambda n: torch.randn(n, 3), _squares)


def norms() -> Network:
    """Batch norm, also in the first and the last stage."""

    def layers() -> list[nn.Module]:
        return [
            nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), Dropout(0.2, channels=True),
            nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),
            nn.Linear(64, 5), nn.BatchNorm1d(5),
        ]  # fmt: skip

    return Network("norms", layers, lambda n: torch.randn(n, 2, 4, 4), lambda n: torch.randn(n, 5), _squares)


def shared() -> Network:
    """A layer without parameters in several places, a tied weight, layers in place, a frozen layer."""

    def layers() -> list[nn.Module]:
        tanh, tied, frozen = nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 5)
        frozen.requires_grad_(False)
        return [
            nn.ReLU(inplace=True), tied, tanh, frozen, nn.ReLU(inplace=True), nn.Linear(5, 5), tanh, tied, tanh,
            nn.Linear(5, 2),
        ]  # fmt: skip

    return Network("shared", layers, lambda n: torch.randn(n, 5), lambda n: torch.randn(n, 2), _squares)


class Unembedding(nn.Module):
    """Logits of the tokens, by the embedding's own weight."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight)


class Rotary(nn.Module):
    """An activation with a cache, as of rotary embeddings, that other layers may share."""

    def __init__(self, cache: Tensor, persistent: bool = True) -> None:
        super().__init__()
        self.register_buffer("cache", cache, persistent)

    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(x) * self.cache


def tied() -> Network:
    """Integers in, and a head with the embedding's weight; in between a layer that stands in two places, and a cache
    that two layers share."""

    def layers() -> list[nn.Module]:
        embedding, twice = nn.Embedding(11, 8), nn.Linear(8, 8)
        cache = torch.arange(8.0).cos()
        return [
            embedding, twice, Rotary(cache), nn.LayerNorm(8), Dropout(0.1), twice, Rotary(cache),
            Unembedding(embedding.weight),
        ]  # fmt: skip

    def draw(n: int) -> Tensor:
        return torch.randint(11, (n, 5))

    return Network("tied", layers, draw, draw, _tokens)


class AsComplex(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.complex(x, 2 * x)


class AsReal(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.real * x.imag


def complexes() -> Network:
    """Complex numbers between its layers."""
    return Network("complexes", lambda: [nn.Linear(4, 4), AsComplex(), AsReal(), nn.Linear(4, 2)],
                   lambda n: torch.randn(n, 4), lambda n: torch.randn(n, 2), _squares)  # fmt: skip


class Sides(nn.Module):
    """A pair to the output and the size of the other tensor: a model with two outputs."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return pair[0], pair[1].square().sum(1)


def outputs() -> Network:
    """Two outputs, both in the loss."""

    def loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        return _squares(output[0], target) + output[1].sum()

    def layers() -> list[nn.Module]:
        return [nn.Linear(4, 4), Split(), Cell(4), Sides()]

    return Network("outputs", layers, lambda n: torch.randn(n, 4), lambda n: torch.randn(n, 4), loss)


class Ways(nn.Module):
    """Takes one of its layers, by the values of its input: replicas use other weights each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ways = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.ways[int(1000 * float(x.detach().sum().abs())) % 3](x)
        return found


def ways() -> Network:
    """Chooses by values what it computes."""
    return Network("ways", lambda: [nn.Linear(4, 6), Ways(6), nn.Tanh(), Ways(6), nn.Linear(6, 2)],
                   lambda n: torch.randn(n, 4), lambda n: torch.randn(n, 2), _squares)  # fmt: skip


ALL = {network.name: network for network in (skips(), pairs(), tokens(), norms(), shared(), tied())}
