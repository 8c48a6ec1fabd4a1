"""What an engine takes beyond its layers: known costs are found again, and a slow engine is seen to be slow."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from omegaconf import DictConfig

from engines.single import session as single
from harness.cli.compose import compose
from harness.config import cluster_config, registry
from harness.core.cluster import Device, EngineCosts, Link, TaskCost
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.problem import Problem, refuse
from harness.core.products import Product
from harness.core.trace import Trace
from harness.host.machine import Machine
from harness.interfaces import Engine
from harness.runtime.training_state import intra_op_threads
from harness.worker import measure_engine
from harness.worker.measure_engine import CHAINS, Seen, TinyChain, fitted, in_halves, took_s, with_halves

KNOWN = {
    "F": TaskCost("F", 3e-4, 2e-5, 5e-6, 1e-10, share=0.1),
    "B": TaskCost("B", 2e-4, 0.0, 1e-5, 0.0, 3e-5, 1e-9, share=0.2),
    "step": TaskCost("step", 5e-5, 0.0, 4e-6, 2e-11),
}


HERE = Machine(Device("cpu", 10**10, {"float32": 1e11}, 1e10, kernel_s=1e-6), Link(1e-5, 1e-9), None, 1.6, 1.8)


def composed(engine: str) -> DictConfig:
    extra = {"sbp": ["planner=autoddl"], "periodic": ["planner=madpipe"]}.get(engine, [])
    return compose([f"engine={engine}", "model=mlp", *extra])


def profile_of(depth: int, matmuls: int, width: int, norms: int = 0, rows: int = 0) -> ModelProfile:
    """As it would be measured, but for the noise."""
    kernel_s = 1e-6 * max(10, rows)
    size = 4 * (width + 1) * width
    products = tuple(Product(f"{n}", in_=width, out=width, weight_bytes=size) for n in range(matmuls))
    one = LayerProfile(
        forward_s=kernel_s * matmuls,
        backward_s=2 * kernel_s * matmuls,
        param_bytes=size * matmuls + 8 * width * norms,
        weights=2 * matmuls + 2 * norms,
        norms=norms,
        norm_bytes=norms * 4 * 2 * width * max(1, rows),
        output_bytes=4 * 2 * width * max(1, rows),
        saved_bytes=4 * 2 * width * max(1, rows),
        products=products,
    )
    layers = tuple(replace(one, name=str(number)) for number in range(depth))
    return ModelProfile(layers, "chain", measure_engine.SAMPLES, lock_share=0.5, times="measured")


def as_measured(engine: str, costs: EngineCosts, trace: bool = True, split: bool = False) -> tuple[Engine, list[Seen]]:
    """Runs of all chains that take exactly what a simulation with these costs says; `split`: with backward passes in
    halves."""
    built: Engine = registry.build("engine", registry.defaults("engine", engine))
    if split:
        built = in_halves(built, engine) or built
    found = []
    for chain, micro_batches in CHAINS:
        config = measure_engine._config(composed(engine), micro_batches)
        cluster = cluster_config.build(cluster_config.from_group(config.cluster), HERE)
        draft = measure_engine._draft(config, built, profile_of(*chain), cluster)
        truth = measure_engine._again(config, built, draft, costs)
        steps = [truth.simulation.figures["step_time_s"]] * 4
        shown = truth.simulation.trace
        repeated = Trace(tuple(replace(span, step=n) for n in range(4) for span in shown.spans), shown.steps * 4)
        found.append(measure_engine._looked_at(draft, steps, repeated if trace else Trace(())))
    return built, found


ENGINES = ("single", "ddp", "fsdp", "pipeline", "gpipe", "myelin", "periodic", "torch_pipelining", "deepspeed", "sbp")


@pytest.mark.parametrize("engine", ENGINES)
def test_known_costs_are_found_again(engine: str) -> None:
    """Also where devices share cores, or their threads a lock, so that they make each other's tasks longer. Steps are
    simulated as long as they were."""
    known = EngineCosts(engine, "sgd", tuple(KNOWN.values()), 1e-4, 5e-4)
    built, seen = as_measured(engine, known)
    found = fitted(composed(engine), built, seen)
    for one in seen:
        again = measure_engine._again(composed(engine), built, one.draft, found)
        for kind, seconds in took_s(again.simulation.trace, again).items():
            assert seconds == pytest.approx(one.took_s[kind], rel=0.05), (engine, kind)
        assert again.simulation.figures["step_time_s"] == pytest.approx(one.step_s, rel=0.05)


SPLIT = (TaskCost("I", 2e-4, 0.0, 4e-6, share=0.1), TaskCost("W", 0.0, 0.0, 2e-5, 5e-11))


@pytest.mark.parametrize("engine", ["pipeline", "torch_pipelining"])
def test_halves_of_backward_passes_are_found_next_to_whole_ones(engine: str) -> None:
    whole = EngineCosts(engine, "sgd", tuple(KNOWN.values()), 1e-4, 5e-4)
    built, seen = as_measured(engine, replace(whole, ops=(*whole.ops, *SPLIT)), split=True)
    assert {"I", "W"} <= {kind for one in seen for kind in one.took_s}
    found = with_halves(composed(engine), built, seen, whole)
    assert found.ops[: len(KNOWN)] == whole.ops
    assert [one.kind for one in found.ops[len(KNOWN) :]] == ["I", "W"]
    for one in seen:
        again = measure_engine._again(composed(engine), built, one.draft, found)
        for kind, seconds in took_s(again.simulation.trace, again).items():
            assert seconds == pytest.approx(one.took_s[kind], rel=0.05), (engine, kind)


def test_whole_backward_passes_of_a_first_stage_are_no_halves() -> None:
    """There I does nothing, and W is the whole pass."""
    for one in as_measured("pipeline", EngineCosts("pipeline", "sgd"), split=True)[1]:
        spans = one.draft.simulation.trace.spans
        weights = [span.end_s - span.start_s for span in spans if span.parsed.kind == "W" and span.parsed.stage == 1]
        assert one.took_s["W"] == pytest.approx(statistics.fmean(weights))


def test_engines_without_halves_are_measured_once() -> None:
    for engine in ENGINES:
        built: Engine = registry.build("engine", registry.defaults("engine", engine))
        assert (in_halves(built, engine) is not None) == (engine in ("pipeline", "torch_pipelining")), engine


def test_an_engine_that_takes_nothing_costs_nothing() -> None:
    built, seen = as_measured("ddp", EngineCosts("ddp", "sgd"))
    found = fitted(composed("ddp"), built, seen)
    assert (found.host_s, found.step_s) == pytest.approx((0, 0), abs=1e-9)
    for one in found.ops:
        costs = (one.base_s, one.layer_s, one.weight_s, one.byte_s, one.norm_s, one.norm_byte_s)
        assert costs == pytest.approx((0,) * 6, abs=1e-9) and one.share == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("engine", ["torchgpipe", "pipeline"])
def test_without_a_trace_steps_take_as_long(engine: str) -> None:
    """All that they take longer is the host's."""
    built, seen = as_measured(engine, EngineCosts(engine, "sgd", host_s=2e-3), trace=False)
    found = fitted(composed(engine), built, seen)
    assert found.ops == ()
    for one in seen:
        again = measure_engine._again(composed(engine), built, one.draft, found)
        assert again.simulation.figures["step_time_s"] == pytest.approx(one.step_s, rel=0.1)


def test_the_quicker_steps_count() -> None:
    """Each part is of the same steps; others use the machine, too."""
    built, seen = as_measured("ddp", EngineCosts("ddp", "sgd", tuple(KNOWN.values())))
    draft = seen[0].draft
    shown = measure_engine._again(composed("ddp"), built, draft, EngineCosts("ddp", "sgd")).simulation.trace
    slow = tuple(replace(span, start_s=9 * span.start_s, end_s=9 * span.end_s, step=1) for span in shown.spans)
    both = Trace(shown.spans + slow, (shown.steps[0], (0.0, 9 * shown.steps[0][1])))
    found = measure_engine._looked_at(draft, [shown.steps[0][1], 9 * shown.steps[0][1]], both)
    assert found.step_s == shown.steps[0][1]
    assert found.took_s == took_s(shown, draft)


def test_short_steps_are_measured_more_often() -> None:
    """As many as a simulation does in a second: all ranks count the same, whatever time theirs take."""
    draft = as_measured("ddp", EngineCosts("ddp", "sgd"))[1][0].draft

    def steps(seconds: float) -> int:
        simulation = replace(draft.simulation, figures={"step_time_s": seconds})
        return measure_engine._steps(replace(draft, simulation=simulation))

    assert [steps(1e-4), steps(0.1), steps(5.0)] == [measure_engine.MOST, 10, measure_engine.FEWEST]


def test_an_engine_that_cannot_train_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_engine, "_seen", lambda *given: refuse([Problem("model", "chain", "is too small")]))
    found = measure_engine.measure(composed("ddp"), HERE)
    assert found.ops == () and "cannot train a small chain of layers" in found.why and "is too small" in found.why


def test_a_slow_engine_is_seen_to_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two milliseconds before each micro-batch: one for each of its two tasks."""
    run: Any = single._Task.run
    monkeypatch.setattr(single._Task, "run", lambda *given: (time.sleep(2e-3), run(*given))[1])
    with intra_op_threads(1):
        found = measure_engine.measure(composed("single"), HERE)
    assert 0.7e-3 < found.host_s < 2e-3


def test_the_chain_is_a_model() -> None:
    model = TinyChain(3, 2, 8)
    assert len(model.layers()) == 3
    batch = model.sample(5)
    assert model.loss(model.layers()(batch.inputs), batch.targets).shape == torch.Size([])
