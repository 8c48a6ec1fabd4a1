"""Megatron-LM and DeepSpeed with tensor parallelism, as papers have them: planned and simulated, never run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engines.deepspeed.engine import Config, build
from harness.checks.engine_support import early
from harness.checks.mesh import resolve
from harness.checks.plan_fits import MEMORY
from harness.cli.compose import compose
from harness.config import registry
from harness.core.cluster import Cluster, Device, Link
from harness.core.memory_model import named
from harness.core.model_profile import ModelProfile
from harness.core.plan import Mesh
from harness.core.problem import CannotRun, Problem
from harness.planning.draft import Draft, draft
from harness.run.metrics import simulated
from tests.harness.sbp.nets import transformer
from tests.problems import keys, refused, row, rows

LAYERS, HIDDEN, TOKENS, WORDS, SAMPLES, M = 4, 48, 16, 250, 2, 3
KEYS = ("engine=deepspeed", "cluster=summit", "optimizer.name=adam", "precision=fp16")
MEGATRON = ("planner=megatron", "planner.dimensions=1")
SIX = Cluster("six", 4, 6, Device(memory_bytes=10**9, peak_flops={"float16": 1e12}), Link(1e-6, 1e-9), Link(1e-5, 1e-8))
UNIT = 2 / 3 * SAMPLES * TOKENS * HIDDEN * 2
"""Bytes of half an all-reduce of what is between two layers: (g - 1) / g of it in float16, g = 3."""


def net() -> ModelProfile:
    """In float16, each layer with a second forward and two backward; 250 words do not divide by 3."""
    whole = transformer(LAYERS, HIDDEN, 12, TOKENS, WORDS, SAMPLES)
    layers = [
        replace(layer, forward_s=1.0, backward_s=2.0, flops=sum(one.flops(SAMPLES) for one in layer.products))
        for layer in whole.layers
    ]
    return replace(whole, layers=tuple(layers), dtype="float16")


def planned(
    tensor: int = 3, pipeline: int = 1, data: int = 1, checkpoint: str = "always", cluster: Cluster = SIX,
    planner: tuple[str, ...] = MEGATRON, zero: int = 0,
) -> Draft:  # fmt: skip
    mesh = [f"mesh.tensor={tensor}", f"mesh.pipeline={pipeline}", f"mesh.data={data}"]
    batch = [f"batch.size={SAMPLES * M * data}", f"batch.micro_batches={M}"]
    config = compose([*KEYS, *planner, *mesh, *batch, f"engine.checkpoint={checkpoint}", f"engine.zero={zero}"])
    engine = registry.build("engine", config.engine)
    return draft(config, engine, registry.build("planner", config.planner), net(), cluster)


def sent(found: Draft) -> dict[str, int]:
    """Units that a device sends for each micro-batch, by phase."""
    phases: dict[str, float] = {}
    for one in (one for stage in found.plan.traffic for one in stage):
        phases[one.phase] = phases.get(one.phase, 0.0) + one.bytes / UNIT
    return {phase: round(units) for phase, units in phases.items()}


def test_a_layer_has_six_all_reduces_with_recomputation() -> None:
    """Two forward, two again, two back: twelve units; next to them the embedding has one each time, the head two."""
    assert sent(planned()) == {
        "forward": 4 * LAYERS + 2, "recompute": 4 * LAYERS + 1, "backward": 4 * LAYERS + 2,
    }  # fmt: skip
    assert sent(planned(checkpoint="never")) == {"forward": 4 * LAYERS + 2, "backward": 4 * LAYERS + 2}


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_the_step_of_one_stage(checkpoint: str) -> None:
    """Every micro-batch, the last one too, computes all layers but the head again."""
    found = planned(checkpoint=checkpoint)
    layers = LAYERS + 2
    again = layers - 1 if checkpoint == "always" else 0
    computing = (3 * layers + again) / 3
    talking = sum(one.seconds for one in found.plan.traffic[0])
    figures = found.simulation.figures
    assert figures["step_time_s"] == pytest.approx(M * (computing + talking))
    assert talking == pytest.approx(sum(sent(found).values()) * (UNIT * 1e-9 + 2 * 1e-6))
    phases = found.plan.predicted["communication_by_phase_s"]
    assert M * talking == pytest.approx(sum(phases.values())) == pytest.approx(found.plan.predicted["communication_s"])
    assert ("recompute" in phases) == bool(again)


def test_stages_send_a_shard_each_and_wait_for_one_another() -> None:
    found = planned(pipeline=2)
    assert found.schedule.rendezvous and found.schedule.tensor == 3
    kinds = [op.kind for queue in found.schedule.queues if queue.device == 1 for op in queue.ops]
    assert kinds[:3] == ["recv", "F", "collective"] and "R" not in kinds
    whole = SAMPLES * TOKENS * HIDDEN * 4  # the profile's bytes are those of float32
    assert found.simulation.figures["bytes_sent"]["activations"] == M * whole


@pytest.mark.parametrize("pipeline", [1, 2])
def test_gradients_go_to_the_owners_of_shards(pipeline: int) -> None:
    """Of ZeRO's optimizer: no more bytes than Megatron-LM's all-reduce, in two parts."""
    zero, plain = (planned(data=2, pipeline=pipeline, zero=zero).simulation.figures["bytes_sent"] for zero in (1, 0))
    assert zero["reduce_scatter"] == zero["all_gather"] == plain["all_reduce"] > 0
    assert "all_reduce" not in zero and "reduce_scatter" not in plain


def test_a_stage_may_span_two_nodes() -> None:
    """Two blocks of the second one send through the ports of their nodes, in rings of twelve."""
    traffic = planned(tensor=12, pipeline=2).plan.traffic[1]
    (forward,) = (one for one in traffic if (one.algorithm, one.phase) == ("reduce_scatter", "forward"))
    assert forward.seconds == pytest.approx(4 * 11 * 1e-5 + forward.bytes * 1e-8)


def test_flops_of_the_hardware_are_those_of_the_paper() -> None:
    """96 b s l h^2 (1 + s / 6h + V / 16lh), with all layers but the head computed again."""
    found = planned(pipeline=2, data=2)
    b, s, l, h = SAMPLES * M * 2, TOKENS, LAYERS, HIDDEN  # noqa: E741
    metrics = simulated(found.simulation, found, compose([*KEYS, *MEGATRON]))
    step_s = metrics["step_time_s"]
    paper = 96 * b * s * l * h**2 * (1 + s / (6 * h) + WORDS / (16 * l * h))
    model = 72 * b * s * l * h**2 * (1 + s / (6 * h) + WORDS / (12 * l * h))
    assert metrics["hardware_flops_per_s"] * step_s == pytest.approx(paper)
    assert metrics["model_flops_per_s"] * step_s == pytest.approx(model)
    assert metrics["hardware_percent_of_peak"] == pytest.approx(100 * paper / step_s / (12 * 1e12))


# memory


def test_the_state_of_a_shard() -> None:
    """20 bytes a parameter for Megatron-LM; with ZeRO 1 and 8 replicas 4 and 12 / 8, next to what is being summed."""
    adam, profile = named("adam_fp32"), net()
    whole = build(Config(zero=0)).memory(adam, Mesh(1, 2, 3), profile)
    assert 2 * (whole.weights + whole.gradients + whole.optimizer) == 20
    sharded = build(Config(zero=1)).memory(adam, Mesh(8, 2, 3), profile)
    assert (2 * sharded.weights, 2 * sharded.optimizer) == (2, 12 / 8)
    assert build(Config(zero=0)).memory(adam, Mesh(1, 2, 3), replace(profile, dtype="float32")).optimizer == 2


def test_a_shard_of_a_large_model_fills_more_of_a_bucket() -> None:
    large = replace(net(), layers=tuple(replace(layer, param_bytes=10**9, tied=()) for layer in net().layers))
    one, many = (build(Config()).memory(named("adam_fp32"), Mesh(2, 1, tensor), large) for tensor in (1, 6))
    assert (one.reducing, many.reducing) == (pytest.approx(1 / 6), 1.0)


def test_recomputed_layers_keep_what_enters_them() -> None:
    """Of each micro-batch in flight the inputs of layers, while one goes back all that its layer saves."""
    always, never = (planned(checkpoint=way, pipeline=2).simulation.peaks[0].contents for way in ("always", "never"))
    between, tokens = SAMPLES * TOKENS * HIDDEN * 4 // 3, 8 * SAMPLES * TOKENS // 3
    assert always["saved"] == 2 * (2 * between + tokens), "two micro-batches, two blocks and the embedding"
    assert always["saved"] < never["saved"] / 5


def test_strategies_then_decide_of_the_state_alone() -> None:
    """Inputs of products wait for no backward pass."""
    always, never = (planned(checkpoint=way).plan.predicted["held_bytes"] for way in ("always", "never"))
    assert always == pytest.approx(10 * net().parameter_bytes(0, LAYERS + 1) / 3, abs=1)
    assert never > always


def test_a_plan_that_fits_because_it_is_recomputed_is_found() -> None:
    """On devices with three quarters of what activations take without recomputation."""
    free = planned(checkpoint="never").simulation.peaks[0]
    state = sum(free.contents[part] for part in ("weights", "gradients", "optimizer"))
    small = replace(SIX, device=replace(SIX.device, memory_bytes=state + (free.bytes - state) * 3 // 4))
    with pytest.raises(CannotRun) as caught:
        planned(checkpoint="never", cluster=small)
    assert keys(refused(caught)) == [MEMORY]
    assert planned(cluster=small).plan.mesh.tensor == 3


# refusals


def asked(*overrides: str) -> list[Problem]:
    config = compose(["engine=deepspeed", *overrides])
    cluster = Cluster("local", 1, 4, cores=4.0) if config.cluster.name == "local" else SIX
    return early(config, registry.build("engine", config.engine), cluster)


def test_nothing_here_runs_shards() -> None:
    (problem,) = asked("mesh.tensor=2")
    assert row(problem) == ("mesh.tensor", 2, ["mesh.tensor=1", "mode=simulate cluster=summit"])
    assert "engine=deepspeed with cluster=local" in problem.message
    assert asked("mesh.tensor=2", "planner=megatron", "precision=fp16", "mode=simulate", "cluster=summit") == []
    (problem,) = asked("planner=megatron")
    assert (problem.key, problem.value) == ("planner", "megatron")


def test_half_precision_without_zero_is_for_described_clusters() -> None:
    assert rows(asked("precision=bf16")) == [("precision.dtype", "bfloat16", ["engine.zero=1"])]
    assert asked("precision=fp16", "mode=simulate", "cluster=summit") == []


def test_there_are_as_many_shards_as_are_asked_for() -> None:
    can = build(Config()).capabilities
    config = compose(["engine=deepspeed", "cluster=summit", "mode=simulate"])
    assert resolve(config, can, 6, layers=100) == Mesh(1, 6, 1)
    config.mesh.tensor = 3
    assert resolve(config, can, 6, layers=100) == Mesh(1, 2, 3)


def test_a_plan_that_splits_nothing() -> None:
    with pytest.raises(CannotRun) as caught:
        planned(pipeline=2, planner=("planner=uniform",))
    assert keys(refused(caught)) == ["engine"]
