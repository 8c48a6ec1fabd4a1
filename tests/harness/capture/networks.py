"""Networks as people write them, each with an example: what a capture must get through."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

Example = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
NETWORKS: dict[str, Callable[[], Example]] = {}


def network(make: Callable[[], Example]) -> Callable[[], Example]:
    NETWORKS[make.__name__] = make
    return make


class Block(nn.Module):
    """A transformer's block that takes a mask."""

    def __init__(self, width: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = dropout

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=self.dropout if self.training else 0.0)
        x = x + F.dropout(self.out(a.transpose(1, 2).flatten(2)), self.dropout, self.training)
        return x + self.mlp(self.norm2(x))


class TinyGPT(nn.Module):
    """Positions and the causal mask are made in forward; the head is tied to the embedding."""

    def __init__(self, blocks: int = 4, width: int = 16, vocabulary: int = 30) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.size(1), device=ids.device)
        x = self.tokens(ids) + self.positions(places)
        mask = torch.ones(ids.size(1), ids.size(1), dtype=torch.bool, device=ids.device).tril()
        mask = mask[None, None].expand(ids.size(0), 1, -1, -1)
        for block in self.blocks:
            x = block(x, mask=mask)
        return self.head(self.norm(x))


@network
def tiny_gpt() -> Example:
    return TinyGPT(), (torch.randint(30, (3, 8)),), {}


class Double(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))))


class UNet(nn.Module):
    """Skips are local variables."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = Double(3, 8), Double(8, 16), Double(16, 16)
        self.up2, self.up1, self.out = Double(32, 8), Double(16, 8), nn.Conv2d(8, 1, 1)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        one = self.down1(x)
        two = self.down2(self.pool(one))
        x = self.middle(self.pool(two))
        x = self.up2(torch.cat([F.interpolate(x, scale_factor=2), two], 1))
        x = self.up1(torch.cat([F.interpolate(x, size=one.shape[-2:]), one], 1))
        return self.out(x)


@network
def unet() -> Example:
    return UNet(), (torch.randn(2, 3, 16, 16),), {}


class Functional(nn.Module):
    """Parameters and functions only."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [12, 256, 256, 256, 100]
        self.weights = nn.ParameterList(torch.randn(b, a) / a**0.5 for a, b in itertools.pairwise(sizes))
        self.bias = nn.Parameter(torch.zeros(100))

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(x.size(0), -1)
        for weight in self.weights[:-1]:
            x = F.dropout(F.relu(F.linear(x, weight)), 0.2, training=self.training)
        return F.linear(x, self.weights[-1]) + self.bias


@network
def functional() -> Example:
    return Functional(), (torch.randn(3, 3, 4),), {}


class Siamese(nn.Module):
    """One encoder, used twice; batch norm in it counts both uses."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
        self.head = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, left: Tensor, right: Tensor, scale: float = 1.0) -> Tensor:
        return scale * self.head(torch.cat([self.encoder(left), self.encoder(right)], -1))


@network
def siamese() -> Example:
    return Siamese(), (torch.randn(4, 6),), {"right": torch.randn(4, 6), "scale": 0.5}


@network
def torch_transformer() -> Example:
    model = nn.Transformer(16, 2, 2, 3, 32, dropout=0.1, batch_first=True)
    return model, (torch.randn(2, 5, 16), torch.randn(2, 7, 16)), {"tgt_mask": torch.ones(7, 7).triu(1).bool()}


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleList(nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
        seen = []
        for layer in self.attention:
            y, weights = layer(x, x, x, key_padding_mask=padding)
            x = x + y
            seen.append(weights)
        return self.head(x), seen


@network
def attention_with_weights() -> Example:
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True
    return Attending(), (torch.randn(2, 5, 8),), {"padding": padding}


class Scan(nn.Module):
    """A recurrence in Python, as of a state space model."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.decay = nn.Parameter(torch.rand(width))

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.inner(x).chunk(2, -1)
        state = x.new_zeros(x.size(0), x.size(2))
        states = []
        for place in range(x.size(1)):
            state = torch.sigmoid(self.decay) * state + value[:, place]
            states.append(state)
        return x + self.out(torch.stack(states, 1) * F.silu(gate))


@network
def scans() -> Example:
    return nn.Sequential(*(Scan() for _ in range(4)), nn.Linear(8, 3)), (torch.randn(2, 6, 8),), {}


class Cells(nn.Module):
    """A cell in a loop over the places of a text, at the top."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cell, self.head = nn.Embedding(20, 12), nn.LSTMCell(12, 12), nn.Linear(12, 20)

    def forward(self, ids: Tensor) -> Tensor:
        hidden, state = (torch.zeros(len(ids), 12, device=ids.device, dtype=self.head.weight.dtype) for _ in range(2))
        outs = []
        for token in self.embedding(ids).unbind(1):
            hidden, state = self.cell(token, (hidden, state))
            outs.append(self.head(hidden))
        return torch.stack(outs, 1)


@network
def cells() -> Example:
    return Cells(), (torch.randint(20, (2, 60)),), {}


class Counting(nn.Module):
    """Buffers that forward changes in place and replaces, a list that it fills, an attribute that it sets."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(6))
        self.seen: list[Tensor] = []
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.clear()
        for layer in self.layers:
            x = torch.tanh(layer(x))
            self.seen.append(x)
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
        self.last = x
        return x + self.seen[0] - self.mean


@network
def counting() -> Example:
    return Counting(), (torch.randn(3, 6),), {}


class Result(NamedTuple):
    logits: Tensor
    hidden: list[Tensor]


@dataclass
class State:
    hidden: Tensor
    scale: float


class Carry(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, state: State, *, options: dict[str, Any]) -> State:
        return State(state.hidden + self.inner(self.linear(state.hidden)) * options["gain"], state.scale)


class Nested(nn.Module):
    """Dictionaries as inputs, dataclasses between modules, a namedtuple as result."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Carry() for _ in range(3))
        self.head = nn.Linear(6, 2)

    def forward(self, inputs: dict[str, Any], gain: float | None = None) -> Result:
        state = State(inputs["x"] * inputs["mask"].unsqueeze(-1), 2.0)
        hidden = []
        for part in self.parts:
            state = part(state, options={"gain": 1.0 if gain is None else gain})
            hidden.append(state.hidden)
        return Result(self.head(state.hidden) * state.scale, hidden)


@network
def nested() -> Example:
    mask = torch.tensor([[True, False, True], [True, True, False]])
    return Nested(), ({"x": torch.randn(2, 3, 6), "mask": mask},), {"gain": None}


class Cache:
    """What some models hand from block to block."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []

    def update(self, key: Tensor) -> Tensor:
        self.keys.append(key)
        return torch.stack(self.keys).mean(0)


class CachedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.key, self.value = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        return x + F.dropout(torch.tanh(self.value(cache.update(self.key(x)))), 0.3, self.training)


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(CachedBlock() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        cache = Cache()
        for block in self.blocks:
            x = block(x, cache)
        return x


@network
def cached() -> Example:
    return Cached(), (torch.randn(3, 6),), {}


class Experts(nn.Module):
    """Which weights a sample uses depends on its values."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.gate(x).argmax(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero().squeeze(1)
            if len(rows):
                out[rows] = expert(x[rows])
        return x + out


class Spectral(nn.Module):
    """Changes buffers in training alone, in functions that see the weight of the module around them."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(spectral_norm(nn.Linear(6, 6)) for _ in range(3))
        self.last = weight_norm(nn.Linear(6, 2))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = torch.tanh(part(x))
        y: Tensor = self.last(x)
        return y


@network
def spectral() -> Example:
    return Spectral(), (torch.randn(5, 6),), {}


class Averaged(nn.Module):
    """A copy of weights follows them: their memory is replaced, which changes no version. The same to begin with."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.last = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for new, old in zip(self.online.parameters(), self.target.parameters(), strict=True):
                old.data = 0.5 * old.data + 0.5 * new.data
            wanted = self.target(x)
        y: Tensor = self.last(self.online(x))
        return y * wanted


@network
def averaged() -> Example:
    return Averaged(), (torch.randn(4, 6),), {}


class Balanced(Experts):
    """Experts that leave a loss in an attribute, which the network reads at its end, and a number that it does not."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.unread = x.detach().mean()
        self.balance = self.gate(x).softmax(-1).square().sum(-1)
        return super().forward(x)


class Mixture(nn.Module):
    """Sums what its experts leave."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), Balanced()) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for part in self.parts:
            x = torch.tanh(part(x))
        left: Tensor = sum(part[1].balance for part in self.parts)  # type: ignore[index, assignment]
        return x, left


@network
def mixture() -> Example:
    return Mixture(), (torch.randn(4, 6),), {}


@network
def experts() -> Example:
    return nn.Sequential(nn.Linear(6, 6), Experts(), Experts(), Experts(), nn.Linear(6, 2)), (torch.randn(5, 6),), {}


class Square(torch.autograd.Function):
    """A function of the user's whose backward pass is not that of its forward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x * grad


class Odd(nn.Module):
    """Its own backward pass, no_grad, finfo, a dtype and a device that it asks for, a constant from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.table = [torch.arange(6.0)]
        self.scale = torch.tensor(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = Square.apply(self.first(x))
        with torch.no_grad():
            norm = x.square().mean().sqrt()
        mask = torch.full((x.size(1), x.size(1)), torch.finfo(x.dtype).min, dtype=x.dtype, device=x.device).triu(1)
        mixed = torch.softmax(mask + x.unsqueeze(1), -1).sum(1) / norm
        mixed[:, 0] = mixed[:, 0] + 1
        return self.second(mixed + self.table[0].to(x) * self.scale) / math.sqrt(x.shape[-1]) / x.size(0)


@network
def odd() -> Example:
    return Odd(), (torch.randn(3, 6),), {}


class Views(nn.Module):
    """Views of one memory, changed after they were made."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        left, right = x[:, :4], x[:, 4:]
        y = self.layers[1](x.detach().clone())
        left.mul_(2)
        return self.layers[2](x + y) + torch.cat([right, left], 1)


@network
def views() -> Example:
    return Views(), (torch.randn(3, 8),), {}


class Dense(nn.Module):
    """Each layer gets the outputs of all before, in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4 + 4 * k, 4), nn.ReLU()) for k in range(5))
        self.head = nn.Linear(24, 2)

    def forward(self, x: Tensor) -> Tensor:
        seen = [x]
        for layer in self.layers:
            seen.append(layer(torch.cat(seen, 1)))
        return self.head(torch.cat(seen, 1))


@network
def dense() -> Example:
    return Dense(), (torch.randn(3, 4),), {}


@network
def shared_block() -> Example:
    block = Block(16)
    return nn.Sequential(nn.Linear(8, 16), *[block] * 6, nn.Linear(16, 2)), (torch.randn(2, 4, 8),), {}


@network
def recurrent() -> Example:
    class Text(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(20, 12), nn.Linear(12, 20)
            self.rnn = nn.LSTM(12, 12, 2, dropout=0.1, batch_first=True)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.rnn(self.embedding(ids))[0])

    return Text(), (torch.randint(20, (2, 7)),), {}


class TwoTexts(nn.Module):
    """An encoder and a decoder whose input no encoder layer uses: between them only skips are needed."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.encoder = nn.ModuleList(Block(16) for _ in range(3))
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(16, 2, 32, batch_first=True) for _ in range(3))
        self.head = nn.Linear(16, 20)

    def forward(self, both: Tensor) -> Tensor:
        source, target = both[:, :6], both[:, 6:]
        x = self.embedding(source)
        for block in self.encoder:
            x = block(x)
        y = self.embedding(target)
        mask = nn.Transformer.generate_square_subsequent_mask(y.size(1), device=y.device, dtype=y.dtype)
        for layer in self.decoder:
            y = layer(y, x, tgt_mask=mask)
        return self.head(y)


@network
def two_texts() -> Example:
    return TwoTexts(), (torch.randint(20, (2, 11)),), {}
