"""A candidate and what is known of it: a line of `tune.csv`.

What a search found: for the record, and for the terminal.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.checks.plan_fits import MEMORY
from harness.core.problem import NoPlan, Problem
from harness.planning.draft import Draft
from harness.planning.prepare import Ground
from harness.planning.tune.candidates import Candidate

TITLES = (
    "micro_batch",
    "micro_batches",
    "mesh.pipeline",
    "mesh.data",
    "mesh.tensor",
    "out",
    "closed_form_memory_bytes",
    "simulated_memory_bytes",
    "memory_limit_bytes",
    "closed_form_step_time_s",
    "simulated_step_time_s",
)


@dataclass(frozen=True)
class Line:
    """`problems` say why a candidate is out. Memory is that of the fullest device, in bytes.

    None means not computed: only the best by analytic estimate are simulated. Where the training state alone is
    too large, the estimate of memory is that alone, and there is no time.
    """

    candidate: Candidate
    problems: tuple[Problem, ...] = ()
    closed_form_memory_bytes: int | None = None
    simulated_memory_bytes: int | None = None
    memory_limit_bytes: int | None = None
    closed_form_step_time_s: float | None = None
    simulated_step_time_s: float | None = None
    no_plan: NoPlan | None = None
    """The planner's problems, before their fixes have been computed."""

    @property
    def out(self) -> str:
        """The first reason why it is out; "" where it is not."""
        return self.problems[0].statement if self.problems else ""

    @property
    def full(self) -> bool:
        """Whether it is out for the memory of a device."""
        return bool(self.problems) and self.problems[0].key == MEMORY

    @property
    def needs_bytes(self) -> int | None:
        """The best known value of its memory: simulated, else estimated."""
        return self.simulated_memory_bytes or self.closed_form_memory_bytes

    def cells(self) -> list[object]:
        """Return a CSV row in the order of `TITLES`; None is written as an empty cell."""
        one = self.candidate
        return [
            one.micro_batch,
            one.micro_batches,
            one.mesh.pipeline,
            one.mesh.data,
            one.mesh.tensor,
            *(getattr(self, title) for title in TITLES[5:]),
        ]


def as_csv(lines: Sequence[Line]) -> str:
    """A line for each candidate."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(TITLES)
    writer.writerows(line.cells() for line in lines)
    return text.getvalue()


@dataclass(frozen=True)
class Reason:
    """Why so many candidates are impossible, with the fixes."""

    candidates: int
    reason: str

    def __str__(self) -> str:
        """21 impossible: engine sbp   needs a plan   -> planner=autoddl"""
        return f"{self.candidates} impossible: {self.reason}"


@dataclass(frozen=True)
class Tuned:
    """All candidates; the best one, its plan, what that rests on, the command that runs it, and what to know of it; why
    others are impossible."""

    lines: tuple[Line, ...]
    best: Line
    draft: Draft
    ground: Ground
    command: str
    notes: tuple[Problem, ...]
    impossible: tuple[Reason, ...] = ()

    @property
    def simulated(self) -> list[Line]:
        """Candidates that were simulated and fit, the fastest first."""
        done = [line for line in self.lines if line.simulated_step_time_s is not None and not line.out]
        return sorted(done, key=lambda line: line.simulated_step_time_s or 0.0)

    def off(self) -> list[float]:
        """Closed form / simulated, of the seconds of each candidate that was simulated and fits."""
        pairs = ((line.closed_form_step_time_s, line.simulated_step_time_s) for line in self.simulated)
        return [closed / simulated for closed, simulated in pairs if closed is not None and simulated]

    def metrics(self) -> dict[str, Any]:
        """Return the metrics for the record: the best candidate's simulated figures, and the choice under "tuned"."""
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
                "impossible": [*map(vars, self.impossible)],
            },
        }
