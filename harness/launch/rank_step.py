"""The interface of ranks that are started alone, not forked: `slurm_step` by srun, `joined.step` by torchrun."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from harness.core.plan import Mesh
from harness.launch.rank_names import RankNames


class RankStep(Protocol):
    """The ranks of a plan's `mesh`, all at one start."""

    @property
    def mesh(self) -> Mesh: ...

    @property
    def token(self) -> str:
        """Distinguishes this start's rendezvous.json from one that an earlier run has left."""

    @property
    def names(self) -> RankNames: ...

    @property
    def starter(self) -> str:
        """What messages call the process that the parent starts."""

    @property
    def starts_one(self) -> bool:
        """The parent starts rank 0 alone, and the others are started elsewhere; else it starts a command for all."""

    @property
    def tries(self) -> int:
        """How often the ranks are started, where none of them did."""

    @property
    def late_s(self) -> float:
        """Seconds after the end of what the parent has started in which the log may still say how a rank ended."""

    def command(self) -> list[str]:
        """The start of the command line, before the command of a rank."""

    def cleaning_up(self, run_dir: Path, start: str = "0") -> AbstractContextManager[None]:
        """Within it the ranks run, from step `start` on; then it removes what they leave in the run's folder."""
