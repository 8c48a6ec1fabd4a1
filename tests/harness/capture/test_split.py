"""A chain computes what its module computes, for any number of samples, and has cuts where they are expected."""

from __future__ import annotations

import copy
import functools
import random
import re
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import weight_norm
from torch.utils.checkpoint import checkpoint

from harness.capture import inputs, names, split, split_or_whole, verify, whole
from harness.capture.structure import tensors
from harness.core.problem import ProblemError
from harness.nn import dropout
from harness.nn.skip import layer_skips, named_layers
from tests.harness.capture import networks
from tests.harness.capture.networks import NETWORKS, Block, TinyGPT
from tests.tiers import later


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


LARGE = ("cells", "two_texts", "torch_transformer")
"""Networks that take a second each time."""
Captured = tuple[nn.Module, nn.Sequential, tuple[Any, ...], dict[str, Any]]


def captured(name: str) -> Captured:
    torch.manual_seed(0)
    module, args, kwargs = NETWORKS[name]()
    return module, split(module, args, kwargs), args, kwargs


@pytest.fixture(scope="module")
def chain_of() -> Callable[[str], Captured]:
    """A network and its layers, captured once for the tests that change neither."""
    return functools.cache(captured)


@pytest.mark.parametrize("name", [name for name in NETWORKS if name not in LARGE])
def test_losses_and_gradients_are_those_of_the_module_which_is_as_it_was(name: str) -> None:
    compared(name)


@pytest.mark.usefixtures("computation")
@pytest.mark.parametrize("name", LARGE)
def test_those_of_a_large_one(name: str) -> None:
    compared(name)


def compared(name: str) -> None:
    module, args, kwargs = NETWORKS[name]()
    before = {path: (dict(vars(each)), dict(each._buffers), each.training) for path, each in module.named_modules()}
    values = {key: value.clone() for key, value in module.state_dict().items()}
    random = torch.get_rng_state()
    verify(module, split(module, args, kwargs), args, kwargs)
    assert torch.equal(random, torch.get_rng_state())
    for path, each in module.named_modules():
        attributes, buffers, training = before[path]
        assert vars(each).keys() == attributes.keys() and each.training == training
        assert all(each._buffers[key] is buffer for key, buffer in buffers.items())
    assert all(torch.equal(value, values[key]) for key, value in module.state_dict().items())


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.usefixtures("computation")
def test_names_are_those_of_the_module(name: str, chain_of: Callable[[str], Captured]) -> None:
    module, chain, _, _ = chain_of(name)
    known, own = names(chain), module.state_dict()
    for key, value in chain.state_dict().items():
        assert value.data_ptr() == own[known[key]].data_ptr()
    assert own.keys() <= {known[key] for key in chain.state_dict()}


@pytest.mark.usefixtures("computation", "at_length")
@pytest.mark.parametrize("name", NETWORKS)
def test_layers_are_the_same_on_the_meta_device_and_for_other_examples(name: str) -> None:
    module, chain, args, kwargs = captured(name)
    count = tensors((args, kwargs))[0].shape[0]

    def larger(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: larger(each) for key, each in value.items()}
        return torch.cat([value, value]) if isinstance(value, Tensor) and len(value) == count else value

    wide = split(module, tuple(map(larger, args)), larger(kwargs))
    with torch.device("meta"):
        empty = NETWORKS[name]()[0]
        meta = split(empty, args, kwargs)
    for other in (wide, meta, split(empty, args, kwargs)):
        assert [one for one, _ in named_layers(other)] == [one for one, _ in named_layers(chain)]
        assert [layer.source for layer in other] == [layer.source for layer in chain]


@pytest.mark.parametrize("name", later(NETWORKS, LARGE))
def test_layers_fit_together(name: str, chain_of: Callable[[str], Captured]) -> None:
    """Skips match, layers pass tensors or tuples of them, and each works as a copy, as of an engine's tied weights."""
    _, chain, args, kwargs = chain_of(name)
    layer_skips(named_layers(chain))
    value: Any = inputs(args, kwargs)
    for _, layer in named_layers(copy.deepcopy(chain)):
        value = layer(value)
        assert isinstance(value, Tensor) or (value and all(isinstance(one, Tensor) for one in value))


CUTS = {
    "tiny_gpt": ["tokens_0", "positions_1", "blocks_0", "blocks_1", "blocks_2", "blocks_3", "head_6"],
    "unet": ["down1_0", "down2_1", "middle_2", "up2_conv1", "up2_conv2", "up1_5"],
    "functional": ["linear_0", "linear_1", "linear_2", "linear_3"],
    "scans": ["0_0", "1_1", "2_2", "3_3", "4_4"],
    "cells": ["embedding_0", "cell_1"],
}


@pytest.mark.parametrize("name", CUTS)
def test_cuts(name: str, chain_of: Callable[[str], Captured]) -> None:
    assert [layer for layer, _ in named_layers(chain_of(name)[1])] == CUTS[name]


@pytest.mark.parametrize("blocks", [2, 3, 8])
def test_repeated_blocks_stay_whole_unless_two_stages_would_not_balance(blocks: int) -> None:
    model = TinyGPT(blocks, width=64)
    chain = split(model, (torch.randint(30, (2, 16)),))
    whole_blocks = sum(isinstance(module, Block) for module in chain.modules())
    assert whole_blocks == blocks - blocks % 2


def test_a_loss_that_experts_leave_in_an_attribute_parts_no_layers(chain_of: Callable[[str], Captured]) -> None:
    assert len(chain_of("mixture")[1]) == 8


def test_long_lived_tensors_jump() -> None:
    skips = layer_skips(named_layers(captured("unet")[1]))
    assert [(skip.source, skip.target) for skip in skips] == [(1, 5)]  # layer 1 uses it, too


def test_a_use_of_a_buffer_that_changes_is_not_parted_from_another_one() -> None:
    _, chain, _, _ = captured("siamese")
    assert [type(layer) for layer in chain if any(isinstance(m, nn.BatchNorm1d) for m in layer.modules())] == [
        type(chain[0])
    ]


def test_evaluation() -> None:
    module, chain, args, _ = captured("tiny_gpt")
    chain.eval(), module.eval()
    assert torch.equal(module(*args), chain(args[0]))
    chain.train(), module.train()
    assert not torch.equal(module(*args), chain(args[0]))


class Doubling(nn.Module):
    """Another function in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) if self.training else layer(x)
        return x


def test_a_model_that_evaluates_in_another_way_only_trains() -> None:
    module, x = Doubling(), torch.randn(2, 64)
    chain = split(module, (x,))
    assert len(chain) == 3
    verify(module, chain, (x,))
    with pytest.raises(NotImplementedError, match="it only trains"):
        chain.eval()


def test_random_numbers_do_not_depend_on_the_order_in_an_engine() -> None:
    _, chain, args, _ = captured("tiny_gpt")
    with dropout.keyed(1, 2, 3):
        first = chain[1](chain[0](args[0]))
        one, again = chain[2](first), chain[2](first)
    with dropout.keyed(1, 2, 4):
        other = chain[2](first)
    assert torch.equal(one, again) and not torch.equal(one, other)


def test_select_and_several_outputs() -> None:
    module, args, kwargs = networks.nested()
    assert len(split(module, args, kwargs)(inputs(args, kwargs))) == 4
    chain = split(module, args, kwargs, lambda result: result.logits.mean(1))
    expected = module(*args, **kwargs).logits.mean(1)
    assert torch.equal(chain(inputs(args, kwargs)), expected)
    one = whole(module, args, kwargs, lambda result: result.logits.mean(1))
    assert torch.equal(one(inputs(args, kwargs)), expected)
    assert {names(one)[key] for key in one.state_dict()} == module.state_dict().keys()
    verify(module, one, args, kwargs, lambda result: result.logits.mean(1))


def test_weights_that_nobody_uses_are_kept() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].unused = nn.Parameter(torch.ones(2))
    model[1].register_buffer("table", torch.ones(3))
    chain = split(model, (torch.randn(2, 4),))
    assert {names(chain)[key] for key in chain.state_dict()} == model.state_dict().keys()


class Branching(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.what == "branch" and y.sum() > 0:
            return self.second(y)
        if self.what == "item":
            return self.second(y * y.max().item())
        if self.what == "numpy":
            return self.second(y + float(y.detach().numpy().mean()))
        if self.what == "samples":
            return self.second(y) if len(x) < 4 else y
        if self.what == "gradient":
            return self.second(torch.autograd.grad(y.sum(), self.first.weight, create_graph=True)[0][:1] + y)
        if self.what == "checkpoint":
            return checkpoint(self.second, y, use_reentrant=True)
        return F.relu(y[y > 0])


@pytest.mark.parametrize(
    ("what", "line", "why"),
    [
        ("branch", "y.sum() > 0", "it reads the value of a tensor"),
        ("item", "y.max().item()", "it reads the value of a tensor"),
        ("numpy", "y.detach().numpy()", ""),
        ("samples", "", "another one for another number of samples"),
        ("nonzero", "y[y > 0]", "depends on the values of tensors"),
        ("gradient", "torch.autograd.grad(y.sum()", "it asks for gradients in its forward pass"),
        ("checkpoint", "checkpoint(self.second, y", "it calls a module inside of an autograd function"),
    ],
)
def test_what_cannot_be_split_is_refused_with_its_line(what: str, line: str, why: str) -> None:
    module, x = Branching(what), torch.randn(2, 4)
    with pytest.raises(ProblemError) as caught:
        split(module, (x,))
    (problem,) = caught.value.problems
    assert (problem.key, problem.value) == ("model", "Branching")
    assert re.search(r"test_split\.py:\d+, `.*" + re.escape(line) + ".*`: .*" + why, problem.message)
    assert torch.equal(whole(module, (x,))(x), module(x))


def test_what_stays_one_layer_inside_of_another_module_says_why() -> None:
    """Not the module itself goes another way for another number of samples, but all that is in it."""
    with pytest.raises(ProblemError, match=r"test_split\.py:\d+, .*another one for another number of samples"):
        split(nn.Sequential(Branching("samples")), (torch.randn(2, 4),))


class Changing(nn.Module):
    """Keeps something in Python from pass to pass, in the ways of `STATE`."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.first, self.second, self.what = nn.Linear(4, 4), nn.Linear(4, 4), what
        self.passes, self.longest, self.table = 0, 0, torch.zeros(0)
        self.inside = nn.Module()
        self.inside.passes = 0

    def forward(self, x: Tensor) -> Any:
        y = self.first(x)
        if self.what == "late":
            self.passes += 1
            y = y * 0.5 if self.passes > 100 else y
        elif self.what == "of a part":
            self.inside.passes += 1
            y = y * self.inside.passes
        elif x.shape[1] > self.longest:
            self.longest, self.table = x.shape[1], torch.ones(x.shape[1])
        return self.second(y if self.what in ("late", "of a part") else y * self.table)


STATE = {
    "late": r"test_split\.py:\d+, `def forward.*`: each pass changes the number `passes`",
    "of a part": "it gives a torch function a number that differs with the number of samples, or from pass to pass",
    "a table": "",
}


@pytest.mark.parametrize("what", STATE)
def test_a_number_that_passes_leave_is_there_in_the_next_one(what: str) -> None:
    """A module that changes one stays whole; a table that is made once, with its length, is no matter."""
    module, x = Changing(what), torch.randn(3, 4)
    if STATE[what]:
        with pytest.raises(ProblemError, match=STATE[what]):
            split(module, (x,))
    else:
        assert len(split(module, (x,))) >= 2
        assert torch.equal(split(module, (x,))(x), module(x))
        return
    assert module.passes == module.inside.passes == 0


class Drawing(nn.Module):
    """Leaves out a block now and then, by random numbers that are torch's, Python's or NumPy's."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.blocks, self.draw = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)), draw

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x) if self.draw() >= 0.001 else x
        return x


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_a_module_that_draws_random_numbers_in_python_is_not_frozen(draw: Callable[[], float]) -> None:
    """Also where all passes of the capture agree by chance; a small block that draws is one layer."""
    with pytest.raises(ProblemError, match=r"test_split\.py:\d+, `def forward.*`: it draws random numbers"):
        split(Drawing(draw), (torch.randn(3, 4),))
    small = nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 64), nn.Linear(64, 4), Drawing(draw))
    assert [len(list(layer.modules())) for layer in split(small, (torch.randn(3, 4),))][-1] == 6


class Averaging(nn.Module):
    """Subtracts what it has seen, of which there is nothing in its first pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.seen = nn.Linear(4, 4), nn.Linear(4, 4), None

    def forward(self, x: Tensor) -> Any:
        y = self.first(x)
        mean = y.detach().mean(0)
        self.seen = mean if self.seen is None else 0.5 * self.seen + 0.5 * mean
        return self.second(y - self.seen)


def test_what_begins_with_nothing_shows_in_a_pass_of_other_values() -> None:
    module, x = Averaging(), torch.randn(4, 4)
    chain = split_or_whole(module, (x,))
    with pytest.raises(ProblemError, match="does not compute the same in layers"):
        verify(module, chain, (x,))


class Cached(nn.Module):
    """Keeps tensors outside of itself: of its class, of its file, also in a tuple, and of a function."""

    masks: ClassVar[dict[int, Tensor]] = {}
    last: ClassVar[Tensor | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        size = x.shape[1]
        if size not in Cached.masks:
            Cached.masks[size] = torch.ones(size)
        if Cached.last is None:
            Cached.last = torch.ones(size)
        if size not in TABLES:
            TABLES[size] = torch.ones(size), (torch.ones(size),)
        y = self.first(x * Cached.masks[size] * Cached.last)
        return self.second(y * TABLES[size][1][0] * positions(size))


TABLES: dict[int, tuple[Tensor, tuple[Tensor]]] = {}


@functools.lru_cache
def positions(size: int) -> Tensor:
    return torch.arange(size) / size


def test_passes_without_values_leave_no_tensors_in_caches() -> None:
    module, x = Cached(), torch.randn(3, 4)
    chain = split_or_whole(module, (x,))
    assert Cached.last is None and not (Cached.masks or TABLES or positions.cache_info().currsize)
    assert torch.isfinite(chain(x)).all() and torch.equal(chain(x), module(x))


def test_attributes_that_each_pass_makes_again_do_not_take_the_place_of_others() -> None:
    """torch.nn.utils.weight_norm computes `weight` before each pass: the tensor that it replaces has to stay alive."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        convolutions = [weight_norm(nn.Conv1d(4 if i == 0 else 8, 8, 3, padding=1)) for i in range(4)]
    module, x = nn.Sequential(nn.Sequential(*convolutions), nn.Flatten(), nn.Linear(40, 2)), torch.randn(3, 4, 5)
    counts = {len(split(module, (x,))) for _ in range(8)}
    assert len(counts) == 1
    assert torch.equal(split(module, (x,))(x), module(x))


class Collecting(nn.Module):
    """Registers hooks that collect what its parts give, in its first pass, as Transformers' networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.collected = nn.Linear(4, 4), nn.Linear(4, 4), []

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        if not hasattr(self, "hooked"):
            self.hooked = [part.register_forward_hook(self.collect) for part in (self.first, self.second)]
        self.collected = []
        result = self.second(torch.relu(self.first(x)))
        return result, tuple(self.collected)

    def collect(self, module: nn.Module, given: tuple[Tensor, ...], result: Tensor) -> None:
        self.collected.append(result)


def test_hooks_that_a_pass_registers_are_gone_after_it() -> None:
    """Otherwise each recorded pass would have more of them."""
    module, x = nn.Sequential(Collecting(), First()), torch.randn(2, 4)
    chain = split(module, (x,))
    assert len(chain) > 1
    assert not any(part._forward_hooks for part in module.modules())
    verify(module, chain, (x,))
    assert not any(part._forward_hooks for part in module.modules())


class First(nn.Module):
    def forward(self, pair: tuple[Tensor, tuple[Tensor, ...]]) -> Tensor:
        return pair[0]


def test_verify_names_the_layer_that_differs() -> None:
    module, chain, args, kwargs = captured("tiny_gpt")
    layer = dict(named_layers(chain))["blocks_2"]
    run = layer._run
    layer._run = lambda self, value: 1.01 * run(self, value)
    with pytest.raises(ProblemError, match="layer 'blocks_2' gives other values of 3 samples"):
        verify(module, chain, args, kwargs)
    layer._run = lambda self, value: Halved.apply(run(self, value))
    with pytest.raises(ProblemError, match=r"layer '\w+' gives \S+ another gradient of 3 samples"):
        verify(module, chain, args, kwargs)
    layer._run = lambda self, value: run(self, value)[:, :4]
    with pytest.raises(ProblemError, match="layer 'blocks_3' fails: "):
        verify(module, chain, args, kwargs)


class Halved(torch.autograd.Function):
    """The gradient is half of what it should be."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / 2


class Remembering(nn.Module):
    """What it gives depends on the pass before."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        x = x if self.state is None else x + self.state
        self.state = x.detach().mean()
        return self.layers[1](x)


def test_verify_notices_what_shows_after_a_step_of_training_alone() -> None:
    """A copy of weights that layers leave as it was is equal to begin with."""
    module, args, _ = networks.averaged()
    assert isinstance(module, networks.Averaged)
    chain = split(module, args)
    first: Any = chain[0]

    def run(layer: Any, value: Tensor) -> Tensor:
        (name,) = layer.stashes
        layer.stash(name, module.target(value))
        return value

    first._run = run
    with pytest.raises(ProblemError, match="does not compute the same in layers"):
        verify(module, chain, args)


def test_verify_notices_state_between_passes() -> None:
    module, x = Remembering(), torch.randn(2, 4)
    with pytest.raises(ProblemError, match="does not compute the same in layers"):
        verify(module, split(module, (x,)), (x,))


class Table(nn.Module):
    """Takes a tensor for its dtype alone, as rotary embeddings do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.arange(8, device=x.device).to(x.dtype).cos()


class Tabled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.table = nn.Linear(8, 8), Table()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 512), nn.Linear(512, 8)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        factor = self.table(x)
        for block in self.blocks:
            x = block(x) * factor
        return x


def test_a_constant_of_a_module_comes_after_what_the_module_takes() -> None:
    module, x = Tabled(), torch.randn(3, 8)
    verify(module, split(module, (x,)), (x,))
