"""What there is to choose from: all meshes of all devices, and what the user gives stays."""

from __future__ import annotations

import shlex

import pytest

from harness.cli.compose import compose
from harness.config import registry
from harness.core.cluster import Cluster
from harness.core.plan import Mesh
from harness.core.problem import CannotRun
from harness.interfaces import Engine
from harness.planning.tune.candidates import Candidate, MicroBatches, degrees, device_counts, refuse_given
from tests.problems import refused, rows

FLAT = ["mode=tune", "cluster=flat"]
MEGATRON = ["planner=megatron", "engine=deepspeed"]


def found(*typed: str, devices: int = 8, stored: int | None = None) -> list[Candidate]:
    overrides = [*FLAT, *typed]
    config = compose(overrides)
    engine: Engine = registry.build("engine", config.engine)
    micro_batches = MicroBatches(config, overrides, stored)
    meshes = degrees(config, engine.capabilities).meshes(devices)
    return [one for mesh in meshes for one in micro_batches.of(mesh)]


def of(*typed: str, devices: int = 8) -> set[tuple[int, int, int]]:
    return {(one.mesh.tensor, one.mesh.pipeline, one.mesh.data) for one in found(*typed, devices=devices)}


def test_all_meshes_of_all_devices() -> None:
    assert of("engine=myelin") == {(1, p, 8 // p) for p in (1, 2, 4, 8)}
    assert of("engine=sbp", "planner=autoddl") == {(t, 8 // t, 1) for t in (1, 2, 4, 8)}
    assert of(*MEGATRON) == {
        (t, p, d) for t in (1, 2, 4, 8) for p in (1, 2, 4, 8) for d in (1, 2, 4, 8) if t * p * d == 8
    }
    assert of("engine=ddp") == {(1, 1, 8)}
    assert of("engine=gpipe") == {(1, 8, 1)}
    assert of("engine=single") == {(1, 1, 1)}, "it has no degree, so it has one device"
    assert of("engine=myelin", devices=6) == {(1, p, 6 // p) for p in (1, 2, 3, 6)}


def test_micro_batches_are_powers_of_two_that_divide_the_batch() -> None:
    own = {one.micro_batch for one in found("engine=myelin", "batch.size=48")}
    assert own == {1, 2, 4, 8, 16}
    out = {(one.micro_batch, one.mesh.data): one.uneven() for one in found("engine=myelin", "batch.size=48")}
    assert out[2, 8] == [] and out[4, 4] == []
    assert rows(out[4, 8]) == [("batch.size", 48, ["batch.size=64"])]
    assert out[16, 1] == [] and "mesh.data 2 x micro-batches of 16" in out[16, 2][0].message
    shared = {(one.micro_batch, one.mesh.data): one.uneven() for one in found("engine=myelin", "batch.size=4")}
    assert rows(shared[1, 8]) == [("batch.size", 4, ["batch.size=8"])]
    assert found("engine=single", "batch.size=7")[0].uneven() == []


def test_what_is_given_stays() -> None:
    assert of("engine=myelin", "mesh.data=2") == {(1, 4, 2)}
    assert of("engine=myelin", "engine.g_inter=2") == {(1, 2, 4)}
    assert of("engine=myelin", "mesh.data=2", "mesh.pipeline=2") == {(1, 2, 2)}, "no degree is left for the others"
    assert of(*MEGATRON, "mesh.tensor=4") == {(4, 1, 2), (4, 2, 1)}
    fixed = found("engine=myelin", "batch.size=64", "batch.micro_batches=4")
    assert {(one.mesh.data, one.micro_batch) for one in fixed} == {(8, 2), (4, 4), (2, 8), (1, 16)}
    assert all(one.micro_batches == 4 for one in fixed)
    assert {one.micro_batches for one in found("engine=myelin", "batch.size=64", "batch.micro_batches=5")} == {5}
    assert {one.micro_batches for one in found("engine=myelin", "batch.micro_batches=300", stored=3)} == {300}
    assert {one.micro_batch for one in found("engine=myelin", stored=3)} == {3}


def test_a_degree_that_does_not_divide_the_devices_leaves_some_idle() -> None:
    assert not found("engine=myelin", "mesh.pipeline=3")
    assert of("engine=myelin", "mesh.pipeline=3", devices=6) == {(1, 3, 2)}


def test_more_devices_than_there_are_are_refused() -> None:
    config = compose([*FLAT, "engine=myelin", "mesh.pipeline=9"])
    engine: Engine = registry.build("engine", config.engine)
    with pytest.raises(CannotRun) as error:
        refuse_given(config, engine, Cluster(devices_per_node=8))
    assert rows(refused(error)) == [("mesh.pipeline", 9, ["mesh.pipeline=8"])]


def test_devices_are_those_of_a_node_or_whole_nodes() -> None:
    assert device_counts(Cluster(devices_per_node=4)) == [4, 3, 2, 1]
    assert device_counts(Cluster(nodes=3, devices_per_node=2)) == [6, 4, 2, 1]


def test_the_command_runs_the_candidate() -> None:
    typed = [*FLAT, *MEGATRON, "batch.size=64", "mesh.data=2", "out=a b"]
    config = compose(typed)
    engine: Engine = registry.build("engine", config.engine)
    one = Candidate(4, Mesh(2, 2, 2), 64)
    words = shlex.split(one.command(config, typed, engine.capabilities))
    assert words[:2] == ["python", "run.py"]
    again = compose(words[2:])
    assert (again.mode, again.batch.micro_batches, again.out) == ("simulate", 8, None)
    assert dict(again.mesh) == {"data": 2, "pipeline": 2, "tensor": 2}
    local = ["mode=tune", "engine=ddp", "remeasure=true"]
    words = shlex.split(Candidate(1, Mesh(2), 16).command(compose(local), local, registry.build(
        "engine", compose(local).engine).capabilities))  # fmt: skip
    assert words[2:] == ["engine=ddp", "mesh.data=2", "batch.micro_batches=8"]


def test_the_stages_of_the_user_stay() -> None:
    config = compose([*FLAT, "engine=myelin", "planner=given", "planner.balance=[50,59]", "mesh.pipeline=2"])
    engine: Engine = registry.build("engine", config.engine)
    assert degrees(config, engine.capabilities).meshes(8) == [Mesh(4, 2, 1)]
