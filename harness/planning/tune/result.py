"""A candidate and what is known of it: a line of `tune.csv`.

What a search found: for the record, and for the terminal.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness.checks.plan_fits import MEMORY
from harness.core.problem import Problem, bare_key, spelled
from harness.planning.draft import Layout
from harness.planning.prepare import Ground
from harness.planning.tune.candidates import Candidate
from harness.user_model import reference

TITLES = (
    "settings",
    "micro_batch",
    "micro_batches",
    "mesh.pipeline",
    "mesh.data",
    "mesh.tensor",
    "out",
    "slower",
    "closed_form_memory_bytes",
    "simulated_memory_bytes",
    "memory_limit_bytes",
    "least_step_time_s",
    "closed_form_step_time_s",
    "simulated_step_time_s",
)


NOT_OF_A_RUN = ("mode", "out", "schemes", "costs", "jitter", "cluster", "tune.verify")
"""Keys of a search, a simulation or a race that training does not have, or not with their values."""
MOST_ROWS = 20
"""Candidates of which a record has the figures."""


@dataclass(frozen=True)
class Line:
    """`problems` say why a candidate is out. Memory is that of the fullest device, in bytes.

    None means not computed: plans that may be fast get an analytic estimate of time, and the best by it are simulated.
    Where the training state alone is too large, the estimate of memory is that alone, and there is no time.
    """

    candidate: Candidate
    problems: tuple[Problem, ...] = ()
    closed_form_memory_bytes: int | None = None
    simulated_memory_bytes: int | None = None
    memory_limit_bytes: int | None = None
    closed_form_step_time_s: float | None = None
    simulated_step_time_s: float | None = None
    least_step_time_s: float | None = None
    slower: bool = False
    """Not simulated: its least step time is no shorter than the step of another one of its kind."""
    no_plan: bool = False
    """The planner found none; the fixes of its problem are not computed yet."""

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
            " ".join(f"{key}={spelled(value)}" for key, value in one.settings),
            one.micro_batch,
            one.micro_batches,
            one.mesh.pipeline,
            one.mesh.data,
            one.mesh.tensor,
            *(getattr(self, title) for title in TITLES[6:]),
        ]


def as_csv(lines: Sequence[Line]) -> str:
    """A line for each candidate."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(TITLES)
    writer.writerows(line.cells() for line in lines)
    return text.getvalue()


def of_a_run(overrides: Sequence[str]) -> list[str]:
    """The overrides of training, on the machine where they are typed: without a described cluster, and without what is
    for searches and simulations."""
    given = any(bare_key(text) == "cluster" and text.partition("=")[2] != "local" for text in overrides)
    return [
        text
        for text in overrides
        if bare_key(text) not in NOT_OF_A_RUN
        and not bare_key(text).startswith("race.")
        and not (given and bare_key(text).startswith("cluster."))
    ]


@dataclass(frozen=True)
class Reason:
    """Why so many candidates are impossible, with the fixes."""

    candidates: int
    reason: str

    def __str__(self) -> str:
        """21 impossible: engine sbp   needs a plan   -> planner=autoddl"""
        return f"{self.candidates} impossible: {self.reason}"


@dataclass(frozen=True)
class Best:
    """The best candidate of a kind of scheme, as a row of the closing table: what was chosen, its simulated figures,
    and the command that runs it.

    `step_time_s` in seconds, memory in bytes, that of the fullest device; `tokens_per_s_per_device` is None where
    samples are no tokens, `percent_of_peak` (MFU) where no peak is known. `upper_bound`: the device is not calibrated.
    `simulated_only`: the engine is simulated on such a mesh, and does not train on it. `splits_samples`: its tensor
    parallel devices split samples only (`Plan.splits_samples_only`).
    """

    scheme: str
    pipeline: int
    data: int
    tensor: int
    micro_batch: int
    micro_batches: int
    recomputation: str
    step_time_s: float
    samples_per_s: float | None
    tokens_per_s_per_device: float | None
    percent_of_peak: float | None
    peak_memory_bytes: int
    memory_limit_bytes: int
    overrides: tuple[str, ...]
    upper_bound: bool = False
    simulated_only: bool = False
    splits_samples: bool = False

    @property
    def command(self) -> str:
        """The command that runs it."""
        return reference.command(self.overrides)

    @property
    def figures(self) -> Best:
        """What the table shows of it: candidates with equal figures are one row, whatever keys lead to them."""
        return replace(self, overrides=())

    @property
    def training(self) -> str:
        """The command that trains with it on a cluster as the one that is described; "" where `command` trains, or the
        profile of a model is given in the place of a model."""
        simulated = "mode=simulate" in self.overrides and not any(bare_key(one) == "profile" for one in self.overrides)
        return reference.command(of_a_run(self.overrides)) if simulated else ""

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "overrides": list(self.overrides)}


@dataclass(frozen=True)
class Fastest:
    """The fastest candidate of a kind of scheme: its line, its plan with the simulated figures, its row."""

    line: Line
    layout: Layout
    row: Best


@dataclass(frozen=True)
class Counts:
    """Candidates by outcome. `slower` cannot be faster than the best of their kind, `estimated_slower` are slower by a
    bound of their plan, or by analytic estimate, `full` have not the memory, `impossible` no plan; `unseen` were not
    looked at when the search was interrupted. `fewest` is the smallest number of devices of which any were looked
    at."""

    simulated: int
    slower: int
    estimated_slower: int
    full: int
    impossible: int
    unseen: int
    fewest: int

    @property
    def all(self) -> int:
        return self.simulated + self.slower + self.estimated_slower + self.full + self.impossible + self.unseen


@dataclass(frozen=True)
class Tuned:
    """All candidates that were listed; the best one, its plan with the simulated figures, what that rests on, and what
    to know of it; the best of each kind, the fastest first; why others are impossible; what was left out, and why."""

    lines: tuple[Line, ...]
    best: Line
    layout: Layout
    ground: Ground
    kinds: tuple[Best, ...]
    rows: tuple[Best, ...]
    """All candidates that were simulated and fit, the fastest first."""
    notes: tuple[Problem, ...]
    counts: Counts
    impossible: tuple[Reason, ...] = ()
    left_out: tuple[str, ...] = ()
    interrupted: bool = False

    @property
    def command(self) -> str:
        """The command that runs the best one."""
        return self.kinds[0].command

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
        one, figures = self.best.candidate, self.layout.plan.predicted
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
                "settings": dict(one.settings),
                "closed_form_step_time_s": self.best.closed_form_step_time_s,
                "closed_form_over_simulated": self.off(),
                "candidates": self.counts.all,
                "simulated": len(self.simulated),
                "counts": vars(self.counts),
                "command": self.command,
                "rows": [one.to_json() for one in self.rows[:MOST_ROWS]],
                "kinds": [kind.to_json() for kind in self.kinds],
                "impossible": [*map(vars, self.impossible)],
                "left_out": list(self.left_out),
            },
        }
