"""What a search has found, summed up: the best of each kind, counts of candidates by outcome, what was left out."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from harness.checks import plan_fits, request
from harness.planning import work
from harness.planning.draft import Draft
from harness.planning.tune import impossible, tried_fixes
from harness.planning.tune.result import Best, Counts, Line, Tuned
from harness.schedule import plan_order
from harness.simulator import layer_times

if TYPE_CHECKING:
    from harness.planning.tune.candidate_search import Tuner
    from harness.planning.tune.candidates import Candidate
    from harness.planning.tune.schemes import Scheme


def of(tuner: Tuner) -> Tuned:
    """The result of a search that has found something."""
    rows = _rows(tuner)
    shortest = {one.figures: one for one in rows}
    best = (one.row for one in tuner.best.values())
    kinds = sorted((shortest.get(one.figures, one) for one in best), key=lambda one: (one.step_time_s, one.scheme))
    line, layout = tuner.best[kinds[0].scheme].line, tuner.best[kinds[0].scheme].layout
    layout = layout if tuner.interrupted else tuner.compared(line.candidate, layout)
    ground = tuner.grounds[line.candidate.micro_batch]
    scheme = tuner.by_settings[line.candidate.settings]
    engine = scheme.engine
    notes = [
        *request.notes(scheme.config, engine.capabilities),
        *plan_fits.idle(layout.plan),
        *engine.notes(layout.plan, ground.profile, layout.cluster, layout.memory),
    ]
    lines = tuple(tuner.lines.values())
    reasons = () if tuner.interrupted else impossible.reasons(lines, partial(tried_fixes.helps, tuner))
    counted = counts(tuner)
    return Tuned(
        lines, line, layout, ground, tuple(kinds), rows, tuple(notes), counted, reasons, tuple(left_out(tuner)),
        tuner.interrupted,
    )  # fmt: skip


def _rows(tuner: Tuner) -> tuple[Best, ...]:
    """All candidates that were simulated and fit, the fastest first; of equal rows the first one:
    stages of equal memory (planner.by=memory) are often those of equal time."""
    found: dict[Best, Best] = {}
    for one in sorted(tuner.rows, key=lambda one: (one.step_time_s, one.scheme, len(one.overrides))):
        found.setdefault(one.figures, one)
    return tuple(found.values())


def row(tuner: Tuner, line: Line, draft: Draft) -> Best:
    """A candidate that was simulated, as a row of the closing table."""
    one, figures = line.candidate, draft.plan.predicted
    scheme, ground = tuner.by_settings[one.settings], tuner.grounds[one.micro_batch]
    step_s = float(figures["step_time_s"])
    done = work.simulated(scheme.config, draft, step_s)
    return Best(
        scheme.kind,
        draft.plan.used.pipeline,
        one.mesh.data,
        one.mesh.tensor,
        one.micro_batch,
        one.micro_batches,
        plan_order.recomputation(draft.plan) if draft.plan.order else scheme.recomputation,
        step_s,
        done["throughput"],
        done["tokens_per_s_per_device"],
        done["percent_of_peak"],
        max(figures["peak_memory_bytes"]),
        line.memory_limit_bytes or 0,
        tuple(one.overrides(scheme.config, tuner.overrides, scheme.engine.capabilities)),
        layer_times.are_bounds(ground.profile, draft.cluster),
        is_simulated_only(scheme, one),
        draft.plan.splits_samples_only,
    )


def is_simulated_only(scheme: Scheme, one: Candidate) -> bool:
    """Whether the engine of a scheme is simulated on the mesh of a candidate, and does not train on it."""
    return any(getattr(one.mesh, name) > 1 for name in scheme.engine.capabilities.simulated_only)


def counts(tuner: Tuner) -> Counts:
    """Candidates by outcome."""
    lines = [*tuner.lines.values()]
    out = [line for line in lines if line.out]
    full = sum(line.full for line in out)
    simulated = sum(line.simulated_step_time_s is not None and not line.out for line in lines)
    slower = sum(line.slower and not line.out for line in lines)
    rest = len(lines) - len(out) - simulated - slower
    unseen = rest if tuner.interrupted else 0
    return Counts(simulated, slower, rest - unseen, full, len(out) - full, unseen, tuner.fewest)


def left_out(tuner: Tuner) -> Iterator[str]:
    """What was not looked at, and why."""
    tried = {block.devices for block in tuner.blocks}
    if min(tried) < tuner.fewest and not tuner.interrupted:
        yield f"fewer than {tuner.fewest} devices not tried: computing alone takes longer than the best of each kind"
    if tuner.cluster.nodes > 1 and tuner.cluster.devices_per_node > 1:
        yield "numbers of devices that are neither on one node nor whole nodes are not tried"
    if tuner.no_larger:
        yield f"micro-batches above {tuner.no_larger} not tried: a layer of theirs needs more memory than a device has"
