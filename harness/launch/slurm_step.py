"""Ranks started by Slurm: one `srun` command whose tasks are the ranks, on all nodes of the job. Free of torch.

    batch step: parent --one srun--> node 1: rank 0, rank 1     each: python -m harness.worker RUN_DIR train STEP TOKEN
                                     node 2: rank 2, rank 3

They find each other by RUN_DIR/rendezvous.json (`harness.launch.slurm_ranks`). A rank fails by itself, and srun then
ends all others.
"""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import DictConfig

from harness.config import registry
from harness.core.cluster import Cluster
from harness.core.plan import Mesh
from harness.core.problem import CannotRun, Problem
from harness.core.run_files import RENDEZVOUS
from harness.host import slurm_job
from harness.host.slurm_job import Allocation
from harness.interfaces import Capabilities
from harness.launch import mpi
from harness.launch.rank_names import RankNames

CHOICES = ("auto", "fork", "srun")
"""Values of `launch.ranks`."""
PATIENCE_S, TRIES = 20, 3
"""Within which srun must have its nodes, which are the job's own, and how often it is started: a request that comes
while the controller restarts is never answered, the next one is, and MPI may fail at its first start
(`harness.launch.slurm_log.NO_ADDRESSES`)."""
ARGUMENTS = (
    "--overlap",  # a step that is ending on these CPUs does not hold this one up
    "--overcommit",  # GPUs of a node may be more than its tasks in the job, and each gets a rank
    f"--immediate={PATIENCE_S}",  # without it a step that cannot begin waits for ever
    "--cpu-bind=none",  # a rank has more threads than the one that computes
    "--kill-on-bad-exit=1",  # the first rank that fails ends all
    "--wait=0",  # rank 0 still writes when the others have ended
    "--export=ALL",  # whatever SLURM_EXPORT_ENV says
)


@dataclass(frozen=True)
class Step:
    """The ranks of a run as a step of a Slurm job, `per_node` on a node; `crowded`: the job has fewer tasks there."""

    mesh: Mesh
    per_node: int
    mpi: bool
    crowded: bool = False
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    """Distinguishes this step's rendezvous.json from one that an earlier run has left."""

    starter = "srun"
    starts_one = False
    tries = TRIES
    late_s = 0.0

    @property
    def names(self) -> RankNames:
        return RankNames(self.mesh, several=True)

    def command(self) -> list[str]:
        """The start of the command line: srun and its options, before the command of a rank."""
        count = self.mesh.size
        nodes = -(-count // self.per_node)
        way = f"--mpi={'pmi2' if self.mpi else 'none'}"
        return ["srun", f"--nodes={nodes}", f"--ntasks={count}", *self._places(), way, *ARGUMENTS]

    def _places(self) -> list[str]:
        """Options that place rank r on node r // per_node, as planned.

        Slurm distributes the planes of a crowded job in another order: there, a last node that is not full gets as many
        ranks as the others, or one less.
        """
        if self.mesh.size % self.per_node == 0:
            return [f"--ntasks-per-node={self.per_node}", "--distribution=block"]
        return ["--distribution=block" if self.crowded else f"--distribution=plane={self.per_node}"]

    @contextmanager
    def cleaning_up(self, run_dir: Path, start: str = "0") -> Iterator[None]:
        """Within it the ranks run; then rendezvous.json and shared memory of dead ranks on this node are removed."""
        since = time.time()
        try:
            yield
        finally:
            (run_dir / RENDEZVOUS).unlink(missing_ok=True)
            if self.mpi:
                mpi.remove_orphaned_memory(since)


def job(config: DictConfig) -> Allocation | None:
    """The Slurm job on whose nodes srun will start the ranks; None where they are forked, or are none."""
    here = _allocation(config)
    try:
        return here if here and registry.build("engine", config.engine).capabilities.multi_process else None
    except (CannotRun, ValueError):
        return None  # a problem that another check reports


def _allocation(config: DictConfig) -> Allocation | None:
    """The Slurm job on whose nodes srun would start ranks, if there are any."""
    forks = config.launch.ranks == "fork" or config.mode in ("profile", "calibrate")
    return None if forks else slurm_job.current()


def step(config: DictConfig, mesh: Mesh, cluster: Cluster) -> Step | None:
    """Return the Slurm step that starts the ranks of a plan; None if srun does not start them."""
    here = job(config)
    if here is None:
        return None
    capabilities: Capabilities = registry.build("engine", config.engine).capabilities
    each = cluster.devices_per_node
    return Step(mesh, each, capabilities.mpi, crowded=min(here.tasks) < each)


def problems(config: DictConfig, capabilities: Capabilities) -> list[Problem]:
    """Return the problems of starting the ranks by srun, if it is to start them."""
    chosen, here = config.launch.ranks, slurm_job.current()
    message, fix, hint = "", "auto", ""
    if chosen == "srun" and here is None:
        message, hint = f"needs a Slurm job, {slurm_job.JOB} is not set", "run.py inside of sbatch or salloc"
    elif chosen == "srun" and not capabilities.multi_process:
        message = f"needs ranks, engine={config.engine.name} is one process"
    elif capabilities.multi_process and _allocation(config) and shutil.which("srun") is None:
        there = f"{slurm_job.JOB}={here.job if here else ''}"
        message, fix = f"needs srun on the PATH in a Slurm job ({there}), fork is for this node alone", "fork"
    return [Problem("launch.ranks", chosen, message, ({"launch.ranks": fix},), hint)] if message else []
