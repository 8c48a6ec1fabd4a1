"""precision.cuda_graphs: `single` trains as without, in memory that the graphs keep."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.checks import layer_traits
from harness.checks.request import request
from harness.cli.compose import compose
from harness.config import registry
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.plan import Plan
from harness.core.problem import typed
from harness.core.traits import Traits
from harness.host import devices
from harness.interfaces import Batch, Session
from harness.nn.dropout import Dropout
from harness.runtime.graphed_layers import CAPTURE, GraphedLayers
from harness.worker.prefetch import _pinned
from tests.engines import networks, zoo
from tests.engines.contract import Case, gentle
from tests.engines.networks import Network, Recall
from tests.engines.test_resuming import ADAM, MOMENTUM, flat
from tests.support import fake_graphs
from tests.support.fake_graphs import FakeGraphs

KEY = "precision.cuda_graphs"
STEPS = 3


class Skewed(nn.Module):
    """Two outputs, one of whole numbers, after a change in place of what arrives."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.mul_(2), (x.detach() > 0).long()


class Joined(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] * pair[1]


def mixed() -> Network:
    """Runs of layers around a mask, a layer that is there twice, a change in place and batch norms."""

    def layers() -> list[nn.Module]:
        twice = nn.Linear(8, 8)
        return [
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), Dropout(0.2), twice, Skewed(), Joined(), twice,
            nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.ReLU(inplace=True), nn.Linear(8, 3),
        ]  # fmt: skip

    return Network("mixed", layers, lambda n: torch.randn(n, 6), lambda n: torch.randn(n, 3), networks._squares)


def in_place() -> Network:
    """The first layer changes the batch."""
    return Network("in place", lambda: [Skewed(), Joined(), nn.Linear(6, 3)], lambda n: torch.randn(n, 6),
                   lambda n: torch.randn(n, 3), networks._squares)  # fmt: skip


MODELS = {
    "mixed": mixed(),
    "in place": in_place(),
    "skips": networks.ALL["skips"],
    "tied": networks.ALL["tied"],
    **{name: zoo.model(name) for name in ("unet", "gpt", "resnet")},
}


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> FakeGraphs:
    return fake_graphs.install(monkeypatch)


def single(model: Any, **changes: Any) -> Case:
    from engines.gpipe.engine import Config, build

    return replace(gentle(flat(build, Config(), 1, model=model)).reference, **changes)


def trained(case: Case, cuda_graphs: bool, **changes: Any) -> tuple[list[float], dict[str, Any]]:
    spec = replace(case.spec, cuda_graphs=cuda_graphs, **changes)
    with case.engine.session(case.model, case.plan, spec) as session:
        return steps(session, case), session.state_dict()


def steps(session: Session, case: Case, samples: tuple[int, ...] = (8,) * STEPS) -> list[float]:
    torch.manual_seed(3)
    batches = [case.model.sample(count) for count in samples]
    torch.manual_seed(4)
    return [session.step(Batch(batch.inputs, batch.targets)).loss for batch in batches]


@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAM], ids=["momentum", "adamw"])
@pytest.mark.parametrize("name", MODELS)
def test_trains_as_without(name: str, optimizer: Any, graphs: FakeGraphs) -> None:
    """To the last bit: losses, weights, statistics, optimizer state, over several micro-batches."""
    case = single(MODELS[name], optimizer=optimizer)
    expected = trained(case, False)
    assert not graphs.calls
    torch.testing.assert_close(trained(case, True), expected, rtol=0, atol=0)
    assert len(graphs.calls) == 1, "captured once"
    runs = graphs.calls[0][0]
    assert graphs.replayed == [*runs] * (case.plan.micro_batches * STEPS)


def test_under_autocast(graphs: FakeGraphs) -> None:
    case = single(zoo.model("resnet"), dtype="float32")
    expected = trained(case, False, autocast="bfloat16")
    torch.testing.assert_close(trained(case, True, autocast="bfloat16"), expected, rtol=0, atol=0)
    assert graphs.replayed


def test_which_layers_and_with_what_they_are_captured(graphs: FakeGraphs) -> None:
    case = single(MODELS["mixed"])
    trained(case, True)
    ((runs, samples),) = graphs.calls
    assert [list(dict(run.named_children())) for run in runs] == [
        ["0", "1", "2"], ["5", "6"], ["8", "9", "10"], ["12", "13"],
    ]  # fmt: skip
    each = case.samples // case.plan.micro_batches
    assert [(one.shape, one.requires_grad) for (one,) in samples] == [
        ((each, 6), False), ((each, 8), True), ((each, 8), True), ((each, 8), True),
    ]  # fmt: skip


def test_a_short_batch_goes_through_the_layers_as_they_are(graphs: FakeGraphs) -> None:
    """And one of the first size through the graphs again."""
    case = single(MODELS["mixed"])
    found = []
    for cuda_graphs in (False, True):
        with case.engine.session(case.model, case.plan, replace(case.spec, cuda_graphs=cuda_graphs)) as session:
            found.append((steps(session, case, (8, 4, 8)), session.state_dict()))
    torch.testing.assert_close(*found, rtol=0, atol=0)
    assert len(graphs.calls) == 1
    assert len(graphs.replayed) == len(graphs.calls[0][0]) * case.plan.micro_batches * 2


def test_a_model_without_static_layers_captures_nothing(graphs: FakeGraphs) -> None:
    layers = nn.Sequential(Dropout(0.5), Recall("x"))
    assert not GraphedLayers(layers, torch.device("cpu")).runs
    one = GraphedLayers(nn.Sequential(nn.Dropout(0.5)), torch.device("cpu"))
    assert one(torch.ones(4)).shape == (4,) and not graphs.calls


class Draws(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.3)


class Replaces(nn.Module):
    """Its buffer is another tensor after each pass."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return x


def test_layers_that_draw_numbers_of_their_own_are_not_captured(graphs: FakeGraphs) -> None:
    """Functional dropout, which no layer's type shows."""

    def layers() -> list[nn.Module]:
        return [nn.Linear(6, 8), Draws(), nn.Dropout(0.2), nn.Linear(8, 8), nn.Linear(8, 3)]

    model = Network("draws", layers, lambda n: torch.randn(n, 6), lambda n: torch.randn(n, 3), networks._squares)
    case = single(model)
    expected = trained(case, False)
    torch.testing.assert_close(trained(case, True), expected, rtol=0, atol=0)
    ((runs, _),) = graphs.calls
    assert [list(dict(run.named_children())) for run in runs] == [["3", "4"]]


def test_buffers_that_a_pass_replaces_are_put_back(graphs: FakeGraphs) -> None:
    layers = nn.Sequential(Dropout(0.0), Replaces(), nn.Linear(4, 4))
    buffer = layers[1].count
    GraphedLayers(layers, torch.device("cpu"))._capture(torch.ones(2, 4))
    assert graphs.calls and layers[1].count is buffer and buffer.item() == 0


def test_no_batch_is_pinned_while_graphs_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """That would allocate memory, which CUDA forbids meanwhile to all threads."""
    seen = []
    monkeypatch.setattr(Tensor, "pin_memory", lambda one: seen.append(CAPTURE.locked()) or one)
    _pinned(Batch(torch.ones(2), torch.ones(2)))
    assert seen == [True, True]


@pytest.mark.parametrize(
    "overrides, kind, fixes",
    [
        ([], "cpu", ["precision.cuda_graphs=false"]),
        ([], "cuda", None),
        (["cluster=p40x8", "mode=simulate"], "cpu", None),
        (["engine.checkpoint=always"], "cuda", ["precision.cuda_graphs=false", "engine.checkpoint=never"]),
        (["precision.compile=true"], "cuda", ["precision.cuda_graphs=false", "precision.compile=false"]),
        (["engine=gpipe"], "cuda", ["precision.cuda_graphs=false"]),
        (["engine=ddp"], "cuda", ["precision.cuda_graphs=false"]),
    ],
)
def test_where_it_is_refused(
    overrides: list[str], kind: Any, fixes: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = compose(["engine=single", "model=unet", f"{KEY}=true", *overrides])
    monkeypatch.setattr(devices, "detect", lambda device: devices.DetectedDevices(kind, "one", 1, 10**9))
    capabilities = registry.build("engine", config.engine).capabilities
    found = [one for one in request(config, capabilities, None) if one.key == KEY]
    assert [[typed(fix) for fix in one.fixes] for one in found] == ([] if fixes is None else [fixes])


@pytest.mark.parametrize(
    "traits, by_value, refused",
    [
        (Traits(), "", False),
        (Traits(), "in forward", True),
        (Traits(unused=("a.weight",)), "", True),
        (Traits(draws=True), "", True),
        (Traits(changes=("a.weight",)), "", True),
        (Traits(max_norm=True), "", True),
        (Traits(sparse=("a.weight",)), "", True),
        (Traits(uses=("b.weight",)), "", True),
        (Traits(in_place=0), "", True),
    ],
)
def test_models_that_differ_from_pass_to_pass_are_refused(traits: Traits, by_value: str, refused: bool) -> None:
    layers = (LayerProfile("a", 0.1, 0.1, traits=traits), LayerProfile("b", 0.1, 0.1))
    profile = ModelProfile(layers, "net", 1, by_value=by_value)
    config = compose(["engine=single", "model=unet", f"{KEY}=true"])
    capabilities = registry.build("engine", config.engine).capabilities
    found = [
        one for one in layer_traits.refused(config, capabilities, Plan.contiguous([2], 1), profile) if one.key == KEY
    ]
    assert [[typed(fix) for fix in one.fixes] for one in found] == [[f"{KEY}=false"]] * refused
    off = compose(["engine=single", "model=unet"])
    assert KEY not in {one.key for one in layer_traits.refused(off, capabilities, Plan.contiguous([2], 1), profile)}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mixed", "unet", "gpt", "resnet"])
def test_on_a_cuda_device(name: str) -> None:
    case = single(MODELS[name])
    expected = trained(case, False, devices=("cuda:0",))
    torch.testing.assert_close(trained(case, True, devices=("cuda:0",)), expected, rtol=1e-6, atol=1e-8)
