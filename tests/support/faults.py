"""A run that is disturbed while it trains: what it leaves, and how it says it ended.

Disturbed(engine, folder)      python run.py engine=..., which trains until it is ended
  .wait_for_steps(40)
  .send("KILL rank", rng)      the faults, by name: FAULTS
  .end()                       Ending: seconds, exit code, record, whatever is left over
"""

from __future__ import annotations

import functools
import getpass
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from harness.core.record import RunRecord
from harness.core.run_files import METRICS
from harness.launch import die_with_parent
from harness.run import checkpoint_files, stored_record

ROOT = Path(__file__).resolve().parents[2]
SHARED, TEMPORARY = Path("/dev/shm"), Path("/tmp")
MPI_FILES = ("mpich", "ucx", "torch_", "hydra_")
CACHES = (f"torchinductor_{getpass.getuser()}",)
SOON_S = 3.0
PATIENCE_S = 90.0
"""For the start of a run on a busy machine."""
TINY = ["model=mlp", "batch.size=16", "batch.micro_batches=4", "warmup=1", "tracker=none"]
SETTINGS = ["steps=1000000", "launch.checkpoint_every=20"]
ENGINES = {
    "single": (),
    "gpipe": ("mesh.pipeline=2",),
    "myelin": ("mesh.pipeline=2",),
    "sbp": ("mesh.tensor=2", "planner=autoddl"),
    "ddp": ("mesh.data=2",),
    "fsdp": ("mesh.data=2",),
    "deepspeed": ("mesh.pipeline=2",),
    "torch_pipelining": ("mesh.pipeline=2",),
    "pipeline": ("mesh.pipeline=2",),
}


@dataclass(frozen=True)
class Process:
    """A process of a run: its id, and how its command line reads."""

    pid: int
    parent: int
    command: str


@functools.cache
def timeout_s() -> float:
    """5, or more where even the import of torch takes seconds: a start without progress for so long is ended, too."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return max(5.0, round(3 * (time.monotonic() - began)))


def processes(mark: str) -> list[Process]:
    """Those that have `mark` in their environment, zombies not counted."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError, IndexError):
            if mark.encode() not in (entry / "environ").read_bytes().split(b"\0"):
                continue
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if fields[0] != "Z":
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found.append(Process(int(entry.name), int(fields[1]), command))
    return found


def _temporary() -> set[str]:
    names = {f"{folder}/{name}" for folder in (SHARED, TEMPORARY) for name in os.listdir(folder)}
    return {name for name in names if Path(name).name.startswith(MPI_FILES)}


@dataclass(frozen=True)
class Ending:
    """How a disturbed run ended."""

    seconds: float
    code: int
    record: RunRecord
    error: str
    left: list[str] = field(default_factory=list)
    """What should not be there: processes, shared memory, temporary files, parts of files."""
    checkpoints: list[int] = field(default_factory=list)


class Disturbed:
    """A run of an engine in `folder`, with its own folder for temporary files."""

    def __init__(self, engine: str, folder: Path, *more: str) -> None:
        self.folder, self.temporary = folder / "run", folder / "tmp"
        self.temporary.mkdir(parents=True)
        self.mark = f"REGATTA_FAULT={os.getpid()}-{time.monotonic_ns()}"
        self.before = _temporary()
        self.rank = 0
        self.timeout_s = timeout_s()
        typed = [*TINY, *SETTINGS, f"launch.timeout_s={self.timeout_s}", f"out={self.folder}"]
        typed += [f"engine={engine}", *ENGINES[engine], *more]
        variables = dict([self.mark.split("=", 1)]) | {"TMPDIR": str(self.temporary), "PYTHONPATH": str(ROOT)}
        self.errors = (folder / "stderr").open("w+")
        self.parent = subprocess.Popen(
            [*die_with_parent.prefix(), sys.executable, str(ROOT / "run.py"), *typed],
            env=os.environ | variables, cwd=folder,
            stdout=subprocess.DEVNULL, stderr=self.errors, start_new_session=True,
        )  # fmt: skip

    def __enter__(self) -> Disturbed:
        return self

    def __exit__(self, *error: object) -> None:
        """End what is left, whatever happened."""
        for one in self.processes():
            with suppress(ProcessLookupError):
                os.kill(one.pid, signal.SIGKILL)
        self.parent.wait()
        self.errors.close()

    def processes(self) -> list[Process]:
        return processes(self.mark)

    def steps(self) -> int:
        with suppress(OSError):
            return len((self.folder / METRICS).read_text().splitlines())
        return 0

    def wait_for_steps(self, count: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while self.steps() < count:
            assert self.parent.poll() is None, f"the run has ended: {self._error()}"
            assert time.monotonic() < deadline, "the run takes no steps"
            time.sleep(0.02)

    def worker(self) -> int:
        """The process that trains or forks the ranks: the parent's own, or its fork server's."""
        workers = [one for one in self.processes() if "harness.worker" in one.command]
        started = next(one.pid for one in workers if one.parent == self.parent.pid)
        return next((one.pid for one in workers if one.parent == started and "serve" in one.command), started)

    def ranks(self) -> list[int]:
        """The processes that train: the worker's forked ranks, in their order, or the worker alone."""
        worker = self.worker()
        forked = [one.pid for one in self.processes() if one.parent == worker and "harness.worker" in one.command]
        return sorted(forked) or [worker]

    def send(self, fault: str, rng: random.Random) -> None:
        """Do to the run what `FAULTS` says."""
        self.since = time.monotonic()
        FAULTS[fault](self, rng)

    def end(self, patience_s: float = 60.0) -> Ending:
        """Wait for the end of all processes."""
        deadline = time.monotonic() + patience_s
        code = self.parent.wait(patience_s)
        while (left := self.processes()) and time.monotonic() < min(deadline, self.since + 10.0):
            time.sleep(0.02)
        seconds = time.monotonic() - self.since
        leftover = [f"process {one.pid} {one.command}" for one in left]
        leftover += self._files_that_stay()
        names = {path.name for path in self.folder.rglob("*")}
        parts = [name for name in names if ".part" in name or name.startswith((".record", ".error", ".stop"))]
        parts += sorted(names & {"stop", "hang", "rendezvous.json"})
        deadline = time.monotonic() + SOON_S  # threads of a process that is killed hold its lock until they have ended
        while (record := stored_record.load(self.folder)).status == "running" and time.monotonic() < deadline:
            time.sleep(0.02)
        kept = checkpoint_files.steps(self.folder)
        return Ending(seconds, code, record, self._error(), leftover + ([] if code < 0 else parts), kept)

    def _files_that_stay(self) -> list[str]:
        """Those of another run on this machine go again; caches are not this run's alone."""
        deadline = time.monotonic() + SOON_S
        while (there := _temporary() - self.before) and time.monotonic() < deadline:
            time.sleep(0.1)
        return sorted(there) + [str(path) for path in self.temporary.iterdir() if path.name not in CACHES]

    def _error(self) -> str:
        self.errors.seek(0)
        return self.errors.read()


def _signal(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _to_all(number: int) -> Callable[[Disturbed, random.Random], None]:
    """As systemd, a container or a batch system does: to each process of the run, in no order."""

    def send(run: Disturbed, rng: random.Random) -> None:
        pids = [one.pid for one in run.processes()]
        rng.shuffle(pids)
        _signal(pids, number)

    return send


def _twice(run: Disturbed, rng: random.Random) -> None:
    run.parent.send_signal(signal.SIGINT)
    time.sleep(rng.uniform(0.05, 0.3))
    with suppress(ProcessLookupError):
        run.parent.send_signal(signal.SIGINT)


def _to_rank(number: int) -> Callable[[Disturbed, random.Random], None]:
    def send(run: Disturbed, rng: random.Random) -> None:
        ranks = run.ranks()
        run.rank = rng.randrange(len(ranks))
        _signal([ranks[run.rank]], number)

    return send


FAULTS: dict[str, Callable[[Disturbed, random.Random], None]] = {
    "KILL rank": _to_rank(signal.SIGKILL),
    "KILL group": lambda run, rng: os.killpg(run.worker(), signal.SIGKILL),
    "KILL parent": lambda run, rng: run.parent.kill(),
    "STOP rank": _to_rank(signal.SIGSTOP),
    "INT INT": _twice,
    "TERM": lambda run, rng: run.parent.terminate(),
    "INT all": _to_all(signal.SIGINT),
    "TERM all": _to_all(signal.SIGTERM),
    "TERM rank": _to_rank(signal.SIGTERM),
    "KILL launcher": lambda run, rng: _signal([run.worker()], signal.SIGKILL),
    "STOP group": lambda run, rng: os.killpg(run.worker(), signal.SIGSTOP),
}
"""What can happen to a run, by name; a rank is drawn at random."""
