"""Benchmark of captured models: a step of `single` with the layers of a module, against the module itself, in turns.

module itself    |== step ==|              |== step ==|
its layers                  |== step ==|              |== step ==|
"""

from __future__ import annotations

import copy
import json
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from analysis.bench.results import ROOT
from analysis.bench.round_robin import run_interleaved
from engines.single.engine import Config, build
from harness.capture import split, torchvision_import
from harness.core.plan import Plan
from harness.interfaces import Batch, Model, Session, SessionSpec
from harness.user_model.wrappers import Classifier, LanguageModel, Wrapper

Row = dict[str, Any]
SAMPLES, MICRO_BATCHES = 8, 2
TURNS = 4
"""Rounds of this benchmark for each one that is asked for: its steps are short, and it measures a per cent."""
VOCABULARY, SEQUENCE = 256, 128
ITSELF, LAYERS = "itself", "layers"


class Itself(nn.Module):
    """A module that gives what the loss takes of its result."""

    def __init__(self, module: nn.Module, select: Callable[[Any], Any]) -> None:
        super().__init__()
        self.module, self.select = module, select

    def forward(self, inputs: Tensor) -> Any:
        return self.select(self.module(inputs))


class AsLayers:
    """The module of a wrapper as one layer, or split into layers. Implements `harness.interfaces.Model`."""

    def __init__(self, name: str, wrapper: Wrapper, divided: bool) -> None:
        self.name, self.task = name, wrapper.task
        self.input_shape, self.classes = wrapper.input_shape, wrapper.classes
        self.wrapper, self.divided = wrapper, divided

    def layers(self) -> nn.Sequential:
        """A copy: all sessions begin with the same weights."""
        module, select = copy.deepcopy(self.wrapper.module), self.wrapper.select
        if self.divided:
            return split(module, (self.sample(2).inputs,), select=select)
        return nn.Sequential(Itself(module, select))

    def sample(self, n: int) -> Batch:
        return self.wrapper.sample(n)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return self.wrapper.loss(output, target)


def captured(rounds: int) -> list[Row]:
    """A module split into layers, against the module itself, in the engine single: time of a step, in turns.

    `time / itself` is the median of the turns' ratios, `its quartiles` are those of the ratios.
    """
    torchvision_import.prepare()
    return [row for name, make in MODELS.items() for row in benchmark(name, make(), rounds * TURNS)]


def benchmark(name: str, wrapper: Wrapper, rounds: int) -> list[Row]:
    """The rows of one model. Raises AssertionError if the layers have another loss than the module."""
    torch.manual_seed(0)
    batch = wrapper.sample(SAMPLES)
    with ExitStack() as stack:
        sessions = {
            title: stack.enter_context(opened(AsLayers(name, wrapper, title == LAYERS))) for title in (ITSELF, LAYERS)
        }
        losses = {title: session.step(batch).loss for title, session in sessions.items()}
        assert abs(losses[LAYERS] - losses[ITSELF]) < 1e-5 * losses[ITSELF], f"{name}: {losses}"
        steps = {title: _step(session, batch) for title, session in sessions.items()}
        times = run_interleaved(steps, rounds)
    rows: list[Row] = [
        {"model": name, "entry": title, "step": taken.median_s, "quartiles": list(taken.spread_s)}
        for title, taken in times.items()
    ]
    ratios = [b / a for a, b in zip(times[ITSELF].rounds_s, times[LAYERS].rounds_s, strict=True)]
    first, middle, third = statistics.quantiles(ratios, n=4, method="inclusive")
    rows[-1] |= {"time / itself": middle, "its quartiles": f"{first:.3f} - {third:.3f}"}
    return rows


def opened(model: Model) -> Any:
    """A session of one thread on the CPU."""
    plan = Plan.contiguous([len(model.layers())], MICRO_BATCHES, "never")
    return build(Config()).session(model, plan, SessionSpec(("cpu",)))


def _step(session: Session, batch: Batch) -> Callable[[], float]:
    return lambda: session.step(batch).step_time_s


def llama_small() -> Wrapper:
    """Llama of Transformers, by the shipped configuration."""
    import transformers

    settings = json.loads((ROOT / "models" / "hf" / "configs" / "llama_small.json").read_text(encoding="utf-8"))
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    return LanguageModel(transformers.AutoModelForCausalLM.from_config(config).train(), VOCABULARY, SEQUENCE)


def resnet50() -> Wrapper:
    """The network of torchvision for small images."""
    import torchvision

    return Classifier(torchvision.models.resnet50(num_classes=10), (3, 64, 64), 10)


class LSTM(nn.Module):
    """A language model of four layers of LSTM, one module each."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(4))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        value = self.embedding(tokens)
        for layer in self.layers:
            value, _ = layer(value)
        logits: Tensor = self.head(value)
        return logits


def lstm() -> Wrapper:
    return LanguageModel(LSTM(), VOCABULARY, SEQUENCE // 4)


MODELS: dict[str, Callable[[], Wrapper]] = {"llama_small": llama_small, "resnet50": resnet50, "lstm": lstm}
