"""Ranks that srun starts on two nodes: every engine computes the same as with forked ranks, every end is reported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from harness.cli.compose import compose
from harness.core import files
from harness.core.cluster import Device, Link
from harness.core.plan import Mesh
from harness.core.run_files import RENDEZVOUS
from harness.host import devices, machine
from harness.host.machine import Machine
from harness.launch import slurm_step, supervisor
from harness.launch.slurm_step import Step
from harness.launch.supervisor import Outcome
from harness.run import runner
from harness.worker import __main__
from tests.slurm.emulated import Cluster, wait_for

ROOT = Path(__file__).resolve().parents[2]
TINY = ["model=mlp", "model.widths=[8,16,16,4]", "batch.size=8", "batch.micro_batches=2",
        "steps=2", "warmup=1", "optimizer.momentum=0.5", "cluster.device=cpu", "tracker=none"]  # fmt: skip
ENGINES = {
    "ddp": ["precision.dtype=float64", "batch.size=16"],  # the micro-batches of others, which are profiled
    "fsdp": ["precision.dtype=float64", "batch.size=16"],
    "deepspeed": ["mesh.pipeline=2", "mesh.data=2"],  # it sums no float64
    "torch_pipelining": ["precision.dtype=float64", "mesh.pipeline=2", "mesh.data=2"],
    "sbp": ["precision.dtype=float64", "planner=autoddl"],
    "myelin": ["precision.dtype=float64", "mesh.pipeline=2", "mesh.data=2"],
}
ALWAYS = ("ddp", "myelin")
"""One that meets by a TCP store, one by PMI-2; the others are part of `make soak`."""
GROUP = """
import os, signal, sys, time
from harness.launch import slurm_ranks
from harness.launch.slurm_ranks import Rendezvous
from harness.worker import __main__ as worker

def work():
    import torch, torch.distributed as dist
    for step in range(100):
        if step == 5 and dist.get_rank() == 1:
            {end}
        dist.all_reduce(torch.ones(4))
        time.sleep(0.01)

def train(folder, config, begun, token):
    slurm_ranks.run_in_step(2, work, "cpu", False, Rendezvous(folder, token))

worker.ACTIONS["train"] = train
worker.run_action(sys.argv[1:])
"""
ALONE = """
import faulthandler, os, signal, sys, time
faulthandler.register(signal.SIGUSR2, all_threads=True)
def stuck():
    time.sleep(300)
print("here", os.environ["SLURM_PROCID"], flush=True)
{do}
stuck()
"""


@pytest.fixture
def job(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> str:
    """This process is the batch step of a job with two nodes of two tasks."""
    return begin(2, 2, monkeypatch)


def begin(nodes: int, tasks: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """A job with so many tasks on each node, of which this process is the batch step; its number."""
    said = subprocess.run(
        ["salloc", "--no-shell", f"-N{nodes}", f"--ntasks-per-node={tasks}"], capture_output=True, text=True,
        timeout=60, check=True,
    ).stderr  # fmt: skip
    number = said.split("allocation ")[1].split()[0]
    environment = {"JOB_ID": number, "JOB_NUM_NODES": nodes, "TASKS_PER_NODE": f"{tasks}(x{nodes})",
            "NTASKS_PER_NODE": tasks}  # fmt: skip
    for name, value in environment.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    return number


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of this module's own: the tiny model is profiled once, the machine is known."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REGATTA_CACHE", str(tmp_path_factory.mktemp("cache")))
        device = Device(devices.cpu_model(), 10**10, {"float64": 1e12}, 1e10, kernel_s=1e-6)
        machine.store(Machine(device, Link(1e-5, 1e-9), None, 1.8, 1.8))
        yield


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def forked(of: Path, folder: Path) -> list[float]:
    """The losses of the same plan with ranks that are forked, by a process that has torch already."""
    import torch  # noqa: F401

    folder.mkdir()
    for name in ("config.yaml", "plan.json", "profile.json", "record.json"):
        (folder / name).write_bytes((of / name).read_bytes())
    process = get_context("fork").Process(target=__main__.run_action, args=([str(folder), "train"],))
    process.start()
    process.join(120)
    process.kill()
    assert process.exitcode == 0
    return losses(folder)


@pytest.mark.parametrize(
    "engine", [pytest.param(name, marks=[] if name in ALWAYS else pytest.mark.soak) for name in ENGINES]
)
def test_every_engine_on_two_nodes(engine: str, job: str, cluster: Cluster, tmp_path: Path) -> None:
    typed = [*TINY, f"engine={engine}", *ENGINES[engine], f"out={tmp_path / 'srun'}"]
    record = runner.run(compose(typed), typed)
    assert record.status == "ok", record.reason
    assert record.plan and Mesh(**record.plan["mesh"]).size == 4
    assert losses(tmp_path / "srun") == forked(tmp_path / "srun", tmp_path / "forked"), "to the last bit"
    left = {path.name for path in (tmp_path / "srun").iterdir()}
    assert not left & {RENDEZVOUS, "error.json", "result.json"}


@pytest.mark.parametrize(
    ("tasks", "meshes"),
    [
        (4, [(5, 4), (5, 2), (4, 3), (4, 2), (3, 4)]),  # points that are smaller than their array's largest one
        (1, [(8, 4), (6, 2)]),  # GPUs, of which a node has more than tasks
    ],
)
def test_ranks_lie_as_planned(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tasks: int, meshes: list[tuple[int, int]]
) -> None:
    begin(3, tasks, monkeypatch)
    for size, per_node in meshes:
        step = Step(Mesh(size), per_node, mpi=False, crowded=tasks < per_node)
        command = [*step.command(), "sh", "-c", "echo $SLURM_PROCID $SLURM_NODEID $SLURM_LOCALID"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        places = sorted(tuple(map(int, line.split())) for line in said.splitlines())
        assert places == [(rank, rank // per_node, rank % per_node) for rank in range(size)], step


def supervised(
    folder: Path, code: str, timeout_s: float = 60, look: Callable[[], None] = lambda: None, per_node: int = 2
) -> Outcome:
    """Ranks that are this code, as tasks of srun on two nodes."""
    (folder / "rank.py").write_text(code)
    files.write_text(folder / "config.yaml", OmegaConf.to_yaml(OmegaConf.create({"x": 1})))
    step = Step(Mesh(2, per_node), per_node, mpi=False)
    command = [*step.command(), sys.executable, str(folder / "rank.py"), str(folder), "train", "0", step.token]
    with step.cleaning_up(folder):
        return supervisor.supervise(command, folder, timeout_s, look, step)


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("raise ValueError('no luck')", "ValueError: no luck\nin rank 1"),
        pytest.param(
            "os.kill(os.getpid(), signal.SIGKILL)",
            "rank 1, stage 0, on node2 was killed (signal 9)",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_the_first_rank_that_fails_ends_all_and_is_reported(
    job: str, cluster: Cluster, tmp_path: Path, end: str, reason: str
) -> None:
    """The other one fails too, since it loses its connection."""
    outcome = supervised(tmp_path, GROUP.format(end=end), per_node=1)
    assert outcome.status == "error" and reason in outcome.reason, (tmp_path / "log").read_text()
    nothing_left(cluster, tmp_path)


@pytest.mark.usefixtures("at_length")
def test_a_world_that_did_not_come_up_is_tried_again(job: str, cluster: Cluster, tmp_path: Path) -> None:
    """Its ranks had met; those of the next step meet again."""
    end = "os.environ['SLURM_STEP_ID'] == '0' and (print('MPIDI_UCX_comm_addr_exchange', flush=True), os._exit(15))"
    outcome = supervised(tmp_path, GROUP.format(end=end), per_node=1)
    said = (tmp_path / "log").read_text()
    assert outcome == Outcome("ok"), said
    assert said.count("MPIDI_UCX_comm_addr_exchange") == 1
    nothing_left(cluster, tmp_path)


def test_a_rank_that_hangs_writes_its_stacks(job: str, cluster: Cluster, tmp_path: Path) -> None:
    def look() -> None:
        if not here(tmp_path):
            os.utime(tmp_path / "log")  # that processes start slowly is no hang

    outcome = supervised(tmp_path, ALONE.format(do=""), timeout_s=1, look=look)
    assert outcome.status == "timeout"
    assert (tmp_path / "log").read_text().count("in stuck") == 4, "of every rank"
    nothing_left(cluster, tmp_path)


def nothing_left(cluster: Cluster, folder: Path) -> None:
    wait_for(lambda: not cluster.processes(), "no process of the job", 15)
    assert not (folder / RENDEZVOUS).exists()


def here(folder: Path) -> bool:
    """Whether all four ranks run."""
    log = folder / "log"
    return log.exists() and log.read_text().count("here") == 4


def test_a_request_that_is_never_answered_is_made_again(
    job: str, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another step of the job has its CPUs for itself; it ends while the second srun waits."""
    monkeypatch.setattr(slurm_step, "PATIENCE_S", 1)
    busy = tuple("--immediate=1" if word.startswith("--immediate") else word for word in slurm_step.ARGUMENTS)
    monkeypatch.setattr(slurm_step, "ARGUMENTS", tuple(word for word in busy if word[:6] not in ("--over", "--expo")))
    holder = subprocess.Popen(["srun", f"--jobid={job}", "-N2", "-n4", "--exact", "sleep", "60"])
    try:
        wait_for(lambda: cluster.ask("squeue", "-h", "-s", "-j", job).strip(), "the other step")

        def look() -> None:
            if "busy" in (tmp_path / "log").read_text():
                holder.terminate()

        assert supervised(tmp_path, ALONE.format(do="sys.exit()"), look=look) == Outcome("ok")
        assert (tmp_path / "log").read_text().count("here") == 4
    finally:
        holder.terminate()
        holder.wait()


@pytest.mark.parametrize(
    ("command", "status", "words"),
    [
        ("scancel {job}.0", "preempted", "Slurm cancelled the ranks"),
        ("scontrol update nodename=node2 state=DOWN reason=test", "node_lost", "node"),
    ],
)
def test_what_slurm_does_to_the_ranks(
    job: str, cluster: Cluster, tmp_path: Path, command: str, status: str, words: str
) -> None:
    done: list[str] = []

    def look() -> None:
        if not done and here(tmp_path):
            done.append(cluster.ask(*command.format(job=job).split()))

    outcome = supervised(tmp_path, ALONE.format(do=""), look=look)
    assert outcome.status == status and words in outcome.reason, (tmp_path / "log").read_text()
    nothing_left(cluster, tmp_path)


def test_the_ranks_end_with_their_parent(job: str, cluster: Cluster, tmp_path: Path) -> None:
    """A parent that is killed cannot end them; outside of a batch step Slurm does not either."""
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from tests.slurm.test_ranks_srun import ALONE, supervised
supervised(Path({str(tmp_path)!r}), ALONE.format(do=""))
"""
    parent = subprocess.Popen([sys.executable, "-c", code])
    try:
        wait_for(lambda: here(tmp_path), "the ranks")
    finally:
        parent.kill()
        parent.wait()
    wait_for(lambda: not cluster.processes(), "no process of the job", 15)
