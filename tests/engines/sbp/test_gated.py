"""Gated products, heads in other orders, and columns that are mixed, of models that this project has not got: what can
be split is, and trains as `single` does; what cannot is kept whole, in every plan."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from engines.sbp.block_layout import Mesh
from engines.sbp.instruction import Unrunnable
from engines.sbp.program import program
from harness.interfaces import Batch
from harness.measure.count_model import count
from harness.nn.skip import Sum
from harness.sbp.device_grid import Grid
from harness.sbp.matmul_chain import chain_from_profile
from harness.sbp.route_to_plan import grid_from_plan
from tests.support.sbp_plans import costs_of, drawn, flat, with_strategies
from tests.support.sbp_runs import Run, check

pytestmark = pytest.mark.usefixtures("ranks")

WIDTH, HIDDEN, TOKENS, WORDS, SAMPLES = 8, 12, 5, 6, 4
BY_SAMPLES, BY_OUTPUTS, BY_INPUTS = (Grid(1, 2).strategy(numbers) for numbers in ((2, 1, 1), (1, 2, 1), (1, 1, 2)))


class Inner(nn.Module):
    """Computes `run(self, x)` with linear layers of the sizes given."""

    def __init__(self, run: Callable[[nn.Module, Tensor], Tensor], **sizes: tuple[int, int]) -> None:
        super().__init__()
        self.run = run
        for name, (inputs, outputs) in sizes.items():
            self.add_module(name, nn.Linear(inputs, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


class Branch(nn.Module):
    """A residual branch with a norm at its head."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner, self.sum = nn.RMSNorm(WIDTH), inner, Sum()

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.sum(x, self.inner(self.norm(x)))
        return added


class Text:
    """A branch between an embedding and a head. Implements `harness.interfaces.Model`."""

    task, input_shape, classes = "text", (TOKENS,), WORDS

    def __init__(self, name: str, make: Callable[[], nn.Module]) -> None:
        self.name, self.make = name, make

    def layers(self) -> nn.Sequential:
        return nn.Sequential(nn.Embedding(WORDS, WIDTH), self.make(), nn.Linear(WIDTH, WORDS))

    def sample(self, n: int) -> Batch:
        return Batch(torch.randint(WORDS, (n, TOKENS)), torch.randint(WORDS, (n, TOKENS)))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")


def heads(x: Tensor, width: int = 4) -> Tensor:
    return x.unflatten(-1, (-1, width)).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return joined(functional.scaled_dot_product_attention(query, key, value, is_causal=True))


def separate(m: nn.Module, x: Tensor) -> Tensor:
    return m.down(functional.silu(m.gate(x)) * m.up(x))


def halves(m: nn.Module, x: Tensor) -> Tensor:
    gate, up = m.both(x).chunk(2, -1)
    return m.down(functional.silu(gate) * up)


def in_turns(m: nn.Module, x: Tensor) -> Tensor:
    gate, up = m.both(x).unflatten(-1, (-1, 2)).unbind(-1)
    return m.down(functional.silu(gate) * up)


def turned_over(m: nn.Module, x: Tensor) -> Tensor:
    """The second factor's columns in another order."""
    return m.down(functional.silu(m.gate(x)) * m.up(x).flip(-1))


def transposed(m: nn.Module, x: Tensor) -> Tensor:
    """The same by views and a copy alone."""
    return m.down(m.gate(x).unflatten(-1, (3, -1)).transpose(-1, -2).flatten(-2) * m.up(x))


def of_two_inputs(m: nn.Module, x: Tensor) -> Tensor:
    """The factors read different tensors."""
    return m.down(functional.silu(m.gate(x)) * m.up(x.tanh()))


def twice(m: nn.Module, x: Tensor) -> Tensor:
    """Both factors from one weight."""
    return m.down(functional.silu(m.up(x)) * m.up(x))


def one_after_the_other(m: nn.Module, x: Tensor) -> Tensor:
    return m.same(m.same(x).relu())


def hidden_norm(m: nn.Module, x: Tensor) -> Tensor:
    """A norm over the hidden features that is written by hand."""
    y = functional.silu(m.gate(x)) * m.up(x)
    return m.down(y * (y.square().mean(-1, keepdim=True) + 1e-5).rsqrt())


def softmaxed(m: nn.Module, x: Tensor) -> Tensor:
    return m.down(m.up(x).softmax(-1))


def repeated(m: nn.Module, x: Tensor) -> Tensor:
    """Grouped queries by copies of keys and values; with rotated halves of each head, and a norm of it."""
    query, key, value = heads(m.query(x)), heads(m.key(x)), heads(m.value(x))
    query = query * (query.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    query = query + torch.cat((-query[..., 2:], query[..., :2]), -1)
    copies = query.shape[1] // key.shape[1]
    return m.projection(attend(query, *(one.repeat_interleave(copies, 1) for one in (key, value))))


def complex_numbers(m: nn.Module, x: Tensor) -> Tensor:
    """Rotary embedding as Meta writes it, and attention by two matmuls."""
    query, key, value = heads(m.query(x)), heads(m.key(x)), heads(m.value(x))
    angles = torch.outer(torch.arange(x.shape[1]), torch.tensor([1.0, 0.1])).to(x.dtype)
    turns = torch.polar(torch.ones_like(angles), angles)
    query, key = (
        torch.view_as_real(torch.view_as_complex(one.unflatten(-1, (-1, 2))) * turns).flatten(-2)
        for one in (query, key)
    )
    return m.projection(joined((query @ key.transpose(2, 3) / 2).softmax(-1) @ value))


def copies_in_turns(m: nn.Module, x: Tensor) -> Tensor:
    """Head h reads keys h modulo the number of keys, not those of its neighbours."""
    query, key, value = heads(m.query(x)), heads(m.key(x)), heads(m.value(x))
    return m.projection(attend(query, *(one.repeat(1, query.shape[1] // key.shape[1], 1, 1) for one in (key, value))))


def heads_of_three(m: nn.Module, x: Tensor) -> Tensor:
    """Query, key and value of a head next to each other, as in GPT-NeoX."""
    return m.projection(attend(*heads(m.qkv(x), 12).chunk(3, -1)))


def heads_of_four(m: nn.Module, x: Tensor) -> Tensor:
    """Four parts, of which the first one gates what attention gives."""
    gate, *parts = m.parts(x).chunk(4, -1)
    return m.projection(attend(*map(heads, parts)) * gate)


FFN = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
BOTH = {"both": (WIDTH, 2 * HIDDEN), "down": (HIDDEN, WIDTH)}
GROUPED = {"query": (WIDTH, 16), "key": (WIDTH, 8), "value": (WIDTH, 8), "projection": (16, WIDTH)}
ONE = {"query": (WIDTH, 16), "key": (WIDTH, 4), "value": (WIDTH, 4), "projection": (16, WIDTH)}
THREE = {"query": (WIDTH, 8), "key": (WIDTH, 8), "value": (WIDTH, 8), "projection": (8, WIDTH)}
Case = tuple[Callable[[nn.Module, Tensor], Tensor], dict[str, tuple[int, int]], str]
SPLIT: dict[str, Case] = {
    "gate and up": (separate, FFN, "gate+up"),
    "copies of keys": (repeated, GROUPED, "query+key+value"),
    "copies of one key": (repeated, ONE, "query+key+value"),
    "complex numbers": (complex_numbers, THREE, "query+key+value"),
}
"""What is done with linear layers, and the matmul that several of them are."""
WHOLE: dict[str, Case] = {
    "halves": (halves, BOTH, "both"),
    "in turns": (in_turns, BOTH, "both"),
    "turned over": (turned_over, FFN, "gate"),
    "transposed": (transposed, FFN, "gate"),
    "of two inputs": (of_two_inputs, FFN, "gate"),
    "twice": (twice, {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}, "up"),
    "one after the other": (one_after_the_other, {"same": (WIDTH, WIDTH)}, "same"),
    "a norm by hand": (hidden_norm, FFN, "gate"),
    "softmax": (softmaxed, {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}, "up"),
    "copies in turns": (copies_in_turns, GROUPED, "query"),
    "heads of three": (heads_of_three, {"qkv": (WIDTH, 24), "projection": (8, WIDTH)}, "qkv"),
    "heads of four": (heads_of_four, {"parts": (WIDTH, 32), "projection": (8, WIDTH)}, "parts"),
}
"""The same of what no block of columns can be computed by itself, and its first matmul."""
LONE: dict[str, Callable[[], nn.Module]] = {
    "a gate alone": lambda: nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GLU()),
    "a norm by hand alone": lambda: Inner(lambda m, x: m.up(x / x.norm(dim=-1, keepdim=True)), up=(WIDTH, WIDTH)),
    "added to its input": lambda: Inner(lambda m, x: x + m.up(x), up=(WIDTH, WIDTH)),
}
"""Layers with one matmul that does more than the matmul."""


def split(model: Text) -> None:
    """Trains with matmuls split by outputs and by inputs in turn, where they can be."""
    profile, runs = count(model, SAMPLES, "float64"), []
    for first, second in ((BY_OUTPUTS, BY_INPUTS), (BY_INPUTS, BY_OUTPUTS), (BY_OUTPUTS, BY_OUTPUTS)):
        costs = costs_of(profile, flat(2), 1)
        given = {
            item.name: next(one for one in (first, second, BY_SAMPLES) if one in costs.strategies(item))
            if number % 2 else next(one for one in (second, first, BY_SAMPLES) if one in costs.strategies(item))
            for number, item in enumerate(chain_from_profile(profile).matmuls)
        }  # fmt: skip
        runs.append(Run(model, with_strategies(profile, flat(2), given, "free"), SAMPLES, steps=2))
    check(runs)


@pytest.mark.parametrize("name", SPLIT)
def test_what_works_column_by_column_is_split(name: str) -> None:
    run, sizes, together = SPLIT[name]
    model = Text(name, lambda: Branch(Inner(run, **sizes)))
    names = {item.name: item.whole for item in chain_from_profile(count(model, SAMPLES, "float64")).matmuls}
    last = list(sizes)[-1]
    assert names == {"0": False, f"1.inner.{together}": False, f"1.inner.{last}": False, "2": False}
    split(model)


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize("name", WHOLE)
def test_what_does_not_is_kept_whole(name: str) -> None:
    run, sizes, _ = WHOLE[name]
    model = Text(name, lambda: Branch(Inner(run, **sizes)))
    names = {item.name: item.whole for item in chain_from_profile(count(model, SAMPLES, "float64")).matmuls}
    assert names == {"0": False, **{f"1.inner.{key}": True for key in sizes}, "2": False}
    split(model)


@pytest.mark.parametrize("name", LONE)
def test_a_lone_matmul_in_a_layer_that_does_more_is_kept_whole(name: str) -> None:
    model = Text(name, LONE[name])
    wholes = [item.whole for item in chain_from_profile(count(model, SAMPLES, "float64")).matmuls]
    assert wholes == [False, True, False]
    split(model)


class Plain(Branch):
    """Its sum is no module."""

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = x + self.inner(self.norm(x))
        return added


def test_a_sum_that_nobody_can_move_is_refused_by_name() -> None:
    """A branch whose residual has to change its layout."""
    model = Text("no sum", lambda: Plain(Inner(separate, **FFN)))
    profile = count(model, SAMPLES, "float64")
    chain = chain_from_profile(profile)
    plans = [drawn(profile, 2, "free", 1, random.Random(seed)) for seed in range(20)]
    programs = [program(plan, chain, Mesh(grid_from_plan(plan))).instructions["1.inner.down"] for plan in plans]
    still, moved = (
        next(plan for plan, one in zip(plans, programs, strict=True) if bool(one.past or one.on) is moves)
        for moves in (False, True)
    )
    check([Run(model, still, SAMPLES)])
    with pytest.raises(Unrunnable, match=r"inner\.down: what is added to its output must go through a harness\.nn"):
        check([Run(model, moved, SAMPLES)])


@pytest.mark.parametrize("layer", [nn.Softmax(-1), nn.Flatten()], ids=["softmax", "flatten"])
def test_a_layer_that_mixes_columns_keeps_its_model_whole(layer: nn.Module) -> None:
    class Mixing(Text):
        def layers(self) -> nn.Sequential:
            tokens = 1 if isinstance(layer, nn.Softmax) else TOKENS
            return nn.Sequential(nn.Embedding(WORDS, WIDTH), layer, nn.Linear(tokens * WIDTH, WORDS))

        def loss(self, output: Tensor, target: Tensor) -> Tensor:
            return (output.square().flatten(1).mean(1) * target[:, 0]).sum()

    model = Mixing("mixing", nn.Identity)
    assert all(item.whole for item in chain_from_profile(count(model, SAMPLES, "float64")).matmuls)
    split(model)
