"""A real Slurm on this machine: a controller and four nodes of four CPUs, started in a folder of its own.

Nodes are emulated (`slurmd -N node1`), without cgroups and accounting; their daemons die with the process that started
them. Partition `batch` is the default; `urgent` takes its nodes away, and what ran there is requeued.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta
from pathlib import Path

from harness.launch import die_with_parent

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun")
INSTALL = "apt-get install -y --no-install-recommends slurm-wlm munge"
NODES = 4
CPUS = 4
CLIENT_S = 30.0
"""A client of Slurm that has no answer by then will have none."""
START_S = 30.0
SAID = 1000
"""How many of the last characters of each daemon's output are printed if they do not start."""

CONF = """\
ClusterName=emulated
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
TmpFS={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SlurmctldParameters=preempt_send_user_signal
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0,defer_batch
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/jobcomp.txt
ReturnToService=2
SlurmdTimeout=10
KillWait=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
MpiDefault=none
{nodes}
PartitionName=batch Nodes=node[1-{count}] Default=YES MaxTime=60 DefaultTime=10 State=UP PriorityTier=1
PartitionName=urgent Nodes=node[1-{count}] MaxTime=60 DefaultTime=10 State=UP PriorityTier=10
"""
NODE = "NodeName=node{n} NodeAddr=127.0.0.1 NodeHostname={host} Port={port} CPUs={cpus} RealMemory=4000 Gres=gpu:4"


class Cluster:
    """A Slurm that runs. Its clients need `environment`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = inside(os.environ) | {"SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Write the configuration, start all daemons, wait until every node is idle."""
        _configure(self.folder)
        self._daemon("munged", "--foreground", "--force", f"--key-file={self.folder / 'munge.key'}",
                     *(f"--{name}-file={self.folder / f'munged.{name}'}" for name in ("pid", "log", "seed")),
                     f"--socket={self.folder / 'munge.sock'}")  # fmt: skip
        wait_for(lambda: (self.folder / "munge.sock").exists(), "munged")
        self._daemon("slurmctld", "-D", "-c")
        for number in range(1, NODES + 1):
            self._daemon(f"slurmd{number}", "-D", "-N", f"node{number}")
        idle = f"idle {NODES}"
        try:
            wait_for(lambda: self.ask("sinfo", "-h", "-o", "%T %D", check=False).strip() == idle, "four nodes")
        except AssertionError as error:
            said = [f"{path.name}: {path.read_text()[-SAID:]}" for path in sorted(self.folder.glob("*.out"))]
            raise AssertionError("\n".join([str(error), *said])) from None

    def ask(self, *command: str, check: bool = True) -> str:
        """What a client of Slurm prints; on a busy machine, or while the controller starts, it may take some tries."""
        deadline = time.monotonic() + CLIENT_S
        while True:
            done = subprocess.run(
                command, env=self.environment, capture_output=True, text=True, check=False, timeout=CLIENT_S,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
            if done.returncode == 0 or not check:
                return done.stdout
            assert time.monotonic() < deadline, f"{command} ({done.returncode}): {done.stdout}{done.stderr}"
            time.sleep(1)

    def jobs(self) -> dict[str, str]:
        """The state of each job that Slurm remembers: {"7_0": "RUNNING"}."""
        lines = self.ask("squeue", "-h", "-r", "-t", "all", "-o", "%i %T").splitlines()
        return dict(line.split() for line in lines)

    def settled(self) -> bool:
        """No job is left that waits, runs or ends."""
        return not self.ask("squeue", "-h").strip()

    def begin_soon(self) -> None:
        """As an administrator who does not wait: requeued jobs are held back for two minutes, or until released.

        A node refuses one that comes back within the same second.
        """
        columns = "JobArrayID:|,Reason:|,EligibleTime:"
        for line in self.ask("squeue", "-h", "-r", "-t", "PENDING", "-O", columns).splitlines():
            job, reason, begin = line.split("|")
            if reason == "BeginTime" and datetime.fromisoformat(begin) > datetime.now() + timedelta(seconds=10):
                self.ask("scontrol", "update", f"jobid={job}", "StartTime=now+3", check=False)
            elif "requeued held" in reason:  # on a busy machine a node may fail to start a job
                self.ask("scontrol", "release", job, check=False)

    def restart_controller(self) -> None:
        """As an administrator does."""
        _end(self._daemons.pop("slurmctld"), signal.SIGTERM)
        self._daemon("slurmctld", "-D")
        wait_for(lambda: self.ask("sinfo", "-h", "-o", "%D", check=False).strip() != "", "the controller")

    def processes(self) -> list[int]:
        """All that jobs have started and that is still there."""
        return [pid for pid, names in self._marked() if any(name.startswith(b"SLURM_JOB_ID=") for name in names)]

    def _marked(self) -> Iterator[tuple[int, list[bytes]]]:
        """What belongs to this Slurm, its daemons too: process ids, each with its environment."""
        mark = f"SLURM_CONF={self.folder / 'slurm.conf'}".encode()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    names = (entry / "environ").read_bytes().split(b"\0")
                    if mark in names:
                        yield int(entry.name), names

    def clear(self) -> None:
        """End all jobs, and every process of theirs; nodes that were set down come back."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.ask("scancel", "--full", "-u", str(os.getuid()), check=False)
            for number in range(1, NODES + 1):
                self.ask("scontrol", "update", f"nodename=node{number}", "state=resume", check=False)
            with contextlib.suppress(AssertionError):
                wait_for(self.settled, "an empty queue")
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def stop(self) -> None:
        """End all jobs, all daemons, and what these leave: one for each step continues without them."""
        try:
            self.clear()
        finally:
            for daemon in reversed(self._daemons.values()):
                _end(daemon, signal.SIGTERM)
            for pid, _ in self._marked():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _daemon(self, name: str, *arguments: str) -> None:
        program = shutil.which(name.rstrip("0123456789"), path=f"{os.environ['PATH']}:/usr/sbin")
        assert program
        with (self.folder / f"{name}.out").open("ab") as out:
            self._daemons[name] = subprocess.Popen(
                [*die_with_parent.prefix(), program, *arguments], env=self.environment, stdin=subprocess.DEVNULL,
                stdout=out, stderr=out,
                start_new_session=True,
            )  # fmt: skip


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Cluster]:
    """A cluster with its files in `folder`; nothing of it is left afterwards."""
    cluster = Cluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def missing() -> str:
    """What to install where a part of Slurm is not there, else nothing."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    absent = [name for name in PROGRAMS if not shutil.which(name, path=path)]
    return f"{', '.join(absent)} not found: {INSTALL}" if absent else ""


def wait_for(condition: Callable[[], object], what: str, limit_s: float = START_S) -> None:
    """Look again and again; it is an error if `condition` does not come true."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {limit_s:g} s"
        time.sleep(0.1)


def inside(variables: Mapping[str, str]) -> dict[str, str]:
    """`variables` without those of a Slurm job in which the tests themselves may run."""
    return {name: value for name, value in variables.items() if not name.startswith(("SLURM_", "SBATCH_", "PMI_"))}


def _configure(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    host = socket.gethostname().partition(".")[0]
    controller, *ports = _free_ports(NODES + 1)
    for name in ("state", *(f"node{number}" for number in range(1, NODES + 1))):
        (folder / name).mkdir()
    nodes = [NODE.format(n=n, host=host, port=port, cpus=CPUS) for n, port in enumerate(ports, 1)]
    user = _user()
    conf = CONF.format(host=host, port=controller, user=user, folder=folder, nodes="\n".join(nodes), count=NODES)
    (folder / "slurm.conf").write_text(conf)
    for number in range(4):  # no other file makes a device that Slurm hands out
        (folder / f"gpu{number}").symlink_to("/dev/null")
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-3]\n")


def _user() -> str:
    import pwd

    return pwd.getpwuid(os.getuid()).pw_name


def _free_ports(count: int) -> list[int]:
    """Below those of outgoing connections: any program could have one of these before its daemon does."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found: set[int] = set()
    while len(found) < count:
        with contextlib.suppress(OSError), socket.socket() as one:
            one.bind(("127.0.0.1", random.SystemRandom().randrange(10_000, max(lowest, 20_000))))
            found.add(one.getsockname()[1])
    return list(found)


def _end(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
