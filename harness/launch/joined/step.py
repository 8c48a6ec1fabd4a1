"""Ranks that torchrun has started, each as `run.py`: the parent is in rank 0's process. Free of torch.

    torchrun, node 1:  run.py, rank 0: plans, prints, records --> python -m harness.worker RUN_DIR train STEP TOKEN
                          `- herald: says in torchrun's store which folder it is, and when all is over
                       run.py, rank 1: becomes `python -m harness.worker join` --fork--> train STEP TOKEN
    torchrun, node 2:  run.py, rank 2: ...

From there on they are as ranks of srun: they meet by RUN_DIR/rendezvous.json (`harness.launch.slurm_ranks`).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import DictConfig

from harness.core.plan import Mesh
from harness.core.problem import CannotRun, Fix, Problem
from harness.core.run_files import RENDEZVOUS
from harness.host import launched
from harness.host.slurm_job import Allocation
from harness.interfaces import Capabilities
from harness.launch.joined import herald
from harness.launch.rank_names import RankNames

LATE_S = 3.0
"""Within which another node says how a rank has ended, to which this one has lost its connection."""


@dataclass(frozen=True)
class JoinedStep:
    """The ranks of a run, of which this process starts rank 0 alone."""

    mesh: Mesh
    token: str = field(default_factory=lambda: secrets.token_hex(8))

    starter = "rank 0"
    starts_one = True
    tries = 1
    late_s = LATE_S

    @property
    def names(self) -> RankNames:
        return RankNames(self.mesh, several=True)

    def command(self) -> list[str]:
        """Nothing: the command of a rank is all."""
        return []

    @contextmanager
    def cleaning_up(self, run_dir: Path, start: str = "0") -> Iterator[None]:
        """Within it all ranks train, those of other processes too; then rendezvous.json is removed."""
        herald.announce(run_dir, start, self.token)
        try:
            yield
        finally:
            (run_dir / RENDEZVOUS).unlink(missing_ok=True)


def group(config: DictConfig) -> Allocation | None:
    """The nodes of the ranks that torchrun has started; None without it, and where no ranks are needed."""
    return None if config.mode in ("profile", "calibrate") else launched.group()


def step(mesh: Mesh) -> JoinedStep:
    """The ranks of a plan. Raises `CannotRun` where it is for another number of ranks than there are."""
    found = launched.place()
    if found.count != mesh.size:
        message = f"ranks are started, the plan is for {mesh.size}: one for each device of the mesh"
        hint = f"start {mesh.size} ranks: torchrun --nnodes=N --nproc-per-node=P with N x P = {mesh.size}"
        raise CannotRun([Problem(found.count_name, found.count, message, hint=hint)])
    return JoinedStep(mesh)


def problems(config: DictConfig, capabilities: Capabilities) -> list[Problem]:
    """Return the problems of being one of several ranks, if this process is."""
    here = group(config)
    if here is None:
        return []
    wrong: list[Problem] = []
    if config.launch.ranks != "auto":
        message = f"torchrun has started the ranks ({here.started})"
        wrong.append(Problem("launch.ranks", config.launch.ranks, message, ({"launch.ranks": "auto"},)))
    if not capabilities.multi_process:
        message = f"is one process, and this is one of several ranks ({here.started})"
        hint = "python run.py ... without torchrun"
        fixes: tuple[Fix, ...] = ({"engine": "ddp"},) if config.engine.name == "single" else ()
        wrong.append(Problem("engine", config.engine.name, message, fixes, hint))
    if capabilities.mpi:
        message = f"needs ranks that mpiexec or srun starts, torchrun has started these ({here.started})"
        wrong.append(Problem("engine.transport", "mpi", message, ({"engine.transport": "torch"},)))
    return wrong
