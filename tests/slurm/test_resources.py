"""Points, nodes and tasks; and what a partition cannot give."""

from collections.abc import Sequence

import pytest

from harness.cli.compose import compose
from harness.core.problem import CannotRun
from harness.host import devices
from harness.sweep.points import Point
from slurm import commands, partition
from slurm.feasibility import Examined, examine
from slurm.partition import Partition, choose, partitions, shortages
from slurm.resources import Need, Shape, need, shape
from slurm.settings import Settings
from tests.problems import Row, refused, row, rows

BATCH = Partition("batch", 4, cpus=4, memory_mb=4000, gpus=2, limit="1:00:00", default=True, up=True)


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["engine=single"], Need(1, together=True)),
        (["engine=gpipe", "mesh.pipeline=3"], Need(3, together=True)),
        (["engine=gpipe", "cluster.devices=3"], Need(3, together=True)),
        (["engine=gpipe"], Need(1, together=True, all=True)),
        (["engine=ddp", "mesh.data=4"], Need(4)),
        (["engine=ddp", "cluster.devices=2", "cluster.nodes=2"], Need(4)),
        (["engine=myelin", "mesh.data=2", "mesh.pipeline=2", "model=gpt"], Need(4)),
        (["engine=ddp", "mesh.data=4", "launch.ranks=fork"], Need(4, together=True, forked=True)),
        (["engine=gpipe", "mesh.pipeline=8", "cluster=p40x8", "mode=simulate"], Need(1)),
        (["engine=ddp", "mesh.data=4", "cluster.device=cuda"], Need(4, gpus=True)),
        (["mode=profile", "cluster.device=cuda"], Need(1, gpus=True)),
    ],
)
def test_need(typed: list[str], expected: Need) -> None:
    assert need(compose(typed), Settings()) == expected


@pytest.mark.parametrize(
    ("device", "built", "gpus"), [("auto", True, True), ("auto", False, False), ("cpu", True, False)]
)
def test_devices_are_gpus_where_a_node_has_some(
    monkeypatch: pytest.MonkeyPatch, device: str, built: bool, gpus: bool
) -> None:
    monkeypatch.setattr(devices, "torch_has_cuda", lambda: built)
    config = compose(["engine=ddp", "mesh.data=4", f"cluster.device={device}"])
    assert need(config, Settings(gpus=2)) == Need(4, gpus=gpus)
    assert need(config, Settings()) == Need(4)


@pytest.mark.parametrize(
    ("needs", "settings", "expected"),
    [
        ([Need(1)], Settings(), Shape(1, 1)),
        ([Need(1), Need(3)], Settings(), Shape(1, 3)),
        ([Need(6)], Settings(), Shape(2, 3)),
        ([Need(4)], Settings(nodes=2), Shape(2, 2)),
        ([Need(4)], Settings(tasks=1), Shape(4, 1)),
        ([Need(4)], Settings(gpus=2), Shape(2, 2)),
        ([Need(4)], Settings(cpus=2), Shape(2, 2)),
        ([Need(4, together=True), Need(4)], Settings(nodes=2), Shape(2, 4)),
        ([Need(1, all=True)], Settings(nodes=2, tasks=2), Shape(2, 2)),
        ([Need(6, gpus=True)], Settings(gpus=2), Shape(3, 2)),
        ([Need(6, gpus=True)], Settings(gpus=2, tasks=4), Shape(3, 4)),
        ([Need(2, gpus=True), Need(6)], Settings(gpus=2, tasks=4), Shape(2, 4)),
        ([Need(1, all=True, gpus=True)], Settings(gpus=2), Shape(1, 2)),
    ],
)
def test_shape(needs: list[Need], settings: Settings, expected: Shape) -> None:
    assert shape(needs, settings, BATCH) == expected


@pytest.mark.parametrize(
    ("needs", "settings", "found"),
    [
        ([Need(4)], Settings(nodes=1, tasks=2), ("slurm.nodes", 1, ["slurm.nodes=2"])),
        ([Need(4, together=True)], Settings(nodes=2, tasks=2), ("slurm.tasks", 2, ["slurm.tasks=4"])),
        ([Need(2, True, gpus=True)], Settings(gpus=1), ("slurm.gpus", 1, ["slurm.gpus=2"])),
        ([Need(4, gpus=True)], Settings(gpus=1, nodes=2), ("slurm.nodes", 2, ["slurm.nodes=4"])),
        ([Need(4, gpus=True)], Settings(), ("cluster.device", "cuda", ["slurm.gpus=2"])),
        ([Need(4, gpus=True)], Settings(nodes=4), ("cluster.device", "cuda", ["slurm.gpus=1"])),
        ([Need(2, True, gpus=True)], Settings(tasks=4), ("cluster.device", "cuda", ["slurm.gpus=2"])),
        ([Need(8, True), Need(9)], Settings(), ("slurm.tasks", 8, ["mesh.pipeline=4"])),
        ([Need(8, True)], Settings(nodes=4, cpus=2), ("slurm.tasks", 8, ["mesh.pipeline=2"])),
        ([Need(8, True, forked=True)], Settings(), ("slurm.tasks", 8, ["launch.ranks=auto"])),
        ([Need(8, True, gpus=True)], Settings(gpus=2), ("slurm.gpus", 8, ["mesh.pipeline=2"])),
        ([Need(1, all=True)], Settings(), ("slurm.tasks", None, ["slurm.nodes=2 slurm.tasks=2"])),
    ],
)
def test_a_shape_that_is_too_small(needs: list[Need], settings: Settings, found: Row) -> None:
    with pytest.raises(CannotRun) as caught:
        shape(needs, settings, BATCH)
    assert row(refused(caught)[0]) == found


def test_shortages() -> None:
    wanted = Settings(cpus=2, gpus=3, time="2:00:00", mem="4G")
    assert rows(shortages(wanted, 5, 3, BATCH)) == [
        ("slurm.nodes", 5, ["slurm.nodes=4"]),
        ("slurm.tasks", 3, ["slurm.nodes=8"]),
        ("slurm.gpus", 3, ["slurm.gpus=2"]),
        ("slurm.time", "2:00:00", ["slurm.time=1:00:00"]),
        ("slurm.mem", "4G", ["slurm.mem=4000M"]),
    ]
    assert not shortages(Settings(mem="3G", gpus=2), 4, 4, BATCH)
    assert rows(shortages(Settings(tasks=8), 1, 8, BATCH)) == [("slurm.tasks", 8, ["slurm.tasks=4"])]
    assert rows(shortages(Settings(cpus=5), 1, 1, BATCH)) == [("slurm.tasks", 1, ["slurm.cpus=4"])]


def test_the_partitions_of_sinfo(monkeypatch: pytest.MonkeyPatch) -> None:
    said = """\
a*|2|4|4000|gpu:a100:2(S:0-1),fs:1|1:00:00|up
a*|1|8|2000|(null)|1:00:00|up
b|1|4+|100|gpu:1|infinite|down
"""
    monkeypatch.setattr(commands, "ask", lambda command: said)
    assert partitions() == [
        Partition("a", 3, 8, 4000, 2, "1:00:00", default=True, up=True),
        Partition("b", 1, 4, 100, 1, "infinite", default=False, up=False),
    ]


@pytest.mark.parametrize(
    ("wanted", "known", "found"),
    [
        ("bach", [BATCH], ("slurm.partition", "bach", ["slurm.partition=batch"])),
        (None, [Partition("x", 1, 1, 1, 0, "1", False, True)], ("slurm.partition", None, ["slurm.partition=x"])),
    ],
)
def test_a_partition_that_is_not_there(wanted: str | None, known: Sequence[Partition], found: Row) -> None:
    with pytest.raises(CannotRun) as caught:
        choose(Settings(partition=wanted), known)
    assert rows(refused(caught)) == [found]
    assert choose(Settings(), [BATCH]) is BATCH


def test_no_slurm_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(CannotRun) as caught:
        partition.partitions()
    (found,) = refused(caught)
    assert found.key == "sinfo" and found.hint.startswith("python run.py -m")


def test_a_client_without_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "LIMIT_S", 0.1)
    for command, message in ((["sleep", "10"], "within 0.1 s"), (["false"], "")):
        with pytest.raises(CannotRun) as caught:
            commands.ask(command)
        (found,) = refused(caught)
        assert found.key == command[0] and message in found.message


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["engine=ddp", "mesh.data=2", "cluster.devices=2"], Need(2)),
        (["engine=ddp", "mesh.data=4", "cluster.devices=2"], Need(4)),
        (["engine=ddp", "mesh.data=4", "cluster.devices=2", "cluster.nodes=2"], Need(4)),
        (["engine=gpipe", "cluster.devices=3", "model=mlp"], Need(3, together=True)),
    ],
)
def test_examined_where_the_job_will_be(typed: list[str], expected: Need) -> None:
    """Not as here: this machine is one node, and the user's devices are those of each node of the job."""
    found = examined(typed)
    assert found.refused is None, found.refused.reason
    assert found.need == expected


def examined(typed: Sequence[str], wanted: Settings = Settings()) -> Examined:  # noqa: B008
    (found,) = examine(
        [Point("p", (*typed, "model=mlp", "batch.size=16", "batch.micro_batches=4", "tracker=none"))], wanted
    )
    return found


@pytest.mark.parametrize(
    ("typed", "wanted", "gpus"),
    [
        (["engine=ddp", "mesh.data=4", "cluster.device=cuda"], Settings(gpus=4), True),
        (["engine=ddp", "mesh.data=4", "cluster.device=cuda"], Settings(gpus=2, nodes=2, tasks=1), True),
        (["engine=ddp", "mesh.data=4", "cluster.device=cuda", "cluster.devices=2"], Settings(gpus=2), True),
        (["engine=gpipe", "mesh.pipeline=4", "cluster.device=cuda"], Settings(gpus=2), True),  # `shape` reports it
        (["engine=ddp", "mesh.data=4", "cluster.device=cuda"], Settings(), True),  # so it does here
        (["engine=deepspeed", "engine.zero=1", "mesh.data=2", "precision=fp16"], Settings(gpus=2), True),
        (["engine=ddp", "mesh.data=4", "launch.ranks=srun"], Settings(), False),
    ],
)
def test_examined_without_the_gpus_that_the_job_will_have(
    monkeypatch: pytest.MonkeyPatch, typed: list[str], wanted: Settings, gpus: bool
) -> None:
    """This machine has none, and is no job; the torch that is installed could use GPUs."""
    monkeypatch.setattr(devices, "torch_has_cuda", lambda: True)
    found = examined(typed, wanted)
    assert found.refused is None, found.refused.reason
    assert found.need.gpus == gpus


@pytest.mark.parametrize(
    ("typed", "wanted", "message"),
    [
        (["engine=deepspeed", "engine.zero=1", "precision=fp16"], Settings(), "precision.dtype float16"),
        (["engine=ddp", "cluster.device=cuda", "cluster.devices=8"], Settings(gpus=8), "not built for CUDA"),
        (["engine=ddp", "cluster.device=cuda", "batch.micro_batches=0"], Settings(gpus=8), "not built for CUDA"),
        (["engine=gpipe", "cluster.nodes=2", "mesh.pipeline=4"], Settings(tasks=4), "cluster.nodes 2"),
    ],
)
def test_refused_as_the_job_will(
    monkeypatch: pytest.MonkeyPatch, typed: list[str], wanted: Settings, message: str
) -> None:
    """Whatever this machine has."""
    monkeypatch.setattr(devices, "torch_has_cuda", lambda: False)
    monkeypatch.setenv("SLURM_JOB_ID", "7")  # of another job, in which the user types
    refused = examined(typed, wanted).refused
    assert refused and message in refused.reason, refused


def test_typed_in_another_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """The array will not have that one's single task."""
    for name, value in (("JOB_ID", "7"), ("JOB_NUM_NODES", "1"), ("TASKS_PER_NODE", "1")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert examined(["engine=ddp", "mesh.data=4"]).refused is None
