"""Trials by disturbance: `make soak`, an hour and a half.

    tests marked soak      every engine computes on two nodes of an emulated Slurm what it does here, and ends well
                           after each fault; 20 random second commands on the folders of runs that train
    on an emulated Slurm   24 points over all engines, 2 nodes x 2 ranks each; meanwhile a node is set down, a rank is
                           killed, a job preempted, another one cancelled, the controller started again
    here                   200 points, one in ten killed at a random moment, and twice the sweep itself

After one further start every point has one record, which is ok, and no process is left.

    make soak ARGS="faults and gpipe"    only the tests marked soak whose names fit
    make soak ARGS="4 20"                what continuous integration does: 4 points on Slurm, 20 here, and of the tests
                                         those marked short_soak, with each engine and each fault once
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness.core.record import RunRecord
from slurm.array import Array
from slurm.point_states import PointState, survey
from tests.slurm import emulated
from tests.slurm.emulated import Cluster

ROOT = Path(__file__).resolve().parents[1]
PATIENCE_S = 3600.0
TINY = ["model=mlp", "batch.size=16", "batch.micro_batches=4", "warmup=1", "tracker=none"]
ENGINES = (
    "engine=ddp mesh.data=4",
    "engine=fsdp mesh.data=4",
    "engine=myelin mesh.pipeline=2 mesh.data=2",
    "engine=sbp mesh.tensor=4 planner=autoddl",
    "engine=deepspeed mesh.pipeline=2 mesh.data=2",
    "engine=torch_pipelining mesh.pipeline=2 mesh.data=2",
    "engine=pipeline engine.schedule=zbv mesh.pipeline=2 mesh.data=2",
    "engine=gpipe mesh.pipeline=2",
    "engine=periodic mesh.pipeline=2 planner=contiguous",
    "engine=torchgpipe mesh.pipeline=2",
    "engine=single",
)
ENOUGH = 20
"""Of so many points some are left for every disturbance."""
END_S = 120.0
"""Seconds in which a point has ranks, and in which it ends once one of them is killed, on a busy machine."""
FAILED = "missing,oom,infeasible,timeout,preempted,node_lost,error"


def main(arguments: Sequence[str]) -> int:
    """`[POINTS ON SLURM] [POINTS HERE]`, or words for pytest's -k; raises AssertionError where a trial fails."""
    if arguments[:1] == ["--help"]:
        print(__doc__)
        return 0
    tests = [sys.executable, "-m", "pytest", "-q", "--durations=20", "tests", "-m"]
    if arguments and not arguments[0].isdigit():
        return subprocess.run([*tests, "soak", "-k", " ".join(arguments)], cwd=ROOT, check=False).returncode
    many, few = (int(text) for text in arguments or ("24", "200"))
    assert not emulated.missing(), emulated.missing()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that all is ended then, too
    short = ["short_soak", "-n2", "--dist=loadgroup"]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*tests, *(short if arguments else ["soak"])], cwd=ROOT, env=one_thread, check=True)
    with tempfile.TemporaryDirectory() as folder:
        with emulated.running(Path(folder) / "cluster") as cluster:
            on_slurm(many, Path(folder), cluster)
        here(few, Path(folder))
    return 0


def on_slurm(count: int, folder: Path, cluster: Cluster) -> None:
    """Points on the emulated cluster, and all that can happen to them there."""
    names = itertools.islice(itertools.cycle(ENGINES), count)
    points = [f"[{', '.join([*name.split(), f'seed={seed}'])}]" for seed, name in enumerate(names)]
    config = folder / "config" / "sweeps"
    config.mkdir(parents=True)
    (config / "soak.yaml").write_text("points:\n" + "".join(f"  - {point}\n" for point in points))
    environment = cluster.environment
    os.environ["SLURM_CONF"] = environment["SLURM_CONF"]
    run = folder / "slurm"
    typed = [*TINY, "steps=500", "launch.checkpoint_every=50", f"out={run}", "slurm.nodes=2", "slurm.tasks=2"]
    own = ("--config-dir", str(config.parent))
    _call("slurm.submit", *own, "+sweeps=soak", *typed, "slurm.parallel=2", "slurm.time=20", environment=environment)
    left_out = _disturb(run, cluster)
    assert not left_out or count < ENOUGH, f"the sweep ended before {left_out}"
    _wait_until_idle(cluster)
    print(_call("slurm.status", str(run), environment=environment))
    _call("slurm.status", str(run), "--only", FAILED, environment=environment)
    _wait_until_idle(cluster)
    found = survey(Array(run))[0]
    assert len(found) == count
    _all_ok([run / one.point.id for one in found])
    emulated.wait_for(lambda: not cluster.processes(), "no process of a job is left")


def _disturb(run: Path, cluster: Cluster) -> list[str]:
    """All that can happen, each to a point that trains; returns what no point was left for."""
    left = deque([_node_down, _kill_rank, _preempt, _cancel, _restart])
    while left and (disturbed := _one_that_trains(run, cluster)):
        point, job = disturbed
        print(f"{left[0].__name__.strip('_')}: point {point.index}", flush=True)
        left[0](cluster, job)
        if left[0] is _kill_rank and _end_of(run, point.index) == "ok":
            continue  # it had just ended
        left.popleft()
    return [disturb.__name__.strip("_") for disturb in left]


def _end_of(run: Path, index: int) -> str:
    """How a point ends, before the next disturbance hides it."""

    def state() -> str:
        return survey(Array(run))[0][index].state

    emulated.wait_for(lambda: state() != "running", "the end of a point whose rank was killed", END_S)
    return state()


def _one_that_trains(run: Path, cluster: Cluster) -> tuple[PointState, str] | None:
    """A point in the middle of its steps, and its job; None once there is none to come."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if cluster.settled():
            return None
        cluster.begin_soon()
        lines = cluster.ask("squeue", "-h", "-r", "-t", "RUNNING", "-o", "%F_%K %K").splitlines()
        jobs = {int(index): job for job, index in map(str.split, lines) if index.isdigit()}
        for one in survey(Array(run))[0]:
            steps = run / one.point.id / "metrics.jsonl"
            if one.state == "running" and one.index in jobs and steps.exists() and steps.stat().st_size:
                return one, jobs[one.index]
        time.sleep(0.5)
    raise AssertionError("no point trains")


def _node_down(cluster: Cluster, job: str) -> None:
    node = cluster.ask("squeue", "-h", "-j", job, "-o", "%B").strip()
    cluster.ask("scontrol", "update", f"nodename={node}", "state=down", "reason=soak")
    time.sleep(5)
    cluster.ask("scontrol", "update", f"nodename={node}", "state=resume", check=False)  # it may be back by itself


def _kill_rank(cluster: Cluster, job: str) -> None:
    """Kill a rank of a job, once it has one: a point that resumes has its former lines before it has ranks."""
    array, _, index = job.partition("_")
    mark = {f"SLURM_ARRAY_JOB_ID={array}".encode(), f"SLURM_ARRAY_TASK_ID={index}".encode()}
    deadline = time.monotonic() + END_S
    while not _kill_one(cluster, mark) and time.monotonic() < deadline:
        time.sleep(0.1)


def _kill_one(cluster: Cluster, mark: set[bytes]) -> bool:
    """Kill the first rank with these variables; returns whether there is one."""
    for pid in cluster.processes():
        try:
            environ = set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if mark <= environ and b"harness.worker" in command and b"srun" not in command:
            os.kill(pid, signal.SIGKILL)
            return True
    return False


def _preempt(cluster: Cluster, job: str) -> None:
    cluster.ask("sbatch", "-p", "urgent", "-N4", "--ntasks-per-node=4", "-o", "/dev/null", "--wrap", "sleep 5")
    time.sleep(5)


def _cancel(cluster: Cluster, job: str) -> None:
    cluster.ask("scancel", job)


def _restart(cluster: Cluster, job: str) -> None:
    cluster.restart_controller()


def _wait_until_idle(cluster: Cluster) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not cluster.settled():
        assert time.monotonic() < deadline, cluster.ask("squeue")
        cluster.begin_soon()
        time.sleep(1)


def here(count: int, folder: Path) -> None:
    """A local sweep; its runs, and twice it itself, are killed while it continues."""
    run, rng = folder / "here", random.Random(0)
    mark = f"REGATTA_SOAK={os.getpid()}"
    typed = [*TINY, "engine=single", "steps=2", f"seed=range({count})", f"out={run}"]
    doomed, killed = set(rng.sample(range(1, count), max(1, count // 10))), 0
    last = {count // 3, 2 * count // 3}
    for start in itertools.count():
        sweep = subprocess.Popen(
            [sys.executable, str(ROOT / "run.py"), "-m", *typed], stdout=subprocess.DEVNULL, cwd=folder,
            env=os.environ | dict([mark.split("=")]), start_new_session=True,
        )  # fmt: skip
        for began in _beginnings(sweep, run):
            victim = sweep.pid if began in last else None
            if began in doomed or victim:
                time.sleep(rng.uniform(0, 3))
                killed += _kill(victim or rng.choice([pid for pid in _marked(mark) if pid != sweep.pid] or [0]))
                doomed.discard(began)
                last.discard(began)
        code = sweep.wait()
        print(f"start {start + 1}: {code}", flush=True)
        assert start < 5, "it never ends well"
        if code == 0:
            break
    assert killed >= max(1, count // 20), f"{killed} were killed"
    folders = [path for path in run.iterdir() if path.is_dir()]
    assert len(folders) == count
    _all_ok(folders)
    emulated.wait_for(lambda: not _marked(mark), "no process of the sweep is left")


def _beginnings(sweep: subprocess.Popen[bytes], run: Path) -> Iterator[int]:
    """The number of points that have begun, each time one more has, until the sweep has ended."""
    seen, deadline = 0, time.monotonic() + PATIENCE_S
    while sweep.poll() is None:
        assert time.monotonic() < deadline, "the sweep does not end"
        now = len(list(run.glob("*/console")))
        if now > seen:
            seen = now
            yield now
        time.sleep(0.05)


def _marked(mark: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def _kill(pid: int) -> bool:
    """Whether there was such a process."""
    if pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            return True
    return False


def _all_ok(folders: Sequence[Path]) -> None:
    """One whole record in each, which is ok; nothing half-written next to it."""
    for folder in folders:
        record = RunRecord.load(folder / "record.json")
        assert record.status == "ok", f"{folder.name}: {record.status} {record.reason}"
        steps = (folder / "metrics.jsonl").read_text().splitlines()
        assert len(steps) == record.config["steps"] + record.config["warmup"], f"{folder.name}: {len(steps)} steps"
        assert not list(folder.glob(".record.json.*")), f"{folder.name}: a record was left half-written"


def _call(module: str, *arguments: str, environment: dict[str, str]) -> str:
    path = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], env=environment | {"PYTHONPATH": path}, text=True, check=False,
        capture_output=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, f"{module} {' '.join(arguments)}: {done.stdout}{done.stderr}"
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
