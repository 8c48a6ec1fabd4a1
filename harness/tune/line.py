"""A candidate and what is known of it: a line of `tune.csv`."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass

from harness.problem import NoPlan, Problem
from harness.tune.candidates import Candidate

LINES = "tune.csv"
FULL = "memory:"
"""What the key of a problem begins with where a device has not the memory."""
TITLES = (
    "micro_batch", "micro_batches", "mesh.tensor", "mesh.pipeline", "mesh.data", "out", "closed_form_memory_bytes",
    "simulated_memory_bytes", "memory_limit_bytes", "closed_form_step_time_s", "simulated_step_time_s",
)  # fmt: skip


@dataclass(frozen=True)
class Line:
    """`problems` say why a candidate is out. Memory is that of the fullest device, in bytes.

    None is what nobody has computed: only the best by closed form are simulated. Where the state of training alone is
    too large, memory in closed form is no more than that, and there is no time.
    """

    candidate: Candidate
    problems: tuple[Problem, ...] = ()
    closed_form_memory_bytes: int | None = None
    simulated_memory_bytes: int | None = None
    memory_limit_bytes: int | None = None
    closed_form_step_time_s: float | None = None
    simulated_step_time_s: float | None = None
    no_plan: NoPlan | None = None
    """Of a planner, whose mend nobody has computed yet."""

    @property
    def out(self) -> str:
        """The first reason why it is out; "" where it is not."""
        return f"{self.problems[0].key} {self.problems[0].what}" if self.problems else ""

    @property
    def full(self) -> bool:
        """Whether it is memory that rules it out: the checks' or a planner's words."""
        return self.out.startswith((FULL, "a device's memory"))

    @property
    def needs_bytes(self) -> int | None:
        """What is known best of its memory."""
        return self.simulated_memory_bytes or self.closed_form_memory_bytes

    def cells(self) -> list[object]:
        """In the order of `TITLES`; csv writes None as nothing."""
        one = self.candidate
        return [one.micro_batch, one.micro_batches, one.mesh.tensor, one.mesh.pipeline, one.mesh.data,
                *(getattr(self, title) for title in TITLES[5:])]  # fmt: skip


def as_csv(lines: Sequence[Line]) -> str:
    """A line for each candidate."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(TITLES)
    writer.writerows(line.cells() for line in lines)
    return text.getvalue()
