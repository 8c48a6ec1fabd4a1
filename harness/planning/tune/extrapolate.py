"""The simulated step of a candidate; of very many micro-batches from two steps of fewer.

|fill| m1 micro-batches |drain|            each micro-batch of a pipeline that is full takes as long as the one
|fill| m1 micro-batches | m2 - m1 |drain|  before it, so a step, and whatever it counts, grows by a straight line
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from omegaconf import DictConfig

from harness.core.plan import Plan
from harness.interfaces import Engine
from harness.planning import draft
from harness.planning.draft import Draft, Layout

WHOLE = 10_000
"""Tasks (micro-batches x stages) of a step that is simulated as a whole."""
FILLED = 2
"""Micro-batches for each stage after which a pipeline is full and runs evenly."""


def few(plan: Plan) -> int:
    """Return a number of micro-batches that fills the pipeline, at most the plan's: a multiple of the stages, as some
    schedules need. A periodic schedule keeps all of them, and so does the order of a file."""
    return plan.micro_batches if plan.pattern or plan.order else min(plan.micro_batches, FILLED * len(plan.stages))


def _is_whole(plan: Plan) -> bool:
    """Whether a step is simulated as a whole."""
    return plan.micro_batches * len(plan.stages) <= WHOLE or plan.micro_batches <= 2 * few(plan)


def refuse_invalid(engine: str, found: Draft) -> None:
    """Validate the schedule of all micro-batches, where these were simulated. Raises `CannotRun`."""
    if _is_whole(found.plan):
        draft.refuse_invalid(engine, found.schedule, found.plan)


def simulated(config: DictConfig, engine: Engine, layout: Layout, validated: bool = False) -> Draft:
    """Simulate a candidate as `planning.drafted` does; `plan.predicted` is for all micro-batches, even if fewer were
    simulated. `validated` says that its schedule was, with a few micro-batches."""
    plan = layout.plan
    counts = (few(plan), 2 * few(plan))
    if _is_whole(plan):
        return draft.drafted(config, engine, layout, validated)
    short, longer = (
        draft.drafted(
            config, engine, replace(layout, plan=replace(plan, micro_batches=count)), validated or count > counts[0]
        )
        for count in counts
    )
    growth = (plan.micro_batches - counts[1]) / (counts[1] - counts[0])
    figures = _extended(short.simulation.figures, longer.simulation.figures, growth)
    return replace(longer, plan=replace(plan, predicted={**plan.predicted, **figures}))


def _extended(short: dict[str, Any], longer: dict[str, Any], growth: float) -> dict[str, Any]:
    """The figures of a simulation, `growth` times as far beyond `longer` as this is beyond `short`."""

    def beyond(one: float, other: float) -> float:
        return other + growth * (other - one)

    step_s = beyond(short["step_time_s"], longer["step_time_s"])
    busy_s = [
        beyond(one * short["step_time_s"], other * longer["step_time_s"])
        for one, other in zip(short["utilization"], longer["utilization"], strict=True)
    ]
    utilization = [busy / step_s if step_s else 0.0 for busy in busy_s]
    peaks = zip(short["peak_memory_bytes"], longer["peak_memory_bytes"], strict=True)
    sent = longer["bytes_sent"]
    return {
        "step_time_s": step_s,
        "utilization": utilization,
        "bubble_fraction": 1 - sum(utilization) / len(utilization),
        "bytes_sent": {kind: round(beyond(short["bytes_sent"].get(kind, 0), size)) for kind, size in sent.items()},
        "peak_memory_bytes": [round(beyond(*both)) for both in peaks],
    }
