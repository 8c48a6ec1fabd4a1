"""engine=delayed trains as engine=periodic does, to the last bit, and both as a naive loop over micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch import nn

from engines.delayed.engine import Config as DelayedConfig
from engines.delayed.engine import DelayedEngine
from engines.periodic import weight_versions
from engines.periodic.engine import Config, PeriodicEngine
from harness.core.plan import Mesh, Plan, Stage
from harness.core.staleness import VERSIONS, Corrections
from harness.interfaces import Batch, Engine, Model, OptimizerSpec, SessionSpec
from harness.runtime.training_state import intra_op_threads
from planners.block_partition import even
from tests.engines import naive_delays, networks
from tests.engines.naive_delays import Pipeline, Reported
from tests.engines.periodic.patterns import plan

MOMENTUM = OptimizerSpec("sgd", lr=0.05, momentum=0.9, weight_decay=0.01)
PLAIN = OptimizerSpec("sgd", lr=0.05)
ADAM = OptimizerSpec("adam", lr=0.01)
NADAM = OptimizerSpec("nadam", lr=0.01, beta1=0.99)
MUON = OptimizerSpec("muon", lr=0.01, weight_decay=0.1)
SPEC = SessionSpec(("cpu",) * 4, MOMENTUM, "float64", seed=7)
STEPS = 3
M = 12
CORRECTIONS = {
    "none": Corrections(),
    "prediction": Corrections(prediction=True),
    "round trip": Corrections(prediction=True, round_trip=True),
    "error feedback": Corrections(error_feedback=True),
    "learning rate": Corrections(lr_steps=20),
    "look-ahead": Corrections(look_ahead=0.9),
    "all": Corrections(prediction=True, error_feedback=True, look_ahead=0.5, lr_steps=7),
}
OF_NONE = {
    "discrepancy": Corrections(discrepancy=0.135),
    "discrepancy and all": Corrections(discrepancy=0.5, error_feedback=True, look_ahead=0.5, lr_steps=7),
}
"""Those of engine.versions=none."""


def on_one_device(chosen: Plan) -> Plan:
    stages = tuple(Stage(stage.first, stage.last, 0) for stage in chosen.stages)
    return Plan(Mesh(), stages, chosen.micro_batches)


def flights(chosen: Plan) -> list[int]:
    """Micro-batches in flight in each stage of a pattern."""
    assert chosen.pattern is not None
    return weight_versions.stored(weight_versions.schedule(chosen, chosen.pattern, M, M))


def ways_back(chosen: Plan) -> list[int]:
    """Backward tasks of each stage until a micro-batch has gone to the first one."""
    assert chosen.pattern is not None
    return weight_versions.ways_back(chosen.pattern)


def trained(engine: Engine, model: Model, chosen: Plan, spec: SessionSpec, batches: Sequence[Batch]) -> Reported:
    reported = Reported()
    with engine.session(model, chosen, spec) as session, intra_op_threads(1):
        for batch in batches:
            reported.losses.append(session.step(batch).loss)
            state = session.state_dict()
            moments = {f"{name} {key}": v for name, kept in state["optimizer"].items() for key, v in kept.items()}
            reported.states.append({**state["model"], **{k: v for k, v in moments.items() if torch.is_tensor(v)}})
    return reported


def batches_of(model: Model, samples: int = 24, steps: int = STEPS) -> list[Batch]:
    torch.manual_seed(3)
    return [model.sample(samples) for _ in range(steps)]


def matrices() -> networks.Network:
    """Weights of two dimensions only, which Muon updates."""

    def layers() -> list[nn.Module]:
        return [layer for _ in range(3) for layer in (nn.Linear(6, 6, bias=False), nn.Tanh())]

    def samples(n: int) -> torch.Tensor:
        return torch.randn(n, 6)

    return networks.Network("matrices", layers, samples, samples, lambda out, target: ((out - target) ** 2).sum())


def compared(
    model: networks.Network,
    chosen: Plan,
    versions: str,
    every: int | None,
    corrections: Corrections,
    spec: SessionSpec,
    batches: Sequence[Batch],
) -> tuple[Reported, DelayedEngine]:
    """Losses, weights and moments of both engines are equal to the bit."""
    periodic = PeriodicEngine(Config(versions=versions, update_every=every, corrections=corrections))
    counts, alone = flights(chosen), on_one_device(chosen)
    delayed = DelayedEngine(
        DelayedConfig(
            stages=len(counts),
            in_flight=counts,
            way_back=ways_back(chosen),
            versions=versions,
            update_every=every,
            drain=True,
            corrections=corrections,
        )
    )
    assert delayed.update_every(alone) == periodic.update_every(chosen)
    real = trained(periodic, model, chosen, spec, batches)
    mine = trained(delayed, model, alone, spec, batches)
    assert mine.losses == real.losses
    for one, other in zip(mine.states, real.states, strict=True):
        assert one.keys() == other.keys()
        assert [name for name in one if not torch.equal(one[name], other[name])] == []
    return mine, delayed


def check(
    model: networks.Network,
    chosen: Plan,
    versions: str,
    every: int | None,
    corrections: Corrections = Corrections(),  # noqa: B008
    optimizer: OptimizerSpec = MOMENTUM,
    samples: int = 24,
) -> None:
    spec, batches = replace(SPEC, optimizer=optimizer), batches_of(model, samples)
    mine, delayed = compared(model, chosen, versions, every, corrections, spec, batches)
    alone, counts = on_one_device(chosen), flights(chosen)
    pipe = Pipeline(
        M,
        delayed.update_every(alone),
        chosen.balance,
        counts,
        versions,
        corrections=asdict(corrections),
        ways_back=ways_back(chosen),
    )
    with intra_op_threads(1):
        naive = naive_delays.train(model, spec, batches, pipe)
    torch.testing.assert_close(mine.losses, naive.losses, rtol=1e-11, atol=0)
    for one, other in zip(mine.states, naive.states, strict=True):
        torch.testing.assert_close({name: one[name] for name in other}, other, rtol=1e-9, atol=1e-11)


@pytest.mark.fast
@pytest.mark.parametrize("versions", VERSIONS)
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_every_versioning(stages: int, versions: str) -> None:
    model = networks.skips()
    check(model, plan(even(len(model.layers()), stages), M), versions, None)


@pytest.mark.parametrize("corrections", CORRECTIONS)
@pytest.mark.parametrize("versions", VERSIONS)
def test_every_correction(versions: str, corrections: str) -> None:
    check(networks.tokens(), plan([2, 2, 1, 1], M), versions, None, CORRECTIONS[corrections])


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("corrections", OF_NONE)
def test_corrections_of_backward_weights(corrections: str, every: int) -> None:
    check(networks.tokens(), plan([2, 2, 1, 1], M), "none", every, OF_NONE[corrections])


@pytest.mark.parametrize("versions", ["stash", "none"])
def test_all_stages_predict_weights_of_one_time(versions: str) -> None:
    """On ways that take longer, and with updates of several micro-batches."""
    chosen = plan([4, 4, 2, 4], M, slack=3)
    assert max(ways_back(chosen)) > 2
    check(networks.skips(), chosen, versions, None, CORRECTIONS["round trip"], ADAM)
    check(networks.skips(), chosen, versions, 2, CORRECTIONS["round trip"])


@pytest.mark.parametrize("optimizer", [PLAIN, ADAM, NADAM], ids=["plain", "adam", "nadam"])
@pytest.mark.parametrize("versions", ["stash", "none"])
def test_every_optimizer(versions: str, optimizer: OptimizerSpec) -> None:
    check(networks.tokens(), plan([2, 2, 2], M), versions, None, CORRECTIONS["all"], optimizer)


@pytest.mark.parametrize("versions", ["2bw", "stash"])
def test_muon(versions: str) -> None:
    check(matrices(), plan([2, 2, 2], M), versions, None, CORRECTIONS["all"], MUON)


@pytest.mark.parametrize("every", [1, 2, 3, 6, 12])
@pytest.mark.parametrize("versions", ["stash", "none"])
def test_groups_whose_micro_batches_see_different_weights(versions: str, every: int) -> None:
    check(networks.tokens(), plan([2, 2, 1, 1], M), versions, every, CORRECTIONS["all"])


@pytest.mark.parametrize("versions", VERSIONS)
def test_more_in_flight_than_stages_and_several_stages_on_a_device(versions: str) -> None:
    """Messages take time: up to seven micro-batches are under way."""
    chosen = plan([4, 6, 4], M, slack=2)
    assert max(flights(chosen)) > len(chosen.stages)
    check(networks.skips(), chosen, versions, None, CORRECTIONS["prediction"])
    check(networks.skips(), plan([5, 6, 3], M, devices=[0, 1, 0]), versions, None, CORRECTIONS["prediction"])


@pytest.mark.parametrize("versions", VERSIONS)
def test_running_statistics_and_uneven_micro_batches(versions: str) -> None:
    check(networks.norms(), plan([3, 4, 3], M), versions, None, samples=29)


@pytest.mark.parametrize("versions", VERSIONS)
def test_a_batch_with_fewer_samples_than_micro_batches(versions: str) -> None:
    model, chosen = networks.tokens(), plan([2, 2, 1, 1], M)
    batches = [batches_of(model, samples, 1)[0] for samples in (24, 7, 24, 24)]
    compared(model, chosen, versions, None, CORRECTIONS["all"], SPEC, batches)


def test_autocast() -> None:
    model, chosen = networks.tokens(), plan([2, 2, 2], M)
    spec = replace(SPEC, dtype="float32", autocast="bfloat16")
    compared(model, chosen, "stash", None, CORRECTIONS["all"], spec, batches_of(model))


@pytest.mark.parametrize("versions", ["2bw", "stash"])
@pytest.mark.parametrize("name", ["shared", "tied"])
def test_layers_of_one_stage_share_weights(name: str, versions: str) -> None:
    """Under each of their names a state has the newest ones."""
    model = networks.ALL[name]
    check(model, plan([len(model.layers())], M), versions, None, CORRECTIONS["prediction"])


def test_versions_are_not_the_same_training() -> None:
    """Or the tests above would say nothing. Without delay corrections do nothing. With a delay of one update a learning
    rate is as it was, and the way back, of one micro-batch, ends before the next update of three."""
    model = networks.tokens()
    found: list[Any] = []
    for versions, every in {"flush": 12, "2bw": 3, "stash": 1, "none": 1}.items():
        for corrections in CORRECTIONS.values():
            pipe = Pipeline(
                M, every, [2, 2, 1, 1], [4, 3, 2, 1], versions, corrections=asdict(corrections), ways_back=[0, 0, 1, 1]
            )
            found.append(naive_delays.train(model, SPEC, batches_of(model), pipe).losses[-1])
    assert len(set(found)) == 1 + 5 + 7 + 7
