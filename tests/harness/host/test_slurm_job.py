"""What the environment of a Slurm job says, and what follows for cluster=local and launch.ranks."""

from __future__ import annotations

import shutil

import pytest

from harness.checks import configuration
from harness.cli.compose import compose
from harness.config import cluster_config
from harness.config.cluster_config import ClusterConfig
from harness.core.cluster import Cluster
from harness.core.plan import Mesh
from harness.core.problem import CannotRun, Problem
from harness.host import devices, local_devices, slurm_job
from harness.host.devices import DetectedDevices
from harness.host.slurm_job import Allocation
from harness.launch import slurm_step
from tests.problems import row, rows

JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_TASKS_PER_NODE": "2(x2)"}
CPU, GPU = DetectedDevices("cpu", "x", 8, 8 << 30), DetectedDevices("cuda", "y", 4, 1 << 30)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Allocation:
    """A job of two nodes with two tasks each; this machine has eight cores."""
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(devices, "detect", lambda wanted="auto": CPU)
    found = slurm_job.current()
    assert found
    return found


@pytest.mark.parametrize(("text", "tasks"), [("2(x3),1", (2, 2, 2, 1)), ("16", (16,)), ("", ())])
def test_numbers_as_slurm_writes_them(text: str, tasks: tuple[int, ...]) -> None:
    assert slurm_job.counts(text) == tasks


def test_the_job() -> None:
    assert slurm_job.current(JOB) == Allocation("7", (2, 2))
    assert slurm_job.current({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3"}) == Allocation("7", (1, 1, 1))
    assert slurm_job.current({"HOME": "/"}) is None


def shape(config: ClusterConfig, given: Allocation | None) -> tuple[int, int]:
    cluster = cluster_config.build(config, job=given)
    return cluster.nodes, cluster.devices_per_node


def test_devices_are_tasks_on_all_nodes_or_on_this_one(job: Allocation) -> None:
    assert shape(ClusterConfig(), job) == (2, 2)
    assert shape(ClusterConfig(nodes=1), job) == (1, 2)
    assert shape(ClusterConfig(), None) == (1, 2), "of an engine of one process, too"
    assert shape(ClusterConfig(devices=5), None) == (1, 5), "threads"


def problem(config: ClusterConfig, given: Allocation | None, found: DetectedDevices = CPU) -> Problem:
    (only,) = local_devices.problems(config, found, given)
    return only


def test_more_than_the_job_has(job: Allocation, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, tasks = problem(ClusterConfig(nodes=3), job), problem(ClusterConfig(devices=4), job)
    here = problem(ClusterConfig(nodes=2), None)
    assert rows([nodes, here, tasks]) == [
        ("cluster.nodes", 3, ["cluster.nodes=2"]),
        ("cluster.nodes", 2, ["cluster.nodes=1"]),
        ("cluster.devices", 4, ["cluster.devices=2"]),
    ]
    assert (nodes.hint, tasks.hint) == ("sbatch --nodes=3", "sbatch --ntasks-per-node=4")
    assert "SLURM_JOB_NUM_NODES" in nodes.message and "SLURM_JOB_NUM_NODES" in here.message
    assert "SLURM_TASKS_PER_NODE=2,2" in tasks.message
    uneven = Allocation("7", (3, 2))
    assert "SLURM_TASKS_PER_NODE=3,2" in problem(ClusterConfig(), uneven).message
    assert local_devices.problems(ClusterConfig(devices=2), CPU, uneven) == []
    assert local_devices.problems(ClusterConfig(nodes=1), CPU, uneven) == [], "the first node's are enough"
    assert "SLURM_GPUS_ON_NODE" in problem(ClusterConfig(devices=8), job, GPU).message
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
    gpus = problem(ClusterConfig(devices=8), job, GPU)
    assert gpus.key == "cluster.devices" and "SLURM_GPUS_ON_NODE" in gpus.message


@pytest.mark.parametrize(
    ("tasks", "engine", "variable", "hint"),
    [
        ("4", "engine=gpipe", "", ""),
        ("2", "engine=gpipe", "SLURM_TASKS_PER_NODE=2", "sbatch --ntasks-per-node=4"),
        ("1(x2)", "engine=myelin", "SLURM_TASKS_PER_NODE=1,1", "sbatch --ntasks-per-node=2"),
    ],
)
def test_a_pipeline_takes_the_tasks_of_a_node_with_fewer_cores(
    job: Allocation, monkeypatch: pytest.MonkeyPatch, tasks: str, engine: str, variable: str, hint: str
) -> None:
    monkeypatch.setattr(devices, "detect", lambda wanted="auto": DetectedDevices("cpu", "x", 2, 8 << 30))
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", tasks)
    typed = [engine, "model=mlp", "mesh.pipeline=4"]
    found = configuration.request_problems(compose(typed), typed)
    assert rows(found) == ([("mesh.pipeline", 4, ["mesh.pipeline=2"])] if hint else [])
    assert all(one.hint == hint and variable in one.message for one in found)


@pytest.mark.parametrize(
    ("overrides", "spread"),
    [
        (["engine=ddp"], True),
        (["engine=ddp", "launch.ranks=srun"], True),
        (["engine=ddp", "launch.ranks=fork"], False),
        (["engine=gpipe"], False),
        (["mode=calibrate"], False),
        (["mode=profile", "engine=ddp"], False),
        (["mode=plan", "engine=myelin"], True),
    ],
)
def test_whose_ranks_srun_starts(job: Allocation, overrides: list[str], spread: bool) -> None:
    assert (slurm_step.job(compose(overrides)) is not None) == spread


def refused(*overrides: str) -> list[Problem]:
    typed = ["model=mlp", *overrides]
    found = configuration.request_problems(compose(typed), typed)
    return [one for one in found if one.key == "launch.ranks"]


def test_srun_where_it_cannot_be(job: Allocation, monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = refused("engine=gpipe", "launch.ranks=srun")
    assert row(found) == ("launch.ranks", "srun", ["launch.ranks=auto"])
    monkeypatch.setattr(shutil, "which", lambda name: None)
    (found,) = refused("engine=ddp")
    assert row(found) == ("launch.ranks", "auto", ["launch.ranks=fork"])
    assert "SLURM_JOB_ID=7" in found.message and "srun on the PATH" in found.message
    monkeypatch.delenv("SLURM_JOB_ID")
    (found,) = refused("engine=ddp", "launch.ranks=srun")
    assert row(found) == ("launch.ranks", "srun", ["launch.ranks=auto"]) and "SLURM_JOB_ID is not set" in found.message
    assert refused("engine=ddp") == []
    with pytest.raises(CannotRun) as caught:
        compose(["launch.ranks=slurm"])
    assert rows(caught.value.problems) == [("launch.ranks", "slurm", ["launch.ranks=auto"])]


def test_the_command() -> None:
    two = slurm_step.Step(Mesh(data=2, pipeline=2), 2, mpi=True).command()
    assert two[:4] == ["srun", "--nodes=2", "--ntasks=4", "--ntasks-per-node=2"]
    assert two[4:6] == ["--distribution=block", "--mpi=pmi2"]
    assert {"--overlap", "--kill-on-bad-exit=1", "--wait=0", "--immediate=20"} < set(two)
    assert slurm_step.Step(Mesh(3), 2, mpi=False).command()[:5] == [
        "srun", "--nodes=2", "--ntasks=3", "--distribution=plane=2", "--mpi=none"
    ]  # fmt: skip
    assert "--distribution=block" in slurm_step.Step(Mesh(3), 2, False, crowded=True).command()


def test_a_job_with_fewer_tasks_than_gpus_is_crowded(job: Allocation) -> None:
    config = compose(["engine=ddp", "model=mlp"])
    for each, crowded in ((2, False), (4, True)):
        step = slurm_step.step(config, Mesh(4), Cluster(devices_per_node=each))
        assert step and (step.per_node, step.crowded) == (each, crowded)


def test_stages_of_ranks() -> None:
    step = slurm_step.Step(Mesh(data=2, pipeline=2, tensor=2), 4, mpi=False)
    assert [step.names.rank(rank)[-1] for rank in range(8)] == list("00110011")
