"""A sweep on the emulated Slurm: submitted, run, reported, submitted again."""

import json
import os
import signal
from pathlib import Path

import pytest

from harness.config import registry
from harness.config.overrides import quoted
from harness.core import run_files
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.record import RunRecord
from harness.sweep.points import expand
from slurm import array, point_states, status, submit
from slurm.array import Array
from slurm.feasibility import CHUNK, Examined, examine
from slurm.resources import Need
from slurm.settings import Settings
from tests.harness.user_model import nets
from tests.slurm.emulated import Cluster, wait_for

RUN_S = 300.0
"""A job on a busy machine."""


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """A stored profile, in a folder that a shell would stumble over."""
    layer = LayerProfile("l", forward_s=1e-3, backward_s=2e-3, param_bytes=4, output_bytes=4, saved_bytes=4)
    path = tmp_path / "it's $(touch hacked); `touch hacked`\n a  b" / "p.json"
    path.parent.mkdir()
    ModelProfile((layer,) * 4, model="unet", micro_batch=2, dtype="float32", input_bytes=4, source="a test").save(path)
    return path


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def long_run(seed: int = 0) -> list[str]:
    return ["engine=single", "model=mlp", "tracker=none", "steps=1000000", "warmup=0", "batch.size=8", f"seed={seed}"]


def states_of(folder: Path) -> list[str]:
    return [one.state for one in point_states.survey(Array(folder))[0]]


def states_by_index(cluster: Cluster, job: str) -> dict[str, str]:
    return {name.partition("_")[2]: state for name, state in cluster.jobs().items() if name.startswith(f"{job}_")}


@pytest.mark.usefixtures("at_length")
def test_a_model_of_the_users_own(cluster: Cluster, tmp_path: Path) -> None:
    """Named by a relative path, whose file is found on the node."""
    nets.write(tmp_path / "it's, mine", nets.WRAPPED)
    folder = tmp_path / "sweep"
    typed = ["mode=plan", "costs=analytic", "tracker=none", "model=it's, mine/net.py:build", "engine=single,gpipe"]
    assert submit.main([*typed, quoted("out", str(folder)), "slurm.time=5"]) == 0
    wait_for(cluster.settled, "the array", RUN_S)
    records = [RunRecord.load(folder / point.id / "record.json") for point in Array(folder).points()]
    assert [(one.status, one.config["model"]["name"]) for one in records] == [("ok", "net.py:build")] * 2


def test_points_reach_their_run_as_they_were_typed(
    cluster: Cluster, tmp_path: Path, profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / 'it\'s a "sweep" $(touch hacked) 100%'
    typed = ["mode=plan", "tracker=none", "batch.micro_batches=8,4,0,-1", quoted("profile", str(profile))]
    given = [*typed, "batch.size=16", quoted("out", str(folder)), "slurm.time=5"]
    assert submit.main([*given, "slurm.parallel=2"]) == 0
    printed = capsys.readouterr().out
    assert "4 points: 2 submitted, 2 infeasible" in printed
    assert "batch.micro_batches 0   must be at least 1" in printed
    points, (job,) = Array(folder).points(), Array(folder).jobs()
    assert job.indices == (0, 1), "points that cannot run are not submitted"
    wait_for(cluster.settled, "the array", RUN_S)
    records = [RunRecord.load(folder / point.id / "record.json") for point in points]
    logs = [Array(folder).log(job.job, index).read_text() for index in job.indices]
    # a profile of micro-batches of 2 makes batches of 16 and 8: only one of them was asked for
    assert [record.status for record in records] == ["ok", "infeasible", "infeasible", "infeasible"], logs
    assert records[0].manifest["overrides"][:-1] == list(points[0].overrides)
    assert records[0].manifest["slurm"]["array_job_id"] == job.job
    assert records[0].manifest["slurm"]["array_task_id"] == "0"
    assert records[0].manifest["slurm"]["nodes"] == "node1"
    assert not list(tmp_path.rglob("hacked"))
    assert states_by_index(cluster, job.job) == {"0": "COMPLETED", "1": "FAILED"}, "Slurm says what the records say"
    assert submit.main([*given, "batch.micro_batches=8"]) == 0
    assert "1 point: 0 submitted, 1 done before: nothing to submit" in capsys.readouterr().out


def test_the_users_own_choices(
    cluster: Cluster, tmp_path: Path, profile: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are there when the points are submitted, when they run, and when they are submitted again."""
    own = {"cluster": "defaults: [flat, _self_]\ndevices: 2\n", "sweeps": "grid: {cluster: mine}\n"}
    for group, text in own.items():
        (tmp_path / "own" / group).mkdir(parents=True)
        (tmp_path / "own" / group / "mine.yaml").write_text(text)
    monkeypatch.setenv(registry.FURTHER, "")
    keys = ["mode=plan", "tracker=none", "batch.micro_batches=8", quoted("profile", str(profile)), "slurm.time=5"]
    assert submit.main(["--config-dir", "no", "+sweeps=mine"]) == 2
    assert "--config-dir no   is not a folder" in capsys.readouterr().err
    assert submit.main(["+sweeps=mine", "--config-dir", "own", *keys]) == 0
    found = Array(tmp_path / "runs" / "mine")
    for again in (False, True):
        wait_for(cluster.settled, "the array", RUN_S)
        assert states_of(found.folder) == ["ok"], [one.reason for one in point_states.survey(found)[0]]
        if not again:
            (found.run(found.points()[0]) / "record.json").unlink()
            monkeypatch.setenv(registry.FURTHER, "")  # another shell
            monkeypatch.setenv("SBATCH_EXPORT", "NONE")  # which counts more than what the file says
            assert status.main([str(found.folder), "--only", "missing"]) == 0
    assert "1 point: 1 submitted" in capsys.readouterr().out


@pytest.mark.timeout(900)
def test_status_and_only(cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Four long runs: one's parent is killed, one's node is lost, both as soon as they have ranks; one is cancelled
    once it trains; the last never gets a node."""
    folder = tmp_path / "s"
    given = [*long_run(), "seed=0,1,2,3", "out=s", "slurm.nodes=1", "slurm.tasks=4", "slurm.time=5"]
    assert submit.main([*given, "slurm.parallel=3"]) == 0
    (job,) = Array(folder).jobs()
    points = Array(folder).points()
    runs = [folder / points[index].id for index in range(3)]
    wait_for(lambda: all((run / "log").exists() for run in runs), "three runs", RUN_S)
    assert states_of(folder) == ["running"] * 3 + ["pending"]
    capsys.readouterr()
    assert submit.main([*given, "slurm.parallel=2"]) == 0
    printed = capsys.readouterr().out
    assert "4 points: 0 submitted, 4 waiting or running already" in printed
    assert "note: points that wait or run already keep the settings" in printed
    assert "slurm.parallel=2 is for this array; 4 points of others wait or run, too" in printed
    assert submit.main([*given, "slurm.mem=9T"]) == 2
    assert "slurm.mem 9T" in capsys.readouterr().err, "though no point would have it"
    cluster.ask("scancel", f"{job.job}_3")
    os.kill(parent_of(cluster, f"{job.job}_1"), signal.SIGKILL)
    node = cluster.ask("squeue", "-h", "-j", f"{job.job}_2", "-o", "%N").strip()
    cluster.ask("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
    wait_for(lambda: (runs[0] / "metrics.jsonl").exists(), "a step", RUN_S)
    cluster.ask("scancel", f"{job.job}_0")
    wait_for(lambda: states_of(folder)[:2] == ["preempted", "error"], "two ends", RUN_S)
    wait_for(lambda: states_of(folder)[2] == "pending", "the requeued run", RUN_S)
    assert states_of(folder) == ["preempted", "error", "pending", "missing"]
    assert status.main(["s"]) == 0
    printed = capsys.readouterr().out
    assert "4 points: 1 error, 1 missing, 1 pending, 1 preempted" in printed
    assert f"log: {Array(folder).log(job.job, 1)}" in printed
    assert states_by_index(cluster, job.job)["1"] == "FAILED"
    cluster.ask("scancel", f"{job.job}_2")
    wait_for(lambda: states_of(folder)[2] == "preempted", "the cancelled run's end", RUN_S)
    # what comes back is short: the same points, but Slurm is not asked to run a million steps again
    shorten(folder, 2)
    assert status.main(["s", "--only", "error,node_lost", "slurm.parallel=4"]) == 0
    assert status.main(["s", "--only", "timeout"]) == 0
    assert "no point is timeout" in capsys.readouterr().out
    wait_for(cluster.settled, "the second array", RUN_S)
    found = point_states.survey(Array(folder))[0]
    assert [one.state for one in found] == ["preempted", "ok", "preempted", "missing"], [one.reason for one in found]
    assert not cluster.processes()


def test_a_point_goes_on_after_its_time_limit(cluster: Cluster, tmp_path: Path) -> None:
    """Two ranks on two nodes. Slurm signals the batch step, as it does before the limit; the point asks for more.

    It is the last one of its array, which has the array's own job id.
    """
    folder = tmp_path / "s"
    typed = [*long_run()[:-1], "seed=0,1", "engine=ddp", "mesh.data=2", "batch.micro_batches=4", "out=s"]
    assert submit.main([*typed, "slurm.nodes=2", "slurm.tasks=1", "slurm.time=5"]) == 0
    (job,), (_, point) = Array(folder).jobs(), Array(folder).points()
    lines = folder / point.id / "metrics.jsonl"
    wait_for(lambda: lines.exists() and lines.stat().st_size, "a step", RUN_S)
    cluster.ask("scancel", "--batch", "--signal=USR1", f"{job.job}_1")
    wait_for(lambda: states_of(folder) == ["running", "pending"], "the requeued run", RUN_S)
    stopped = RunRecord.load(folder / point.id / "record.json")
    done = len(lines.read_text().splitlines())
    assert stopped.status == "preempted" and f"ended by SIGUSR1 after {done} step" in stopped.reason
    shorten(folder, done + 3)
    cluster.ask("scancel", f"{job.job}_0")
    wait_for(lambda: cluster.begin_soon() or cluster.settled(), "the run's end", RUN_S)
    record = RunRecord.load(folder / point.id / "record.json")
    assert record.status == "ok", Array(folder).log(job.job, 1).read_text()
    assert (record.id, record.manifest["resumed"]) == (stopped.id, [done])
    assert [json.loads(line)["step"] for line in lines.read_text().splitlines()] == list(range(done + 3))
    assert not cluster.processes()


def parent_of(cluster: Cluster, job: str) -> int:
    """The process of a job that is a slurm.task."""
    for pid in cluster.processes():
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        named = (
            f"SLURM_ARRAY_JOB_ID={job.partition('_')[0]}".encode(),
            f"SLURM_ARRAY_TASK_ID={job.partition('_')[2]}".encode(),
        )
        if set(named) <= set(environ) and b"slurm.task" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    raise AssertionError(f"{job} has no parent")


def shorten(folder: Path, steps: int) -> None:
    """So many steps instead of a million, in the points' own file; their folders stay."""
    path = folder / run_files.POINTS
    path.write_text(path.read_text().replace("steps=1000000", f"steps={steps}"))


def test_a_request_that_cannot_be_met(cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = [*long_run(), "out=s", "slurm.nodes=9", "slurm.tasks=9", "slurm.time=2:00:00"]
    assert submit.main(wrong) == 2
    printed = capsys.readouterr().err.splitlines()[1:]
    assert [text.split()[:2] for text in printed if "->" not in text] == [
        ["slurm.nodes", "9"], ["slurm.tasks", "9"], ["slurm.time", "2:00:00"],
    ]  # fmt: skip
    assert [text.partition("-> ")[2] for text in printed if "->" in text] == [
        "slurm.nodes=4, or smaller points", "slurm.tasks=4", "slurm.time=1:00:00",
    ]  # fmt: skip
    assert submit.main([*long_run(), "out=s", "slurm.partition=urgnt"]) == 2
    assert "-> slurm.partition=urgent" in capsys.readouterr().err
    assert submit.main(["engine=gpipe", "mesh.pipeline=8", "model=mlp", "out=s"]) == 2
    printed = " ".join(capsys.readouterr().err.split())
    assert "all 8 devices on one node, partition batch has 4 CPUs on a node" in printed
    assert not list(tmp_path.iterdir()), "nothing is written before the checks"
    assert submit.main([*long_run(), "out=s", "slurm.constraint=nosuch"]) == 2
    assert "sbatch" in capsys.readouterr().err, "which only sbatch knows"
    assert not cluster.jobs() or cluster.settled()
    assert not Array(tmp_path / "s").jobs()


def test_a_thousand_points_are_one_array(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "examine", lambda points, wanted: [Examined(Need(1))] * len(points))
    calls = []
    asked = array.commands.ask
    monkeypatch.setattr(array.commands, "ask", lambda command, *rest: calls.append(command[0]) or asked(command, *rest))
    cluster.ask("scontrol", "update", "partitionname=batch", "state=down")
    try:
        assert submit.main([*long_run(), "seed=range(1000)", "out=s", "slurm.partition=urgent"]) == 0
    finally:
        cluster.ask("scontrol", "update", "partitionname=batch", "state=up")
    assert calls.count("sbatch") == 1
    assert len(calls) < 5, "and few other questions"
    lines = [json.loads(line) for line in (tmp_path / "s" / run_files.POINTS).read_text().splitlines()]
    assert len({line["id"] for line in lines}) == 1000
    cluster.ask("scancel", Array(tmp_path / "s").jobs()[0].job)


@pytest.mark.usefixtures("computation")
def test_many_points_are_examined_like_few() -> None:
    points = expand(
        ["engine=single,ddp", "mesh.data=1,2", "model=mlp", f"seed=range({CHUNK})", "batch.micro_batches=4"]
    )
    found = examine(points, Settings(tasks=2))
    assert len(found) == 4 * CHUNK
    assert [one.need.devices for one in found[:: 4 * CHUNK // 4]] == [1, 1, 1, 2]
    refused = [point.values()["engine"] for point, one in zip(points, found, strict=True) if one.refused]
    assert refused == ["single"] * CHUNK, "it has no replicas"


@pytest.mark.usefixtures("at_length")
def test_one_process_has_as_many_devices_as_it_was_judged_by(cluster: Cluster, tmp_path: Path) -> None:
    """The nodes have four CPUs for Slurm, and this machine's cores."""
    typed = ["engine=gpipe", "mesh.pipeline=4", "model=mlp", "mode=run", "tracker=none", "steps=2", "warmup=0"]
    assert submit.main([*typed, "batch.size=8", "batch.micro_batches=2", "out=s", "slurm.time=5"]) == 0
    wait_for(cluster.settled, "the array", RUN_S)
    found = point_states.survey(Array(tmp_path / "s"))[0]
    assert [one.state for one in found] == ["ok"], found[0].reason


@pytest.mark.parametrize(
    ("typed", "printed"),
    [(["-m", *long_run()], "leave -m out"), (["batch.mirco_batches=2,4"], "batch.micro_batches=...")],
)
def test_mistyped(tmp_path: Path, capsys: pytest.CaptureFixture[str], typed: list[str], printed: str) -> None:
    assert submit.main([*typed, "out=s"]) == 2
    error = capsys.readouterr().err
    assert printed in error and error.count("\n") == 2
    assert not list(tmp_path.iterdir())


def test_status_of_something_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status.main([str(tmp_path)]) == 2
    assert "has neither points.jsonl nor record.json" in " ".join(capsys.readouterr().err.split())
    (tmp_path / run_files.POINTS).write_text("")
    assert status.main([str(tmp_path), "--only", "mising,oom"]) == 2
    assert "--only mising   is not one of missing" in capsys.readouterr().err
