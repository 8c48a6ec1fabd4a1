"""What Llama computes: the same numbers as written by hand, causality, rotary embedding, weights, training."""

from __future__ import annotations

from cmath import exp
from dataclasses import replace
from math import log, sqrt
from statistics import median

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from models.llama.block import Rotary
from models.llama.config import Config
from models.llama.llama import build
from tests.support.zoo import filled

SMALL = Config(
    layers=2, width=24, heads=6, kv_heads=2, hidden=20, sequence=5, vocabulary=7, rope_theta=50.0, norm_eps=1e-3
)  # fmt: skip
CONFIGS = {
    "grouped": SMALL,
    "tied": replace(SMALL, tied=True),
    "one key": replace(SMALL, kv_heads=1),
    "as many keys": replace(SMALL, kv_heads=6),
}


def by_hand(tokens: Tensor, layers: nn.Sequential, config: Config) -> Tensor:
    """Logits from the same weights, one sample, place and head at a time; pairs of features are complex numbers."""
    w = dict(layers.named_parameters(remove_duplicate=False))
    width = config.width // config.heads

    def norm(x: Tensor, name: str) -> Tensor:
        return x / ((x * x).sum() / len(x) + config.norm_eps).sqrt() * w[f"{name}.weight"]

    def turned(x: Tensor, place: int) -> Tensor:
        numbers = torch.complex(x[0::2], x[1::2])
        angles = [place * config.rope_theta ** (-2 * pair / width) for pair in range(width // 2)]
        turns = torch.tensor([exp(1j * angle) for angle in angles], dtype=torch.complex128)
        return torch.view_as_real(numbers * turns).reshape(-1)

    def attention(xs: list[Tensor], name: str) -> list[Tensor]:
        outputs = []
        for place in range(len(xs)):
            heads = []
            for head in range(config.heads):
                other = head * config.kv_heads // config.heads
                mine, theirs = (slice(n * width, (n + 1) * width) for n in (head, other))
                query = turned((w[f"{name}.query.weight"] @ xs[place])[mine], place)
                seen = xs[: place + 1]
                keys = [turned((w[f"{name}.key.weight"] @ x)[theirs], at) for at, x in enumerate(seen)]
                shares = torch.stack([query @ key / sqrt(width) for key in keys]).softmax(0)
                values = [(w[f"{name}.value.weight"] @ x)[theirs] for x in seen]
                heads.append(sum(share * value for share, value in zip(shares, values, strict=True)))
            outputs.append(w[f"{name}.projection.weight"] @ torch.cat(heads))
        return outputs

    def mlp(x: Tensor, name: str) -> Tensor:
        gate, up = w[f"{name}.gate.weight"] @ x, w[f"{name}.up.weight"] @ x
        return w[f"{name}.down.weight"] @ (gate / (1 + (-gate).exp()) * up)

    samples = []
    for sample in tokens:
        xs = [w["embedding.weight"][token] for token in sample]
        for i in range(config.layers):
            added = attention([norm(x, f"block_{i}.attention_norm") for x in xs], f"block_{i}.attention")
            xs = [x + y for x, y in zip(xs, added, strict=True)]
            xs = [x + mlp(norm(x, f"block_{i}.mlp_norm"), f"block_{i}.mlp") for x in xs]
        samples.append(torch.stack([w["head.weight"] @ norm(x, "norm") for x in xs]))
    return torch.stack(samples)


def mean_of_tokens(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss by hand: of each sample the mean over its tokens, summed."""
    shares = logits.exp() / logits.exp().sum(-1, keepdim=True)
    return sum(-shares[n, s, t].log() for n, row in enumerate(targets) for s, t in enumerate(row)) / targets.shape[1]


@pytest.mark.parametrize("name", CONFIGS)
def test_output_loss_and_gradients_equal_those_written_by_hand(name: str) -> None:
    torch.manual_seed(0)
    config = CONFIGS[name]
    model, layers = build(config), filled(build(config))
    batch = model.sample(2)
    output, expected = layers(batch.inputs), by_hand(batch.inputs, layers, config)
    assert output.shape == (2, 5, 7) and output.dtype == torch.float64
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)
    losses = model.loss(output, batch.targets), mean_of_tokens(expected, batch.targets)
    torch.testing.assert_close(*losses, rtol=1e-10, atol=1e-10)
    weights = list(layers.parameters())
    got, wanted = (torch.autograd.grad(loss, weights) for loss in losses)
    for (key, _), mine, theirs in zip(layers.named_parameters(), got, wanted, strict=True):
        assert mine.abs().max() > 0, key
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-10)


def test_rotary_embedding_is_a_complex_multiplication() -> None:
    """Real and imaginary part are neighbours; the angle of place p and pair k is p theta^(-2 k / width)."""
    torch.manual_seed(0)
    x = torch.randn(3, 2, 7, 10, dtype=torch.float64)
    angles = torch.outer(torch.arange(7).double(), 1e4 ** (-torch.arange(5).double() / 5))
    turns = torch.polar(torch.ones_like(angles), angles)
    expected = torch.view_as_real(torch.view_as_complex(x.reshape(3, 2, 7, 5, 2)) * turns).flatten(-2)
    torch.testing.assert_close(Rotary(7, 10, 1e4).double()(x), expected, rtol=1e-14, atol=1e-14)


def test_scores_depend_on_the_distance_of_places_alone() -> None:
    torch.manual_seed(0)
    rotary, (query, key) = Rotary(9, 8, 100.0).double(), torch.randn(2, 8, dtype=torch.float64)
    queries, keys = (rotary(one.expand(1, 1, 9, 8))[0, 0] for one in (query, key))
    scores = queries @ keys.T
    for distance in range(9):
        along = scores.diagonal(-distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=1e-12, atol=1e-12)


def test_grouped_heads_are_repeated_heads() -> None:
    """Keys and values of a group serve its queries as if each query had a copy of them."""
    torch.manual_seed(0)
    few, many = filled(build(SMALL)), filled(build(replace(SMALL, kv_heads=SMALL.heads)))
    state, width = few.state_dict(), SMALL.width // SMALL.heads
    for name in (name for name in state if ".key." in name or ".value." in name):
        state[name] = state[name].unflatten(0, (-1, width)).repeat_interleave(3, 0).flatten(0, 1)
    many.load_state_dict(state)
    tokens = build(SMALL).sample(2).inputs
    torch.testing.assert_close(few(tokens), many(tokens), rtol=1e-12, atol=1e-12)


def test_no_token_sees_a_later_one() -> None:
    layers, tokens = filled(build(SMALL)), torch.tensor([[1, 2, 3, 4, 5]])
    before, after = layers(tokens), layers(torch.tensor([[1, 2, 3, 6, 5]]))
    torch.testing.assert_close(after[:, :3], before[:, :3], rtol=0, atol=0)
    assert ((after - before)[:, 3:].abs().amax(-1) > 1e-6).all()


def test_each_block_has_its_own_tables_that_no_state_holds() -> None:
    layers = build(SMALL).layers()
    tables = [buffer for _, buffer in layers.named_buffers(remove_duplicate=False)]
    assert len({table.untyped_storage()._cdata for table in tables}) == len(tables) == 2 * SMALL.layers
    assert list(layers.state_dict()) == [name for name, _ in layers.named_parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_tables_are_rounded_once(dtype: torch.dtype) -> None:
    """They are computed in float64; what goes through keeps its dtype, whatever that of the tables."""
    exact = Rotary(64, 16, 1e4).double()
    for rotary in (Rotary(64, 16, 1e4), Rotary(64, 16, 1e4).to(dtype)):
        x = torch.ones(1, 1, 64, 16, dtype=dtype)
        assert rotary(x).dtype == dtype
    assert torch.equal(Rotary(64, 16, 1e4).to(dtype).cosines, exact.cosines.to(dtype))


def test_weights_begin_as_in_gpt_2_and_nothing_has_a_bias() -> None:
    torch.manual_seed(0)
    layers = build(Config(layers=3, width=96, hidden=256)).layers()
    for name, weight in layers.named_parameters():
        assert name.endswith(".weight"), name
        if "norm" in name:
            assert (weight == 1).all(), name
        else:
            deep = name.endswith(("projection.weight", "down.weight"))
            assert weight.std().item() == pytest.approx(0.02 / (sqrt(6) if deep else 1), rel=0.05), name


def test_it_learns() -> None:
    torch.manual_seed(0)
    model = build(Config(layers=1, width=16, heads=2, kv_heads=1, hidden=32, sequence=8, vocabulary=5))
    layers = model.layers()
    batch = model.sample(4)
    optimizer, losses = torch.optim.Adam(layers.parameters(), 0.01), []
    for _ in range(150):
        loss = model.loss(layers(batch.inputs), batch.targets) / 4
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(log(5), rel=0.1)
    assert median(losses[-50:]) < 0.5  # at this rate single steps lead away again, on each type of CPU others
    assert functional.softmax(layers(batch.inputs), -1).shape == (4, 8, 5)
