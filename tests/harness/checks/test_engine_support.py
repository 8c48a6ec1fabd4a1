"""What is reported a request before anything is known of the model."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from harness.checks import engine_support, formats, mesh, request
from harness.cli.compose import compose
from harness.config import registry
from harness.config.overrides import quoted
from harness.core.cluster import Cluster, Device, Link
from harness.core.plan import Mesh
from harness.core.problem import CannotRun
from harness.host import devices, machine
from harness.host.machine import Machine
from harness.interfaces import Capabilities
from harness.planning import prepare
from harness.report.progress import Progress
from tests.problems import Row, keys, rows

ROOT = Path(__file__).parents[3]


def problems(*typed: str, devices: int = 2) -> list[Row]:
    config = compose(["model=mlp", *typed])
    engine = registry.build("engine", config.engine)
    on = Cluster(devices_per_node=devices)
    mesh.fill(config, engine.capabilities, devices)
    return rows(engine_support.early(config, engine, on))


PIPELINING = "engine=torch_pipelining"


@pytest.mark.parametrize(
    ("typed", "devices", "found"),
    [
        # stages that the user gives
        ("engine.schedule=1f1b mesh.pipeline=4 batch.micro_batches=2", 4,
         [("batch.micro_batches", 2, ["batch.micro_batches=4", "engine.schedule=gpipe"])]),
        # as many as devices, or fewer, if the model has fewer layers: refused in any case, or perhaps not
        ("engine.schedule=1f1b batch.micro_batches=1", 4,
         [("batch.micro_batches", 1, ["batch.micro_batches=4", "engine.schedule=gpipe"])]),
        ("engine.schedule=1f1b batch.micro_batches=2", 4, []),
        ("engine.schedule=interleaved1f1b batch.micro_batches=16", 3, []),
        # of two problems with a number of micro-batches each fix is one for both
        ("engine.schedule=1f1b mesh.pipeline=4 batch.micro_batches=3", 4,
         [("batch.micro_batches", 3, ["batch.micro_batches=4", "engine.schedule=gpipe batch.micro_batches=4"])]),
        ("engine.schedule=gpipe mesh.pipeline=4 batch.micro_batches=3", 4,
         [("batch.micro_batches", 3, ["batch.micro_batches=4", "batch.micro_batches=2"])]),
    ],
)  # fmt: skip
def test_numbers_of_micro_batches(typed: str, devices: int, found: list[Row]) -> None:
    assert problems(PIPELINING, *typed.split(), devices=devices) == found


def test_what_is_offered_is_no_problem_any_more() -> None:
    for way in ("batch.micro_batches=4", "engine.schedule=gpipe batch.micro_batches=2"):
        assert problems(PIPELINING, "engine.schedule=1f1b", "mesh.pipeline=4", *way.split(), devices=4) == []


@pytest.mark.parametrize(
    ("shards", "fix"), [(1, ""), (2, ""), (3, ""), (4, "mesh.tensor=2"), (5, "mesh.tensor=1"), (6, ""), (12, "")]
)
def test_tensor_parallel_groups_span_equally_many_nodes(shards: int, fix: str) -> None:
    config = compose(
        ["engine=deepspeed", "planner=megatron", "cluster=summit", f"mesh.tensor={shards}", "mesh.pipeline=1"]
    )
    config.mesh.data = 12 // shards
    engine = registry.build("engine", config.engine)
    found = engine_support.refused(config, engine, Cluster(nodes=2, devices_per_node=6))
    assert rows(found) == [("mesh.tensor", shards, [fix])] * bool(fix)
    if shards == 4:
        config.mesh.data = 1
        assert engine_support.refused(config, engine, Cluster(nodes=2, devices_per_node=6)) == [], (
            "they are on one node"
        )


def test_a_format_that_devices_lack_is_reported_with_the_batch() -> None:
    typed = ["model=mlp", "mode=plan", "engine=fsdp", "cluster=summit", "cluster.nodes=1", "batch.size=7"]
    config = compose([*typed, "precision=bf16"])
    with pytest.raises(CannotRun) as caught:
        prepare.prepare(config, typed, Path(), Progress(Console(file=io.StringIO())))
    assert keys(caught.value.problems) == ["batch.size", "cluster.peak_tflops.bfloat16"]
    on, engine = Cluster(device=Device(peak_flops={"float32": 1e12})), registry.build("engine", config.engine)
    for more, lacks in (("costs=measured", 0), ("precision=fp32", 0), ("profile=p.json", 0), ("costs=analytic", 1)):
        given = compose([*typed, "batch.size=8", "precision=bf16", more]) if more != "profile=p.json" else config.copy()
        given.profile = "p.json" if more == "profile=p.json" else None
        assert len(formats.lacking(given, engine.capabilities, on)) == lacks, more


SPLITTING = ["planner=autoddl", "planner=megatron", "planner=data_parallel", "mesh.tensor=1"]


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("engine=sbp", [("engine", "sbp", SPLITTING)]),
        ("engine=sbp mesh.tensor=1", []),
        ("engine=sbp planner=autoddl", []),
        ("engine=deepspeed mode=plan cluster=flat mesh.tensor=2", [("engine", "deepspeed", SPLITTING)]),
        ("engine=sbp mode=tune", []),  # which searches planners, too
    ],
)
def test_shards_of_a_planner_that_splits_nothing_are_refused_by_the_keys(typed: str, found: list[Row]) -> None:
    assert problems(*typed.split()) == found


@pytest.mark.parametrize("engine", ["pipeline", "torch_pipelining"])
@pytest.mark.parametrize(
    ("given", "devices", "fixes"),
    [
        ([], 2, []),
        ([], 4, ["mesh.pipeline=2"]),
        (["mesh.pipeline=3"], 4, ["mesh.pipeline=2"]),
        ([], 1, ["mesh.pipeline=2 cluster.devices=2"]),
        (["mesh.pipeline=2"], 4, []),
    ],
)
def test_a_schedule_file_of_other_devices_is_refused_by_the_keys(
    engine: str, given: list[str], devices: int, fixes: list[str], tmp_path: Path
) -> None:
    """Before a model is profiled; how many layers it has makes no difference."""
    own = tmp_path / "own.csv"
    own.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    typed = [f"engine={engine}", quoted("engine.schedule", str(own)), "batch.micro_batches=2", *given]
    found = [row for row in problems(*typed, devices=devices) if row[0] == "engine.schedule"]
    assert found == ([("engine.schedule", str(own), fixes)] if fixes else [])


def test_a_cluster_that_is_wrong_itself_leaves_what_needs_none() -> None:
    config = compose([PIPELINING, "engine.schedule=1f1b", "mesh.pipeline=2", "batch.micro_batches=1"])
    config.batch.micro_batches = 7
    engine = registry.build("engine", config.engine)
    assert keys(engine_support.early(config, engine, None)) == ["batch.micro_batches"]


def test_the_planner_is_asked_for_the_same() -> None:
    config = compose([PIPELINING, "engine.schedule=zbv", "batch.size=32", "batch.micro_batches=4"])
    asked = engine_support.plan_request(config, registry.build("engine", config.engine), Mesh(data=2, pipeline=2))
    assert (asked.batch.size, asked.batch.micro_batches) == (32, 4)
    assert (asked.data, asked.pipeline, asked.recompute, asked.placement) == (2, 2, "never", (0, 1, 1, 0))


def test_a_refusal_comes_before_the_model_is_profiled_and_looks_like_none_of_a_crash(tmp_path, monkeypatch) -> None:
    """An empty cache of profiles: the run would have to measure."""
    monkeypatch.setenv("REGATTA_CACHE", str(tmp_path))
    machine.store(
        Machine(Device(devices.cpu_model(), 10**10, {"float32": 1e12}, 1e10), Link(1e-5, 1e-9), None, 2.0, 2.0)
    )
    typed = ["engine=deepspeed", "engine.zero=1", "precision=fp64", "model=mlp", "cluster.device=cpu", "tracker=none"]
    done = subprocess.run([sys.executable, "run.py", *typed, "cluster.devices=2", f"out={tmp_path / 'run'}"], cwd=ROOT,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 2
    assert "precision.dtype=float32, or engine.zero=0" in done.stderr
    assert done.stdout == "", "neither profiling nor a phase that failed"


def test_float16_without_a_scaled_loss_is_noted() -> None:
    """That of precision.dtype=float16 is scaled, by the engines that take it."""
    half, plain = ["model=mlp", "precision.autocast=float16"], Capabilities()
    key, scaled, volta = "precision.autocast", "precision.grad_scaler=true", "cluster=summit"
    for typed, can, fixes in (
        ([], plain, [f"{key}=bfloat16"]),
        ([], Capabilities(grad_scaler=True), [f"{key}=bfloat16", scaled]),
        ([volta], Capabilities(grad_scaler=True), [scaled]),
        ([volta], plain, ["precision=fp32"]),
    ):
        assert rows(request.notes(compose([*half, *typed]), can)) == [(key, "float16", fixes)]
    for typed in (["precision=mixed"], ["precision=fp16", "precision.autocast=float16", "engine=myelin"]):
        assert not request.notes(compose(["model=mlp", *typed]), plain)
