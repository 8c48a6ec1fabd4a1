"""What GPT computes: the same numbers as written by hand, causality, dropout, tied weights, loss, sample, training."""

from dataclasses import replace
from math import log, sqrt

import pytest
import torch
from torch import Tensor, nn

from harness.nn.dropout import Dropout, keyed, number
from models.gpt.block import attend
from models.gpt.config import Config
from models.gpt.gpt import build
from tests.support.zoo import filled

SMALL = Config(layers=2, hidden=12, heads=3, sequence=5, vocabulary=7)


def by_hand(tokens: Tensor, layers: nn.Sequential, config: Config) -> Tensor:
    """Logits from the same weights, one sample, place and head at a time."""
    w = dict(layers.named_parameters(remove_duplicate=False))

    def linear(x: Tensor, name: str) -> Tensor:
        return w[f"{name}.weight"] @ x + w[f"{name}.bias"]

    def norm(x: Tensor, name: str) -> Tensor:
        return (x - x.mean()) / (x.var(correction=0) + 1e-5).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]

    def attention(xs: list[Tensor], name: str) -> list[Tensor]:
        width, outputs = config.hidden // config.heads, []
        rows = [linear(x, f"{name}.qkv") for x in xs]
        for place in range(len(xs)):
            heads = []
            for head in range(config.heads):
                at = [slice(part * config.hidden + head * width, part * config.hidden + (head + 1) * width)
                      for part in range(3)]  # fmt: skip
                scores = [rows[place][at[0]] @ rows[other][at[1]] / sqrt(width) for other in range(place + 1)]
                weights = torch.stack(scores).exp()
                heads.append(sum(weights[o] / weights.sum() * rows[o][at[2]] for o in range(place + 1)))
            outputs.append(linear(torch.cat(heads), f"{name}.projection"))
        return outputs

    def mlp(x: Tensor, name: str) -> Tensor:
        up = linear(x, f"{name}.up")
        return linear(up * (1 + torch.erf(up / sqrt(2))) / 2, f"{name}.down")

    samples = []
    for sample in tokens:
        xs = [w["embedding.weight"][token] + w["position.weight"][place] for place, token in enumerate(sample)]
        for i in range(config.layers):
            added = attention([norm(x, f"block_{i}.attention_norm") for x in xs], f"block_{i}.attention")
            xs = [x + y for x, y in zip(xs, added, strict=True)]
            xs = [x + mlp(norm(x, f"block_{i}.mlp_norm"), f"block_{i}.mlp") for x in xs]
        samples.append(torch.stack([w["head.weight"] @ norm(x, "norm") for x in xs]))
    return torch.stack(samples)


@pytest.mark.parametrize("attention_dropout", [0.0, 0.5])
@pytest.mark.parametrize("tied", [True, False])
def test_output_and_gradients_equal_those_written_by_hand(tied: bool, attention_dropout: float) -> None:
    """With dropout attention is explicit; in evaluation it drops nothing."""
    torch.manual_seed(0)
    config = replace(SMALL, tied=tied, attention_dropout=attention_dropout)
    layers, batch = filled(build(config)).eval(), build(config).sample(2)
    output, expected = layers(batch.inputs), by_hand(batch.inputs, layers, config)
    assert output.shape == (2, 5, 7)
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)
    weights = list(layers.parameters())
    got, wanted = (
        torch.autograd.grad(build(config).loss(logits, batch.targets), weights) for logits in (output, expected)
    )
    for (name, _), mine, theirs in zip(layers.named_parameters(), got, wanted, strict=True):
        assert mine.abs().max() > 0, name
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("attention_dropout", [0.0, 0.5])
def test_no_token_sees_a_later_one(attention_dropout: float) -> None:
    layers, tokens = (
        filled(build(replace(SMALL, attention_dropout=attention_dropout))).eval(),
        torch.tensor([[1, 2, 3, 4, 5]]),
    )
    changed = torch.tensor([[1, 2, 3, 6, 5]])
    before, after = layers(tokens), layers(changed)
    torch.testing.assert_close(after[:, :3], before[:, :3], rtol=0, atol=0)
    assert ((after - before)[:, 3:].abs().amax(-1) > 1e-6).all()


def test_dropout_is_keyed_and_drops_probabilities() -> None:
    layers = build(replace(SMALL, dropout=0.5, attention_dropout=0.25)).layers()
    number(layers)
    assert [layer.p for layer in layers.modules() if isinstance(layer, Dropout)] == [0.5, *[0.25, 0.5, 0.5] * 2]
    tokens = torch.zeros(1, 5, dtype=torch.long)
    with keyed(seed=0, step=0, micro_batch=0):
        first, again = layers(tokens), layers(tokens)
    with keyed(seed=0, step=1, micro_batch=0):
        other = layers(tokens)
    assert torch.equal(first, again) and not torch.equal(first, other)
    query = torch.zeros(1, 1, 4, 1)
    with keyed(seed=0, step=0, micro_batch=0):
        shares = attend(query, query, torch.eye(4)[None, None], Dropout(0.5))[0, 0]
    allowed = torch.tensor([1.0, 1 / 2, 1 / 3, 1 / 4])[:, None] * 2
    assert (((shares == 0) | (shares - allowed).abs().lt(1e-6)) & shares.triu(1).eq(0)).all()
    assert 0 < shares.count_nonzero() < 10


def test_a_tied_weight_has_the_gradients_of_both_uses() -> None:
    torch.manual_seed(0)
    tied, apart = filled(build(SMALL)), filled(build(replace(SMALL, tied=False)))
    assert tied.head.weight is tied.embedding.weight and apart.head.weight is not apart.embedding.weight
    assert list(tied.state_dict()) == list(apart.state_dict())
    apart.load_state_dict(tied.state_dict())
    batch = build(SMALL).sample(3)
    for layers in (tied, apart):
        build(SMALL).loss(layers(batch.inputs), batch.targets).backward()
    uses = [apart.embedding.weight.grad, apart.head.weight.grad]
    assert all(use.abs().max() > 1e-6 for use in uses)
    torch.testing.assert_close(tied.embedding.weight.grad, sum(uses))


def test_weights_begin_as_in_gpt_2() -> None:
    torch.manual_seed(0)
    layers = build(Config(layers=3, hidden=96, tied=False)).layers()
    for name, weight in layers.named_parameters():
        if name.endswith("bias"):
            assert not weight.any(), name
        elif "norm" in name:
            assert (weight == 1).all(), name
        else:
            residual = name.endswith(("projection.weight", "down.weight"))
            assert weight.std().item() == pytest.approx(0.02 / sqrt(6) if residual else 0.02, rel=0.05), name


def test_loss_is_the_sum_of_the_samples_means() -> None:
    model = build(replace(SMALL, sequence=2, vocabulary=3))
    logits = torch.tensor([[[0.0, 0.0, 0.0], [2.0, 0.0, 0.0]], [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]])
    targets = torch.tensor([[0, 0], [1, 2]])
    likely = -log(torch.tensor(2.0).exp().item() / (torch.tensor(2.0).exp().item() + 2))
    assert model.loss(logits, targets).item() == pytest.approx((log(3) + likely) / 2 + log(3))


def test_sample_is_drawn_from_torchs_generator() -> None:
    model = build(SMALL)
    torch.manual_seed(3)
    first, second = model.sample(50), model.sample(50)
    torch.manual_seed(3)
    assert torch.equal(model.sample(50).inputs, first.inputs) and not torch.equal(first.inputs, second.inputs)
    assert first.inputs.shape == first.targets.shape == (50, *model.input_shape)
    assert first.inputs.dtype == first.targets.dtype == torch.int64
    assert torch.equal(first.inputs[:, 1:], first.targets[:, :-1])
    assert first.inputs.unique().tolist() == first.targets.unique().tolist() == list(range(7))


def test_it_learns_a_text_that_repeats() -> None:
    torch.manual_seed(0)
    model = build(Config(layers=2, hidden=32, heads=2, sequence=16, vocabulary=8))
    layers, losses = model.layers(), []
    optimizer = torch.optim.AdamW(layers.parameters(), lr=0.01)
    text = torch.tensor([3, 1, 4, 1, 5, 2, 6, 5, 3, 7]).repeat(4)
    windows = torch.stack([text[at : at + 17] for at in range(10)])
    for _ in range(40):
        optimizer.zero_grad()
        loss = model.loss(layers(windows[:, :-1]), windows[:, 1:]) / len(windows)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(log(8), rel=0.05)
    assert losses[-1] < 0.3


@pytest.mark.parametrize("attention_dropout", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_each_layer_can_be_cut_off_and_run_twice(dtype: torch.dtype, attention_dropout: float) -> None:
    """No layer changes its input, which may be a leaf of the graph, and none carries state from call to call."""
    layers = build(replace(SMALL, attention_dropout=attention_dropout)).layers().to(dtype)
    assert not list(layers.buffers())
    x = build(SMALL).sample(2).inputs
    for name, layer in layers.named_children():
        leaf = x.clone().requires_grad_(x.is_floating_point())
        with keyed(seed=0, step=0, micro_batch=0):
            first, second = layer(leaf), layer(leaf)
        assert first.dtype == dtype and torch.equal(leaf, x) and torch.equal(first, second), name
        x = first.detach()


@pytest.mark.parametrize("attention_dropout", [0.0, 0.1])
def test_it_runs_on_the_meta_device(attention_dropout: float) -> None:
    with torch.device("meta"):
        model = build(replace(SMALL, attention_dropout=attention_dropout, dropout=0.1))
        output = model.layers().bfloat16()(model.sample(2).inputs)
    assert (output.shape, output.dtype, output.is_meta) == ((2, 5, 7), torch.bfloat16, True)
