"""Whatever is recommended was tried: the run fits with it, and not with less."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig

from harness.checks import mesh, plan_fits
from harness.cli.compose import compose
from harness.config import registry
from harness.core.cluster import Cluster, Device, Link
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.problem import CannotRun, Problem, typed
from harness.planning import draft as planning_draft
from harness.planning import memory_advice
from tests.tiers import examples


def chain(layers: int, micro_batch: int, params: int, saved: int, output: int) -> ModelProfile:
    """Equal layers; `saved` and `output` bytes for each sample."""
    layer = LayerProfile("l", 1.0, 2.0, param_bytes=params, output_bytes=output * micro_batch,
                         saved_bytes=saved * micro_batch)  # fmt: skip
    return ModelProfile((layer,) * layers, "net", micro_batch, input_bytes=output * micro_batch, source="a test")


def cluster(devices: int, memory_bytes: int) -> Cluster:
    return Cluster("flat", 1, devices, Device(memory_bytes=memory_bytes), Link(0.0, 0.0))


def settled(*given: str, devices: int = 2) -> DictConfig:
    flat = ["cluster=flat", f"cluster.devices={devices}", "cluster.memory_gb=1", "cluster.bandwidth_gb_s=1"]
    return compose([*flat, "mode=simulate", *given])


def fits(config: DictConfig, profile: ModelProfile, on: Cluster) -> bool:
    """By the same way that a run goes."""
    engine, planner = registry.build("engine", config.engine), registry.build("planner", config.planner)
    draft = planning_draft.draft(config, engine, planner, profile, on)
    return plan_fits.check_memory(draft.plan, draft.plan.predicted["peak_memory_bytes"], on, draft.memory) == []


def test_checkpointing_where_that_is_enough() -> None:
    """Each of two stages keeps 2 x 100 bytes of 8 samples, or recomputes one of 8 micro-batches."""
    profile = chain(4, 1, params=10, saved=100, output=1)
    config = settled("batch.size=8", "batch.micro_batches=8", "engine.checkpoint=never")
    assert not fits(config, profile, cluster(2, 500))
    assert memory_advice.fitting(config, profile, cluster(2, 500)) == {"engine.checkpoint": "always"}


@pytest.mark.usefixtures("computation")
def test_checkpoints_and_offloading_where_both_are_needed() -> None:
    """Each of two stages has 8 MB of state, 4 with offloading, and keeps 2 x 8 MB of samples, or 8 of one again."""
    profile = chain(4, 1, params=10**6, saved=4 * 10**6, output=1)
    typed = ("engine=myelin", "optimizer.name=adam", "batch.size=8", "batch.micro_batches=8", "engine.bsize=1000")
    config, there = settled(*typed), cluster(2, 14 * 10**6)
    assert memory_advice.fitting(config, profile, there) == {"engine.checkpoint_every": "auto", "engine.offload": True}
    assert memory_advice.fitting(settled(*typed, "engine.offload=true"), profile, there) == {
        "engine.checkpoint_every": "auto"
    }


def test_checkpointing_is_not_recommended_where_it_does_not_help() -> None:
    profile = chain(4, 8, params=10, saved=100, output=1)
    config = settled("batch.size=64", "batch.micro_batches=8", "engine.checkpoint=except_last")
    assert memory_advice.fitting(config, profile, cluster(2, 700)) == {"batch.micro_batches": 32}


def test_of_fixes_of_one_key_the_fastest() -> None:
    """Layers that take equally long, of which the first two keep much more: the cut by memory is slow."""
    profile = chain(6, 4, params=10, saved=100, output=1)
    heavy = tuple(replace(layer, saved_bytes=4 * layer.saved_bytes) for layer in profile.layers[:2])
    profile = replace(profile, layers=(*heavy, *profile.layers[2:]))
    config = settled("batch.size=32", "batch.micro_batches=8", "engine=deepspeed")
    there = cluster(2, 7000)
    assert not fits(config, profile, there)
    for key, value in {"engine.checkpoint": "always", "planner.by": "memory"}.items():
        other = settled("batch.size=32", "batch.micro_batches=8", "engine=deepspeed", f"{key}={value}")
        assert fits(other, profile, there), key
    assert memory_advice.fitting(config, profile, there) == {"batch.micro_batches": 16}


def test_more_of_the_state_in_shards_where_replicas_have_it_whole() -> None:
    """Weights, gradients and moments are 4 x 10 GB whole, and 10 / 8 each in shards, but for what is in between."""
    profile = chain(4, 1, params=5 * 10**9 // 2, saved=100, output=1)
    typed = ("engine=deepspeed", "engine.zero=1", "mesh.data=8", "batch.size=8", "batch.micro_batches=1")
    config = settled(*typed, "optimizer.name=adam", devices=8)
    assert not fits(config, profile, cluster(8, 20 * 10**9))
    assert memory_advice.fitting(config, profile, cluster(8, 20 * 10**9)) == {"engine.zero": 2}


def test_parameters_need_devices() -> None:
    profile = chain(16, 1, params=100, saved=1, output=1)
    config = settled("batch.size=8", "batch.micro_batches=8")
    assert memory_advice.fitting(config, profile, cluster(2, 1000)) == {"cluster.devices": 4}
    given_2 = settled("batch.size=8", "batch.micro_batches=8", "mesh.pipeline=2", devices=4)
    assert memory_advice.fitting(given_2, profile, cluster(4, 1000)) == {"mesh.pipeline": 4}


def test_a_cluster_of_nodes_grows_by_nodes() -> None:
    profile = chain(9, 1, params=100, saved=1, output=1)
    config = settled("batch.size=8", "batch.micro_batches=8", "cluster.nodes=2", devices=2)
    nodes = Cluster("flat", 2, 2, Device(memory_bytes=600), Link(0.0, 0.0))
    assert memory_advice.fitting(config, profile, nodes) == {"cluster.nodes": 4}
    assert memory_advice.fitting(config, profile, replace(nodes, device=Device(memory_bytes=400))) == {
        "cluster.nodes": 5
    }


@pytest.mark.parametrize(("samples", "there", "count"), [(15, 700, 3), (15, 300, 15), (7, 200, 7), (64, 230, 64)])
def test_more_micro_batches_of_any_number_of_samples(samples: int, there: int, count: int) -> None:
    """One device keeps 2 x 100 bytes of each sample of a micro-batch, which need no power of 2."""
    profile = chain(1, samples, params=1, saved=100, output=1)
    config = settled(f"batch.size={samples}", "batch.micro_batches=1", "engine=single", devices=1)
    found = memory_advice.fitting(config, profile, cluster(1, there))
    assert found == {"batch.micro_batches": count}


def test_a_smaller_batch_where_all_else_is_done() -> None:
    """One device, one layer: what is kept of a whole batch is what it keeps."""
    profile = chain(1, 4, params=1, saved=10, output=100)
    config = settled("batch.size=32", "batch.micro_batches=8", devices=1)
    assert [*memory_advice.fitting(config, profile, cluster(1, 4000))] == ["batch.size"]


def test_a_smaller_batch_of_any_number_of_samples() -> None:
    """The inputs of 15 samples alone are too large, 3 samples fit."""
    profile = chain(1, 15, params=1, saved=10, output=100)
    config = settled("batch.size=15", "batch.micro_batches=1", "engine=single", devices=1)
    assert memory_advice.fitting(config, profile, cluster(1, 1200)) == {"batch.size": 3}


@pytest.mark.parametrize(
    ("there", "hint"),
    [(50, "a smaller model: its parameters need 3.1 KiB, all devices have 100 B"),
     (1700, "a smaller batch.size or model")],
)  # fmt: skip
def test_where_nothing_helps(there: int, hint: str) -> None:
    """Two layers of 800 bytes of parameters and as many of gradients, and a sample that is larger than a device."""
    profile = chain(2, 1, params=800, saved=1, output=4000)
    full, config = Problem("cluster.memory_gb", 1, "is full"), settled("batch.size=1", "batch.micro_batches=1")
    advised = memory_advice.advised(full, config, profile, cluster(2, there))
    assert (advised.fixes, advised.hint) == ((), hint)


def test_micro_batches_of_a_stored_profile_stay_as_they_are(tmp_path) -> None:
    profile = chain(4, 8, params=10, saved=100, output=1)
    profile.save(tmp_path / "p.json")
    config = settled("batch.size=64", "batch.micro_batches=8", f"profile={tmp_path / 'p.json'}")
    assert "batch.micro_batches" not in memory_advice.fitting(config, profile, cluster(2, 700))


@settings(max_examples=examples(60))
@given(
    st.integers(1, 6), st.sampled_from([1, 2, 4]), st.integers(0, 50), st.integers(0, 50), st.integers(1, 20),
    st.integers(1, 2), st.integers(1, 3000),
)  # fmt: skip
def test_what_is_recommended_fits_and_nothing_of_it_is_superfluous(
    layers: int, micro_batch: int, params: int, saved: int, output: int, devices: int, there: int
) -> None:
    profile = chain(layers, micro_batch, params, saved, output)
    base = [f"batch.size={4 * micro_batch}", "batch.micro_batches=4"]
    config, on = settled(*base, devices=devices), cluster(devices, there)
    try:
        if fits(config, profile, on):
            return
    except CannotRun:
        return
    keys = [typed({key: value}) for key, value in memory_advice.fitting(config, profile, on).items()]
    if not keys:
        return
    for count in range(len(keys) + 1):
        for chosen in itertools.combinations(keys, count):
            changed = settled(*base, *chosen, devices=devices)
            size = mesh.micro_batch(changed)
            seen = chain(layers, size, params, saved, output)
            more = replace(on, devices_per_node=changed.cluster.devices)
            assert fits(changed, seen, more) == (count == len(keys)), chosen
