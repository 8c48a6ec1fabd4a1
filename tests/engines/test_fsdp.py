"""The contract of tests/engines/contract.py for fsdp, in two replicas and more; its blocks, its bytes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engines.fsdp import engine as fsdp_config
from engines.fsdp.engine import Config, build
from engines.fsdp.session import FSDPSession
from harness.core.cluster import Cluster
from harness.core.memory_model import MemoryModel, named
from harness.core.model_profile import LayerProfile, ModelProfile, Tied
from harness.core.plan import Mesh, Plan
from harness.core.trace import Trace
from harness.interfaces import Model, Session
from harness.measure.count_model import count
from harness.simulator import simulate
from tests.engines import contract, networks, zoo
from tests.engines.contract import Case, gentle
from tests.engines.networks import Network
from tests.support.sessions import run_session

pytestmark = pytest.mark.usefixtures("ranks")


class Widen(nn.Module):
    """Changes in place what it gets, and ends in a view."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x.add_(1.0))
        return y.view(-1, 2, 3)


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2.0)


class Fork(nn.Module):
    """A pair, of which one is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.view(-1, 6)
        return self.linear(flat * 0.5), (flat * 3.0).view(-1, 6)


class Join(nn.Module):
    """Changes both in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0].mul_(2.0) + torch.tanh(self.linear(pair[1].add_(1.0)))


def views() -> Network:
    """What torch's marks and hooks do not go with: views that are changed in place."""

    def layers() -> list[nn.Module]:
        return [nn.Linear(6, 6), Widen(), Double(), Fork(), Join(), nn.Linear(6, 3)]

    return Network("views", layers, lambda n: torch.randn(n, 6), lambda n: torch.randn(n, 3), networks._squares)


def frozen() -> Network:
    """Frozen layers at both ends, and one that is frozen in part."""

    def layers() -> list[nn.Module]:
        first, half, last = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 2)
        for parameters in (first.parameters(), [half.bias], last.parameters()):
            for parameter in parameters:
                parameter.requires_grad_(False)
        return [first, nn.Tanh(), half, nn.Linear(5, 5), last]

    return Network("frozen", layers, lambda n: torch.randn(n, 5), lambda n: torch.randn(n, 2), networks._squares)


NETWORKS = {**networks.ALL, "relayed": networks.relayed(), "views": views(), "frozen": frozen()}
MODELS: dict[str, Model] = {**NETWORKS, **{name: zoo.model(name) for name in ("unet", "amoebanet", "gpt", "llama")}}
OPTIONS: dict[str, dict[str, Any]] = {
    "torch's own": {},
    "each layer alone": {"group_mb": 0},
    "kept": {"group_mb": 0, "reshard_after_forward": False},
    "at once": {"reduce_each": False},
    "kept, at once": {"reshard_after_forward": False, "reduce_each": False},
}


def case(model: str, data: int = 2, micro_batches: int = 2, samples: int = 8, **options: Any) -> Case:
    network = MODELS[model]
    plan = replace(Plan.contiguous([len(network.layers())], micro_batches), mesh=Mesh(data=data))
    return Case(build(Config(**options)), network, plan, samples=samples)


def steady(model: str, **options: Any) -> Case:
    """With a learning rate of 1 where the network takes it, so that a parameter's change is its gradient."""
    return gentle(case(model, **options)) if model == "views" else case(model, **options)


@pytest.mark.fast
@pytest.mark.parametrize("model", NETWORKS)
def test_trains_like_single(model: str) -> None:
    contract.check_training(steady(model))


@pytest.mark.parametrize("options", ["each layer alone", "kept, at once"])
@pytest.mark.parametrize("model", ["skips", "relayed", "tied", "views", "frozen"])
def test_trains_like_single_with_other_groups_and_less_freed(model: str, options: str) -> None:
    contract.check_training(steady(model, **OPTIONS[options]))


@pytest.mark.fast
@pytest.mark.parametrize("model", ["skips", "relayed"])
def test_no_weights_stay_gathered_after_a_step(model: str) -> None:
    """The next one would have those of before. A state that is looked at in between would shard them again."""
    one = case(model, **OPTIONS["each layer alone"])

    def losses(session: Session) -> list[float]:
        torch.manual_seed(3)
        batches = [one.model.sample(one.samples) for _ in range(contract.STEPS)]
        return [session.step(batch).loss for batch in batches]

    got = run_session(one.engine, one.model, one.plan, one.spec, losses)
    assert got == pytest.approx(contract.reference(one).losses, rel=contract.TOLERANCE["float64"])


@pytest.mark.usefixtures("at_length")
@pytest.mark.fast
@pytest.mark.parametrize("model", ["unet", "amoebanet", "gpt", "llama"])
def test_trains_the_zoo_like_single(model: str) -> None:
    contract.check_training(gentle(case(model)))


@pytest.mark.parametrize("model", ["norms", "gpt", "llama"])
def test_trains_in_float32(model: str) -> None:
    contract.check_training(replace(gentle(case(model)), dtype="float32"))


@pytest.mark.parametrize(("data", "micro_batches"), [(1, 3), (2, 1), (3, 1), (3, 2)])
def test_trains_with_any_number_of_replicas_and_micro_batches(data: int, micro_batches: int) -> None:
    contract.check_training(case("skips", data, micro_batches, samples=12))


@pytest.mark.parametrize("data", [2, 3])
def test_running_statistics_are_the_mean_over_replicas(data: int) -> None:
    contract.check_statistics(case("norms", data, samples=12))


@pytest.mark.parametrize("model", ["pairs", "shared", "gpt"])
def test_states_move(model: str) -> None:
    contract.check_state_moves(case(model))


def test_states_move_in_shards_of_different_sizes() -> None:
    contract.check_state_moves(case("tokens", 3, samples=12))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_runs_its_schedule(options: dict[str, Any]) -> None:
    contract.check_trace(case("tied", 2, 3, 12, **options))


def test_alone_it_has_no_collectives() -> None:
    alone = case("norms", 1, 2)
    contract.check_trace(alone)
    assert "collective" not in alone.engine.schedule(alone.plan, contract.profile_of(alone.model)).text()


@pytest.mark.parametrize("layer", [1, 13])
def test_a_crash_reaches_the_caller(layer: int) -> None:
    contract.check_crash(case("skips"), layer)


def test_accepts_what_it_is_tested_with() -> None:
    contract.check_accepts(case("skips"))


def test_collectives_take_their_time() -> None:
    """A pass is noted without them: none is empty, and together they fill the step."""
    gpt = case("gpt", micro_batches=3, samples=12)

    def trace(session: FSDPSession) -> Trace:
        for _ in range(2):
            session.step(gpt.model.sample(12))
        return session.trace()

    traced = run_session(gpt.engine, gpt.model, gpt.plan, gpt.spec, trace).only(1)
    seconds: Counter[str] = Counter()
    for span in traced.spans:
        assert span.end_s > span.start_s, span
        seconds["collective" if "collective" in span.op else "compute"] += span.end_s - span.start_s
    assert all(seconds[kind] > 0.05 * traced.window_s for kind in ("collective", "compute"))
    assert 0.8 * traced.window_s < seconds.total() <= traced.window_s


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_sends_what_the_simulator_says(options: dict[str, Any]) -> None:
    """Where ranks divide the rows of each weight; others are padded."""

    def layers() -> list[nn.Module]:
        twice = nn.Linear(8, 8)
        return [twice, nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 8), twice]

    net = Network("even", layers, lambda n: torch.randn(n, 8), lambda n: torch.randn(n, 8), networks._squares)
    plan = replace(Plan.contiguous([5], 3), mesh=Mesh(data=2))
    even = Case(build(Config(**options)), net, plan, "float32", samples=12)
    profile = count(net, 2, "float32")
    done = simulate(even.engine.schedule(plan, profile), plan, profile, Cluster(devices_per_node=2), named("sgd_fp32"))
    sent = run_session(even.engine, net, plan, even.spec, lambda session: session.step(net.sample(12)).bytes_sent)
    assert sent == done.figures["bytes_sent"]
    assert sent.keys() == {"all_gather", "reduce_scatter"}


@pytest.mark.parametrize(
    ("options", "weights", "gradients"),
    [
        ({"group_mb": 0}, 1 / 4 + 2 / 16 + 3 * 8 / 16, 1 / 4),
        ({}, 1 / 4 + 2 / 16 + 3 * 14 / 16, 1 / 4),
        ({"reshard_after_forward": False}, 1 / 4 + 1 + 14 / 16, 1 / 4),
        ({"reduce_each": False}, 1 / 4 + 2 / 16 + 3 * 14 / 16, 1),
    ],
)
def test_the_memory_model_has_the_shards(options: dict[str, Any], weights: float, gradients: float) -> None:
    """The root, here 2 bytes that two layers share, and the largest group three times: 8 bytes or 14."""
    tied = LayerProfile("tied", param_bytes=2, tied=(Tied("tied.weight", 2),))
    profile = ModelProfile((tied, LayerProfile("a", param_bytes=6), LayerProfile("b", param_bytes=8), tied))
    model = build(Config(**options)).memory(MemoryModel(optimizer=2.0), Mesh(data=4), profile)
    assert (model.weights, model.gradients, model.optimizer) == (weights, gradients, 0.5)


@pytest.mark.parametrize("group_mb", [-1.0, float("nan")])
def test_a_group_cannot_hold_less_than_nothing(group_mb: float) -> None:
    assert fsdp_config.check(Config(group_mb=0)) == []
    (found,) = fsdp_config.check(Config(group_mb=group_mb))
    assert found.key == "engine.group_mb" and found.fixes == ({"engine.group_mb": 0.25},)
