"""What a search found: for the record, and for the terminal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from harness.planning import Draft
from harness.preparation import Ground
from harness.problem import Problem
from harness.tune.line import Line


@dataclass(frozen=True)
class Tuned:
    """All candidates; the best one, its plan, what that rests on, the command that runs it, and what to know of it."""

    lines: tuple[Line, ...]
    best: Line
    draft: Draft
    ground: Ground
    command: str
    notes: tuple[Problem, ...]

    @property
    def simulated(self) -> list[Line]:
        """Those that were simulated and fit, the fastest first."""
        done = [line for line in self.lines if line.simulated_step_time_s is not None and not line.out]
        return sorted(done, key=lambda line: line.simulated_step_time_s or 0.0)

    def off(self) -> list[float]:
        """Closed form / simulated, of the seconds of each candidate that was simulated and fits."""
        pairs = ((line.closed_form_step_time_s, line.simulated_step_time_s) for line in self.simulated)
        return [closed / simulated for closed, simulated in pairs if closed is not None and simulated]

    def metrics(self) -> dict[str, Any]:
        """For the record: the best one's figures, simulated, and under "tuned" what was chosen among how many."""
        one, figures = self.best.candidate, self.draft.plan.predicted
        step_s = figures["step_time_s"]
        names = ("step_time_s", "peak_memory_bytes", "utilization", "bubble_fraction", "bytes_sent")
        return {name: figures[name] for name in names} | {
            "throughput": one.batch / step_s if step_s else None,
            "tuned": {
                "micro_batch": one.micro_batch,
                "micro_batches": one.micro_batches,
                "tensor": one.mesh.tensor,
                "pipeline": one.mesh.pipeline,
                "data": one.mesh.data,
                "closed_form_step_time_s": self.best.closed_form_step_time_s,
                "closed_form_over_simulated": self.off(),
                "candidates": len(self.lines),
                "simulated": len(self.simulated),
                "command": self.command,
            },
        }
