"""What messages call the processes of a run."""

from __future__ import annotations

from dataclasses import dataclass

from harness.core.plan import Mesh


@dataclass(frozen=True)
class RankNames:
    """Names of a worker and of its ranks; `mesh` None: they have no stages. Without `several` the worker trains."""

    mesh: Mesh | None = None
    several: bool = False

    @property
    def worker(self) -> str:
        """The process that the parent starts."""
        if self.mesh is None:
            return "the worker"
        return "the launcher of the ranks" if self.several else "rank 0, the only training process,"

    def rank(self, rank: int) -> str:
        """`rank 3, stage 1`, or `rank 3` where that is all there is to say."""
        return f"rank {rank}, stage {self.mesh.stage(rank)}" if self.mesh and self.several else f"rank {rank}"


NO_RANKS = RankNames()
