"""The record of one run: its configuration, plan, predictions, measurements and status."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from harness.core.problem import Problem
from harness.core.serialization import Document, finite

Status = Literal["running", "ok", "oom", "infeasible", "timeout", "preempted", "node_lost", "error", "lost", "unknown"]
"""State of a run. No run is "lost" or "unknown": these are what readers see (harness.run.stored_record)."""
Source = Literal["measured", "simulated", "paper"]
EXIT_CODES: dict[Status, int] = {
    "ok": 0,
    "error": 1,
    "infeasible": 2,
    "oom": 3,
    "timeout": 4,
    "preempted": 130,
    "node_lost": 5,
    "running": 1,
    "lost": 1,
    "unknown": 1,
}


@dataclass(frozen=True)
class RunRecord(Document):
    """`record.json`. `metrics` and `predicted` use the names of docs/architecture.md; null is "cannot be measured".

    `reason` says for people why a run is not ok, `problems` why it is infeasible; a record of before they existed has
    none. What `predicted` and simulated `metrics` rest on (layer times, cluster, jitter, seed) is
    `manifest.simulation`.
    """

    id: str
    status: Status
    source: Source = "measured"
    reason: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    predicted: dict[str, Any] = field(default_factory=dict)
    manifest: dict[str, Any] = field(default_factory=dict)
    trace: str | None = None
    problems: tuple[Problem, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A problem's value may be a number that JSON does not have: it becomes null."""
        document = super().to_json()
        return {**document, "problems": finite(document["problems"])}
