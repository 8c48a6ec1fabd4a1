"""A search as it is reported on the terminal."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.core.plan import Mesh
from harness.core.problem import bare_key
from harness.core.units import AT_MOST, UNKNOWN, UPPER_BOUND, percent, rate, seconds, size
from harness.planning.tune.result import Best, Counts, Reason, Tuned
from harness.report.columns import MESH_LEGEND, Column, mesh_text

NEARLY_FULL = 0.9
"""The share of a device's memory above which a predicted peak is marked."""
MARK = "!"
UNTRAINED = "†"
"""Follows a scheme that is simulated only."""
UNTRAINED_LEGEND = f"{UNTRAINED} simulated only: this engine does not train with tensor shards"
SAMPLES_ONLY = "‡"
"""Follows a mesh with a tensor parallel size whose plan splits no weight."""
SAMPLES_ONLY_LEGEND = (
    f"{SAMPLES_ONLY} the plan of these tensor parallel devices splits samples only, no weight: a step is that of as "
    "many replicas (mesh.data)"
)
NEAR = 1.05
"""A step time within this factor of the least one may be the least: predictions err by more."""
TRAINED = "{}, trained on such a cluster (docs/howto/several_nodes.md):"


def columns(rows: Sequence[Best]) -> list[Column]:
    """A row for each, in the order given; all figures are simulated."""
    found = [
        Column("scheme", [f"{one.scheme} {UNTRAINED}" if one.simulated_only else one.scheme for one in rows]),
        Column("mesh", _meshes(rows), figure=True),
        Column("micro-\nbatch", [str(one.micro_batch) for one in rows], figure=True),
        Column("recom-\nputation", [one.recomputation for one in rows], 3),
        Column("stages\nby", [_stages_by(one) for one in rows], 1),
        Column("step time", [seconds(one.step_time_s) for one in rows], 4, figure=True),
        Column("samples/s", [_speed(one, one.samples_per_s) for one in rows], figure=True),
        Column("tokens/s\nper device", [_speed(one, one.tokens_per_s_per_device) for one in rows], 5, figure=True),
        Column("MFU", [percent(_share(one.percent_of_peak)) for one in rows], 6, figure=True),
        Column("memory", [size(one.peak_memory_bytes) for one in rows], 1, figure=True),
        Column("headroom", [_headroom(one) for one in rows], 2, figure=True),
    ]
    return [column for column in found if column.shows or not column.rank]


def assumed(config: Mapping[str, Any], rows: Sequence[Best]) -> str:
    """The precision, the cluster and its values for which figures are, as the user types them; where speeds are bounds
    though the cluster has efficiencies, the values that have them."""
    numbers, cluster = config["precision"], config["cluster"]
    matmuls = numbers["autocast"] or ("tf32" if numbers["tf32"] else "")
    formats = f"{numbers['dtype']}, matmuls in {matmuls}" if matmuls else numbers["dtype"]
    text = f"for precision={numbers['name']} ({formats}), cluster={cluster['name']}"
    if cluster["name"] == "local":
        return text
    known = any(value is not None for key, value in cluster["effective"].items() if key.endswith("efficiency"))
    advised = known and cluster["values"] != "effective" and any(one.upper_bound for one in rows)
    return f"{text}, cluster.values={cluster['values']}{'   -> cluster.values=effective' if advised else ''}"


def legend(rows: Sequence[Best]) -> Iterator[str]:
    """What the columns and marks mean."""
    yield f"all figures are simulated; {MESH_LEGEND}; headroom: of the fullest device's memory"
    if any(one.upper_bound for one in rows):
        yield f"{AT_MOST} {UPPER_BOUND}"
    if any(one.simulated_only for one in rows):
        yield UNTRAINED_LEGEND
    if any(one.splits_samples for one in rows):
        yield SAMPLES_ONLY_LEGEND
    if any(map(_is_nearly_full, rows)):
        yield (
            f"{MARK} above {percent(NEARLY_FULL)} of a device's memory: leave 10 to 20 % for an allocator "
            "(docs/explanation/accuracy.md)"
        )


def winner(best: Sequence[Best]) -> Iterator[str]:
    """The last lines; the last one is the command of the fastest scheme that trains, which can be run as it is printed.

    `best` has the fastest first. One that is simulated only and faster comes before, and so does the command that
    trains on a cluster as the described one.
    """
    trained = next((one for one in best if not one.simulated_only), None)
    if near := [one.scheme for one in best[1:] if one.step_time_s <= NEAR * best[0].step_time_s]:
        yield f"as fast, as far as predictions can tell (within {percent(NEAR - 1)}): {', '.join(near)}"
    if trained is not best[0]:
        yield f"the fastest: {best[0].scheme}, simulated only; run it:"
        yield best[0].command
    if trained:
        if trained.training:
            yield TRAINED.format(trained.scheme)
            yield trained.training
        yield f"the fastest{'' if trained is best[0] else ' that trains'}: {trained.scheme}; run it:"
        yield trained.command


def summary(counts: Counts, impossible: Sequence[Reason], left_out: Sequence[str], interrupted: bool) -> Iterator[str]:
    """Candidates by outcome, why those that are impossible are, and what was left out, and why."""
    parts = {
        "simulated": counts.simulated,
        "slower: their computing alone takes longer than the best step of their kind": counts.slower,
        "not simulated: slower by a bound of their plan, or by analytic estimate": counts.estimated_slower,
        "too large for memory": counts.full,
        "impossible": counts.impossible,
        "not looked at": counts.unseen,
    }
    shown = ", ".join(f"{count} {what}" for what, count in parts.items() if count)
    yield f"{counts.all} candidates: {shown}" + ("; interrupted, there may be better ones" if interrupted else "")
    yield from map(str, impossible)
    yield from left_out


def accuracy(found: Tuned) -> str:
    """The error of the analytic estimate, of what was simulated."""
    off = found.off()
    return (
        f"analytic estimate / simulated: {min(off):.3f} to {max(off):.3f}, median {statistics.median(off):.3f}; "
        f"the best by simulation is number {_place(found)} by analytic estimate"
    )


def _place(found: Tuned) -> int:
    """Rank, by analytic estimate, of the best candidate among those that were simulated and fit."""
    quicker = (line.closed_form_step_time_s or 0.0 for line in found.simulated)
    return 1 + sum(one < (found.best.closed_form_step_time_s or 0.0) for one in quicker)


def _meshes(rows: Sequence[Best]) -> list[str]:
    """1x1x8 ‡; where one has a mark, the others have room for it."""
    marked = any(one.splits_samples for one in rows)
    meshes = (mesh_text(Mesh(one.data, one.pipeline, one.tensor)) for one in rows)
    marks = (f" {SAMPLES_ONLY}" if one.splits_samples else "  " * marked for one in rows)
    return [mesh + mark for mesh, mark in zip(meshes, marks, strict=True)]


def _stages_by(one: Best) -> str:
    """What the planner balances, where the command says it: it is no part of the scheme."""
    return next((text.partition("=")[2] for text in one.overrides if bare_key(text) == "planner.by"), UNKNOWN)


def _speed(one: Best, value: float | None) -> str:
    return (AT_MOST if one.upper_bound and value is not None else "") + rate(value, unit="")


def _share(percent_of_peak: float | None) -> float | None:
    return None if percent_of_peak is None else percent_of_peak / 100


def _headroom(one: Best) -> str:
    left = 1 - one.peak_memory_bytes / one.memory_limit_bytes if one.memory_limit_bytes else 0.0
    return f"{percent(left)}{f' {MARK}' if _is_nearly_full(one) else '  '}"


def _is_nearly_full(one: Best) -> bool:
    return one.peak_memory_bytes > NEARLY_FULL * one.memory_limit_bytes
