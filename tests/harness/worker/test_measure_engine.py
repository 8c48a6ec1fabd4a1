"""What an engine takes beyond its layers: known costs are found again, and a slow engine is seen to be slow."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from omegaconf import DictConfig

from engines.single import session as single
from harness.cli.compose import compose
from harness.config import registry
from harness.core.cluster import EngineCosts, TaskCost
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.trace import Trace
from harness.interfaces import Engine
from harness.runtime.training_state import intra_op_threads
from harness.schedule.step_parts import parts_s
from harness.worker import measure_engine
from harness.worker.measure_engine import CHAINS, Seen, TinyChain, fitted, took_s

KNOWN = {
    "F": TaskCost("F", 3e-4, 2e-5, 5e-6, 1e-10),
    "B": TaskCost("B", 2e-4, 0.0, 1e-5, 0.0),
    "step": TaskCost("step", 5e-5, 0.0, 4e-6, 2e-11),
}


def chosen(engine: str) -> tuple[DictConfig, Engine]:
    extra = {"sbp": ["planner=autoddl"], "periodic": ["planner=madpipe"]}.get(engine, [])
    config = measure_engine._config(compose([f"engine={engine}", "model=mlp", *extra]))
    return config, registry.build("engine", config.engine)


def profile_of(depth: int, matmuls: int, width: int) -> ModelProfile:
    """As it would be measured, but for the noise."""
    one = LayerProfile(
        forward_s=1e-5 * matmuls,
        backward_s=2e-5 * matmuls,
        param_bytes=4 * (width + 1) * width * matmuls,
        weights=2 * matmuls,
        output_bytes=4 * 2 * width,
        saved_bytes=4 * 2 * width,
    )
    layers = tuple(replace(one, name=str(number)) for number in range(depth))
    return ModelProfile(layers, "chain", measure_engine.SAMPLES, lock_share=0.5, times="measured")


def as_measured(config: DictConfig, engine: Engine, chain: tuple[int, int, int], costs: EngineCosts) -> Seen:
    """A run that takes exactly what a simulation with these costs says."""
    draft = measure_engine._draft(config, engine, profile_of(*chain), measure_engine._cluster(config))
    truth = measure_engine._again(config, engine, draft, costs)
    parts = parts_s(truth.simulation.trace, truth.schedule)
    assert parts
    return Seen(draft, took_s(truth.simulation.trace), parts["host"] / measure_engine._tasks(draft))


@pytest.mark.parametrize("engine", ["single", "ddp", "fsdp", "pipeline", "gpipe", "torch_pipelining", "deepspeed"])
def test_known_costs_are_found_again(engine: str) -> None:
    """Also where devices share cores, or their threads a lock, so that they make each other's tasks longer."""
    config, built = chosen(engine)
    known = EngineCosts(engine, "sgd", tuple(KNOWN.values()), 1e-4)
    seen = [as_measured(config, built, chain, known) for chain in CHAINS]
    found = fitted(config, built, seen)
    for one in seen:
        again = took_s(measure_engine._again(config, built, one.draft, found).simulation.trace)
        for kind, seconds in one.took_s.items():
            assert again[kind] == pytest.approx(seconds, rel=0.05), (engine, kind)
    assert found.host_s == pytest.approx(known.host_s, rel=0.3)


def test_an_engine_that_takes_nothing_costs_nothing() -> None:
    config, built = chosen("ddp")
    nothing = EngineCosts("ddp", "sgd")
    found = fitted(config, built, [as_measured(config, built, chain, nothing) for chain in CHAINS])
    assert found.host_s == pytest.approx(0, abs=1e-9)
    for one in found.ops:
        assert (one.base_s, one.layer_s, one.weight_s, one.byte_s) == pytest.approx((0, 0, 0, 0), abs=1e-9)


def test_an_engine_without_a_trace_takes_its_time_before_tasks() -> None:
    config, built = chosen("torchgpipe")
    draft = measure_engine._draft(config, built, profile_of(4, 1, 16), measure_engine._cluster(config))
    longer_s = 0.032
    steps = [draft.simulation.figures["step_time_s"] + longer_s] * 8
    seen = measure_engine._looked_at(draft, steps, Trace(()))
    assert seen.took_s == {}
    assert seen.host_s * measure_engine._tasks(draft) == pytest.approx(longer_s)


@pytest.mark.usefixtures("computation")
def test_a_slow_engine_is_seen_to_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two milliseconds before each micro-batch: one for each of its two tasks."""
    run: Any = single._Task.run
    monkeypatch.setattr(single._Task, "run", lambda *given: (time.sleep(2e-3), run(*given))[1])
    with intra_op_threads(1):
        found = measure_engine.measure(compose(["engine=single", "model=mlp"]))
    assert 0.7e-3 < found.host_s < 2e-3


def test_the_chain_is_a_model() -> None:
    model = TinyChain(3, 2, 8)
    assert len(model.layers()) == 3
    batch = model.sample(5)
    assert model.loss(model.layers()(batch.inputs), batch.targets).shape == torch.Size([])
