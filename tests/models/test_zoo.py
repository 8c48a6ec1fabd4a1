"""What the counts of every model keep: those of a real run, of torch's own counter, and of saved-tensor hooks."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from harness.config import registry
from harness.core.model_profile import ModelProfile
from harness.interfaces import Model
from harness.measure.count_model import count, counted
from harness.measure.layer_chain import Chain
from harness.nn import dropout
from harness.runtime.training_state import intra_op_threads
from tests.support.quick import within_s

ROOT = Path(__file__).parents[2]
SAMPLES = 2
MODELS: dict[str, dict[str, Any]] = {  # the small default of every model, and what has other kernels
    **{plugin.name: {"name": plugin.name} for plugin in registry.scan() if plugin.group == "model"},
    "gpt untied": {"name": "gpt", "tied": False, "dropout": 0.1},
    "gpt explicit": {"name": "gpt", "attention_dropout": 0.1},
}
CASES = [*((name, None) for name in MODELS), ("gpt", "bfloat16"), ("llama", "bfloat16"), ("gpt explicit", "bfloat16")]
PRESETS = sorted(file.stem for file in (ROOT / "conf/model").glob("*.yaml"))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Such small tensors take longer with more."""
    with intra_op_threads(1):
        yield


def built(keys: dict[str, Any]) -> Model:
    model: Model = registry.build("model", OmegaConf.create(keys))
    return model


class Case:
    """One model, counted on tensors without memory and on real ones."""

    def __init__(self, name: str, autocast: str | None) -> None:
        model, self.autocast = built(MODELS[name]), autocast
        torch.manual_seed(0)
        self.chain = Chain(model, SAMPLES, torch.float32, torch.device("cpu"), autocast)
        with dropout.keyed(seed=0, step=0, micro_batch=0):
            self.real = counted(self.chain, "float32", autocast)
        self.fake = count(model, SAMPLES, "float32", autocast)

    def run(self) -> Tensor:
        """The whole model, uncut."""
        with dropout.keyed(seed=0, step=0, micro_batch=0), self._autocast():
            output: Tensor = self.chain.layers(self.chain.batch.inputs)
        return output

    def _autocast(self) -> AbstractContextManager[object]:
        return torch.autocast("cpu", getattr(torch, self.autocast)) if self.autocast else nullcontext()


@functools.cache
def made(name: str, autocast: str | None) -> Case:
    return Case(name, autocast)


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]} {case[1] or ''}".strip())
def case(request: pytest.FixtureRequest, one_thread: None) -> Case:
    return made(*request.param)


@contextmanager
def saved(layers: nn.Module) -> Iterator[dict[int, int]]:
    """Bytes of each storage that autograd saves, but for parameters and buffers; it must live until the end."""
    state = {t.untyped_storage().data_ptr() for t in (*layers.parameters(), *layers.buffers())}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in state:
            sizes[place] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield sizes


def total(profile: ModelProfile, field: str) -> float:
    return profile.sum(field, 0, len(profile.layers) - 1)


def test_without_memory_the_counts_are_those_of_a_real_run(case: Case) -> None:
    assert replace(case.fake, source=case.real.source, times=case.real.times) == case.real
    assert ModelProfile.from_json(case.fake.to_json()) == case.fake


def test_saved_bytes_are_those_of_the_whole_model(case: Case) -> None:
    with saved(case.chain.layers) as sizes:
        output = case.run()
    assert total(case.fake, "saved_bytes") == sum(sizes.values()) > 0
    del output


@pytest.mark.usefixtures("computation")
def test_flops_are_those_of_torchs_own_counter(case: Case) -> None:
    """It counts explicit attention, since it does not know the fused kernel of the CPU."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        case.run()
    assert total(case.fake, "flops") == counter.get_total_flops() > 0


def test_products_have_all_flops(case: Case) -> None:
    for layer in case.fake.layers:
        assert layer.flops == sum(product.flops(SAMPLES) for product in layer.products), layer.name
        assert all(product.kind != "once" for product in layer.products)


def test_products_have_the_weights_of_their_layers(case: Case) -> None:
    """A matrix of parameters is used in some product of its layer, under its own name."""
    places = 0
    for layer, (name, module) in zip(case.fake.layers, case.chain.layers.named_children(), strict=True):
        weights = {
            path.rpartition(".")[0]: weight.numel() * weight.element_size()
            for path, weight in module.named_parameters()
            if weight.dim() > 1 and name != "position"  # which is added
        }
        named = {product.name: product.weight_bytes for product in layer.products if product.weight_bytes}
        assert named == weights, name
        places += len(named)
    assert places > 0


def test_parameters_count_once(case: Case) -> None:
    layers, last = case.chain.layers, len(case.fake.layers) - 1
    assert case.fake.parameter_bytes(0, last) == sum(p.numel() * p.element_size() for p in layers.parameters())
    shared = {tied.name for layer in case.fake.layers for tied in layer.tied}
    assert shared == ({"embedding.weight"} if case.chain.model.name == "gpt_4_64_4_64_256" else set())


@pytest.mark.parametrize("name", PRESETS)
def test_presets_build_without_memory(name: str) -> None:
    keys: Any = OmegaConf.to_container(OmegaConf.load(ROOT / "conf/model" / f"{name}.yaml"))
    (schema, _) = keys.pop("defaults")
    model_name = schema.removeprefix("_")
    with torch.device("meta"):
        model = built({"name": model_name, **keys})
        layers = model.layers()
    assert len(layers) > 0 and sum(parameter.numel() for parameter in layers.parameters()) > 0
    assert all(tensor.is_meta for tensor in (*layers.parameters(), *layers.buffers()))
    assert model.name.startswith(f"{model_name}_")


@pytest.mark.usefixtures("computation")
def test_the_largest_model_is_counted_in_seconds() -> None:
    """GPT 100B without its weights: 406 GB in float32."""
    keys = OmegaConf.load(ROOT / "conf/model/gpt_100b.yaml")
    model = built({"name": "gpt", **{key: value for key, value in keys.items() if key != "defaults"}})
    found = within_s(3, lambda: count(model, 1, "float32"))
    assert found.parameter_bytes(0, len(found.layers) - 1) == 4 * 101_421_983_520
