"""What the environment of a Slurm job says, and what follows for cluster=local and launch.ranks."""

from __future__ import annotations

import shutil

import pytest

from harness import allocation, at_hand, clusters, devices, preparation, srun
from harness.allocation import Allocation
from harness.cluster import Cluster
from harness.clusters import ClusterConfig
from harness.compose import compose
from harness.devices import Found
from harness.mesh import Mesh
from harness.problem import CannotRun

JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_TASKS_PER_NODE": "2(x2)"}
CPU, GPU = Found("cpu", "x", 8, 8 << 30), Found("cuda", "y", 4, 1 << 30)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Allocation:
    """A job of two nodes with two tasks each; this machine has eight cores."""
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(devices, "detect", lambda wanted="auto": CPU)
    found = allocation.found()
    assert found
    return found


@pytest.mark.parametrize(("text", "tasks"), [("2(x3),1", (2, 2, 2, 1)), ("16", (16,)), ("", ())])
def test_numbers_as_slurm_writes_them(text: str, tasks: tuple[int, ...]) -> None:
    assert allocation.counts(text) == tasks


def test_the_job() -> None:
    assert allocation.found(JOB) == Allocation("7", (2, 2))
    assert allocation.found({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3"}) == Allocation("7", (1, 1, 1))
    assert allocation.found({"HOME": "/"}) is None


def shape(config: ClusterConfig, given: Allocation | None) -> tuple[int, int]:
    cluster = clusters.build(config, job=given)
    return cluster.nodes, cluster.devices_per_node


def test_devices_are_tasks_on_all_nodes_or_on_this_one(job: Allocation) -> None:
    assert shape(ClusterConfig(), job) == (2, 2)
    assert shape(ClusterConfig(nodes=1), job) == (1, 2)
    assert shape(ClusterConfig(), None) == (1, 2), "of an engine of one process, too"
    assert shape(ClusterConfig(devices=5), None) == (1, 5), "threads"


def problem(config: ClusterConfig, given: Allocation | None, found: Found = CPU) -> tuple[str, str, str]:
    (only,) = at_hand.problems(config, found, given)
    return only.key, only.what, only.mend


def test_more_than_the_job_has(job: Allocation, monkeypatch: pytest.MonkeyPatch) -> None:
    assert problem(ClusterConfig(nodes=3), job) == (
        "cluster.nodes 3", "the job has 2 (SLURM_JOB_NUM_NODES)", "sbatch --nodes=3, or cluster.nodes=2"
    )  # fmt: skip
    assert problem(ClusterConfig(nodes=2), None) == (
        "cluster.nodes 2",
        "cluster=local is this machine, 1 node; the job's 2 (SLURM_JOB_NUM_NODES) are for ranks that srun starts",
        "cluster.nodes=1",
    )
    assert problem(ClusterConfig(devices=4), job) == (
        "cluster.devices 4", "a CPU device is a task of the job, a node has 2 (SLURM_TASKS_PER_NODE=2,2)",
        "sbatch --ntasks-per-node=4, or cluster.devices=2",
    )  # fmt: skip
    uneven = Allocation("7", (3, 2))
    assert problem(ClusterConfig(), uneven)[1].endswith("a node has 2 to 3 (SLURM_TASKS_PER_NODE=3,2)")
    assert at_hand.problems(ClusterConfig(devices=2), CPU, uneven) == []
    assert at_hand.problems(ClusterConfig(nodes=1), CPU, uneven) == [], "the first node's are enough"
    assert "the job has none (SLURM_GPUS_ON_NODE is not set)" in problem(ClusterConfig(devices=8), job, GPU)[1]
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
    assert "4 found; the job has 4 on this node (SLURM_GPUS_ON_NODE)" in problem(ClusterConfig(devices=8), job, GPU)[1]


@pytest.mark.parametrize(
    ("tasks", "engine", "what", "mend"),
    [
        ("4", "engine=gpipe", None, None),
        ("2", "engine=gpipe", "has 2 (SLURM_TASKS_PER_NODE=2)", "mesh.pipeline=2, or sbatch --ntasks-per-node=4"),
        (
            "1(x2)",
            "engine=myelin",
            "has 2 (SLURM_TASKS_PER_NODE=1,1)",
            "mesh.pipeline=2, or sbatch --ntasks-per-node=2",
        ),
    ],
)
def test_a_pipeline_takes_the_tasks_of_a_node_with_fewer_cores(
    job: Allocation, monkeypatch: pytest.MonkeyPatch, tasks: str, engine: str, what: str | None, mend: str | None
) -> None:
    monkeypatch.setattr(devices, "detect", lambda wanted="auto": Found("cpu", "x", 2, 8 << 30))
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", tasks)
    typed = [engine, "model=mlp", "mesh.pipeline=4"]
    found = preparation.request_problems(compose(typed), typed)
    assert [(one.what, one.mend) for one in found] == ([(f"needs 4 devices, the cluster {what}", mend)] if what else [])


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
    assert (srun.job(compose(overrides)) is not None) == spread


def refused(*overrides: str) -> dict[str, tuple[str, str]]:
    typed = ["model=mlp", *overrides]
    found = preparation.request_problems(compose(typed), typed)
    return {one.key: (one.what, one.mend) for one in found if one.key.startswith("launch")}


def test_srun_where_it_cannot_be(job: Allocation, monkeypatch: pytest.MonkeyPatch) -> None:
    what, mend = refused("engine=gpipe", "launch.ranks=srun")["launch.ranks srun"]
    assert "engine=gpipe is one process" in what and mend == "launch.ranks=auto"
    monkeypatch.setattr(shutil, "which", lambda name: None)
    what, mend = refused("engine=ddp")["launch.ranks auto"]
    assert "SLURM_JOB_ID=7" in what and "no srun on the PATH" in what and mend.startswith("launch.ranks=fork")
    monkeypatch.delenv("SLURM_JOB_ID")
    assert "SLURM_JOB_ID is not set" in refused("engine=ddp", "launch.ranks=srun")["launch.ranks srun"][0]
    assert refused("engine=ddp") == {}
    with pytest.raises(CannotRun, match=r"launch.ranks slurm +is not one of auto, fork, srun +-> launch.ranks=auto"):
        compose(["launch.ranks=slurm"])


def test_the_command() -> None:
    two = srun.Step(Mesh(data=2, pipeline=2), 2, mpi=True).command()
    assert two[:4] == ["srun", "--nodes=2", "--ntasks=4", "--ntasks-per-node=2"]
    assert two[4:6] == ["--distribution=block", "--mpi=pmi2"]
    assert {"--overlap", "--kill-on-bad-exit=1", "--wait=0", "--immediate=20"} < set(two)
    assert srun.Step(Mesh(3), 2, mpi=False).command()[:5] == [
        "srun", "--nodes=2", "--ntasks=3", "--distribution=plane=2", "--mpi=none"
    ]  # fmt: skip
    assert "--distribution=block" in srun.Step(Mesh(3), 2, False, crowded=True).command()


def test_a_job_with_fewer_tasks_than_gpus_is_crowded(job: Allocation) -> None:
    config = compose(["engine=ddp", "model=mlp"])
    for each, crowded in ((2, False), (4, True)):
        step = srun.step(config, Mesh(4), Cluster(devices_per_node=each))
        assert step and (step.per_node, step.crowded) == (each, crowded)


def test_stages_of_ranks() -> None:
    step = srun.Step(Mesh(data=2, pipeline=2, tensor=2), 4, mpi=False)
    assert [step.stage(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
