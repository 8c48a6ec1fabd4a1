"""Networks of Hugging Face Transformers: numbers of parameters, layers that equal the network, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.capture import unsplit
from harness.core.problem import CannotRun
from models.hf.config import SHIPPED, Config, check, identity
from models.hf.hf import HuggingFace, build
from models.hf.tasks import IGNORED
from tests.support.zoo import on_meta, parameters

SMALL = ("llama_small", "gpt2_small", "bert_small", "t5_small", "mixtral_small", "vit_small")
PUBLISHED = {
    "llama3_8b": 8_030_261_248,
    "gpt2": 124_439_808,
    "bert_base": 109_514_298,  # with the head of masked tokens, tied
    "t5_base": 222_903_552,
    "mixtral_8x7b": 46_702_792_704,
    "vit_base": 86_567_656,
}


def made(name: str, **keys: Any) -> HuggingFace:
    return build(Config(config=name, **keys))


@pytest.mark.usefixtures("computation")
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_published_number_of_parameters(name: str) -> None:
    with torch.device("meta"):
        network = made(name).network()
    assert parameters(network) == PUBLISHED[name]


def test_a_network_that_cannot_be_split_is_one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Branching(nn.Module):
        def forward(self, input_ids: Tensor, use_cache: bool) -> Any:
            scale = 2.0 if input_ids.sum() > 0 else 1.0
            return SimpleNamespace(logits=scale * functional.one_hot(input_ids, 512).float())

    model = made("llama_small")
    monkeypatch.setattr(model, "network", Branching)
    layers = model.layers()
    why = unsplit(layers)
    assert len(layers) == 1 and why and "input_ids.sum() > 0" in why.code
    assert layers(torch.ones(2, 64, dtype=torch.int64)).shape == (2, 64, 512)


def test_a_configuration_file_counts_by_what_it_says(tmp_path: Path) -> None:
    """Its name does not: profiles in the cache are of the same network, and no edit gets one of before."""
    known = json.loads((SHIPPED / "llama_small.json").read_bytes())
    for name, change in (("one", {}), ("same", {}), ("other", {"num_hidden_layers": 3})):
        (tmp_path / f"{name}.json").write_text(json.dumps({**known, **change}))
    one, same, other = (identity(Config(config=str(tmp_path / f"{name}.json"))) for name in ("one", "same", "other"))
    assert one == same == identity(Config(config="llama_small")) != other
    assert identity(Config(config="llama_small", overrides={"num_hidden_layers": 3})) == other
    (tmp_path / "same.json").rename(tmp_path / "config.json")
    assert identity(Config(config=str(tmp_path))) == same, "its folder"


@pytest.mark.parametrize("name", SMALL)
def test_the_layers_compute_what_the_network_computes(name: str) -> None:
    model = made(name)
    torch.manual_seed(0)
    layers = model.layers().double()
    torch.manual_seed(0)
    network = model.network().double()
    batch = model.sample(3)
    inputs = batch.inputs.double() if batch.inputs.is_floating_point() else batch.inputs
    torch.manual_seed(1)
    split = model.loss(layers(inputs), batch.targets)
    torch.manual_seed(1)
    whole = model.loss(model.logits(network, inputs), batch.targets)
    torch.testing.assert_close(split, whole, rtol=1e-12, atol=0)
    split.backward(), whole.backward()
    for mine, theirs in zip(_gradients(layers), _gradients(network), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


def _gradients(module: torch.nn.Module) -> list[Tensor]:
    found = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    return sorted(found, key=lambda gradient: (gradient.numel(), float(gradient.sum())))


@pytest.mark.usefixtures("computation")
@pytest.mark.parametrize("name", SMALL)
def test_every_block_is_a_layer(name: str) -> None:
    layers = on_meta(made(name))
    described = json.loads((SHIPPED / f"{name}.json").read_text())
    blocks = described.get("num_hidden_layers") or described.get("n_layer") or 2 * described["num_layers"]
    assert len(layers) >= blocks


def test_the_loss_of_masked_tokens_counts_these_alone() -> None:
    model = made("bert_small")
    batch = model.sample(5)
    hidden = batch.targets != IGNORED
    assert hidden.any(1).all() and not hidden.all() and (batch.inputs[hidden] == model.classes - 1).all()
    output = torch.randn(5, 64, model.classes, dtype=torch.float64)
    by_hand = sum(
        -output[n, place].log_softmax(0)[batch.targets[n, place]] / hidden[n].sum()
        for n, place in hidden.nonzero().tolist()
    )
    torch.testing.assert_close(model.loss(output, batch.targets), by_hand)


def test_experts_are_those_of_transformers() -> None:
    model = made("mixtral_small")
    networks: list[Any] = []
    for implementation in (None, "eager"):
        torch.manual_seed(0)
        networks.append(model.network().double())
        if implementation:
            networks[-1].set_experts_implementation(implementation)
    tokens = model.sample(3).inputs
    outputs = [model.logits(network, tokens) for network in networks]
    torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-12)
    for output in outputs:
        output.square().sum().backward()
    for mine, theirs in zip(*(network.parameters() for network in networks), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=1e-12)


def test_weights_come_from_a_local_folder(tmp_path: Path) -> None:
    stored: Any = made("gpt2_small").network()
    stored.save_pretrained(tmp_path)
    torch.manual_seed(7)
    loaded = build(Config(weights=str(tmp_path))).network()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(loaded.parameters(), stored.parameters(), strict=True))


def test_a_folder_of_another_network_is_refused(tmp_path: Path) -> None:
    """Else it would train random weights, with a warning in the log alone."""
    stored: Any = made("gpt2_small").network()
    stored.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    assert "has 0 of the network's" in unloaded(config="llama_small", weights=str(tmp_path))
    file.write_bytes(file.read_bytes()[:5000])
    assert "cannot be loaded: SafetensorError" in unloaded(weights=str(tmp_path))


def unloaded(**keys: Any) -> str:
    """The problem of weights that a network does not take."""
    with pytest.raises(CannotRun) as refused:
        build(Config(**keys)).network()
    (problem,) = refused.value.problems
    assert problem.key == "model.weights"
    return problem.message


def test_overrides_change_the_configuration_and_the_name() -> None:
    model, other = made("llama_small", overrides={"num_hidden_layers": 2}), made("llama_small")
    assert model.settings.num_hidden_layers == 2 and model.name != other.name


@pytest.mark.parametrize(
    ("keys", "key", "words"),
    [
        ({"config": "nosuch.json"}, "model.config", "names no file"),
        ({"config": "llama_smal"}, "model.config", "names no file"),
        ({"task": "causl"}, "model.task", "is not one of causal, masked, seq2seq, image"),
        ({"sequence": 0}, "model.sequence", "must be at least 1"),
        ({"weights": "/nosuch"}, "model.weights", "is no folder"),
        ({"overrides": {"architectures": ["LlamaModel"]}}, "model.task", "is needed"),
        ({"overrides": {"model_type": "nosuch"}}, "model.config", "does not know"),
        ({"overrides": {"num_attention_heads": 5}}, "model.config", "refused by Transformers"),
        ({"task": "image"}, "model.task", "image is none that a network of type llama has"),
        ({"overrides": {"model_type": "resnet"}, "task": "image"}, "model.config", "does not say image_size"),
    ],
)
def test_what_cannot_be_is_refused(keys: dict[str, Any], key: str, words: str) -> None:
    with pytest.raises(CannotRun) as refused:
        build(Config(**keys))
    (problem,) = [one for one in refused.value.problems if one.key == key]
    assert words in problem.message


@pytest.mark.parametrize(
    ("config", "overrides", "most"),
    [
        ("gpt2_small", {"n_positions": 20}, 20),
        ("bert_small", {"max_position_embeddings": 20}, 20),
        ("bert_small", {"model_type": "roberta", "max_position_embeddings": 20, "pad_token_id": 1}, 18),
        ("gpt2_small", {"model_type": "opt", "max_position_embeddings": 20, "word_embed_proj_dim": 16}, 20),
        ("llama_small", {"max_position_embeddings": 20}, None),
    ],
)
def test_a_sequence_is_no_longer_than_the_positions(config: str, overrides: dict[str, Any], most: int | None) -> None:
    """The longest one that is taken is one that the network takes."""
    model = build(Config(config=config, overrides=overrides, sequence=most or 30))
    network = model.network()
    model.logits(network, model.sample(1).inputs)
    if most:
        with pytest.raises(CannotRun, match=rf"longer than the {most} positions .*\n.*-> model.sequence={most}, or"):
            build(Config(config=config, overrides=overrides, sequence=most + 1))
        with pytest.raises((IndexError, RuntimeError)):
            model.logits(network, torch.zeros(1, most + 1, dtype=torch.int64))


def test_what_the_class_of_a_network_refuses_is_said_of_the_configuration() -> None:
    model = build(Config(config="bert_small", overrides={"hidden_size": 33}))
    with pytest.raises(CannotRun, match=r"model\.config .*refused by Transformers: The hidden size \(33\)"):
        model.network()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"model_type": 3}', "[" * 100_000])
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.json").write_text(text)
    (problem,) = check(Config(config=str(tmp_path / "c.json")))
    assert problem.key == "model.config"
