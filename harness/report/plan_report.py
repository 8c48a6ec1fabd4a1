"""The plan on the terminal: a table of its stages, its pattern or strategies, sentences about batch and prediction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from harness.core import units
from harness.core.memory_model import DTYPE_BYTES
from harness.core.model_profile import ModelProfile
from harness.core.plan import Plan
from harness.core.units import UNKNOWN, seconds, size
from harness.report import searched_order
from harness.report.pattern_text import pattern_text
from harness.report.strategy_table import comparison_table, strategy_table
from harness.simulator import layer_times
from harness.simulator.layer_times import has_times

if TYPE_CHECKING:
    from harness.planning.draft import Draft


def plan_tables(plan: Plan, profile: ModelProfile, planner: str) -> Group:
    """Returns the tables of a plan: stages, pattern, strategies, and the baselines' communication where it has them."""
    tables: list[Table | Group] = [stage_table(plan, profile)]
    if plan.pattern:
        tables.append(pattern_text(plan, plan.pattern))
    if plan.strategy:
        tables.append(strategy_table(plan))
    if "baselines" in plan.predicted:
        tables.append(comparison_table(plan, planner))
    return Group(*(part for number, table in enumerate(tables) for part in ([Text()] * bool(number) + [table])))


def replicas(draft: Draft) -> str:
    """Returns a sentence on how the batch is split over replicas (the data parallel size), and what the tables show."""
    data, m, size = draft.plan.mesh.data, draft.plan.micro_batches, draft.profile.micro_batch
    return (
        f"{data} replicas; each trains {m * size} of the {draft.samples} samples in {m} "
        f"micro-batch{'es' * (m > 1)} of {size}. Per-device rows show the maximum memory over replicas and the time of "
        "replica 0."
    )


def prediction(draft: Draft, profile: str, done: Mapping[str, float | None] | None = None) -> str:
    """Returns the prediction, and below it the source of its numbers; `profile` is the source of the profile.

    `done` is the work in a second: with it tokens of each device and MFU are listed, too, where they are known."""
    step_s = draft.plan.predicted["step_time_s"]
    speeds = [units.rate(draft.samples / step_s if step_s else None), *(_of_devices(done) if done else ())]
    bound = f" ({units.UPPER_BOUND})" if layer_times.are_bounds(draft.profile, draft.cluster) else ""
    summary = f"predicted: {units.seconds(step_s)} a step of {draft.samples} samples, {', '.join(speeds)}{bound}"
    times = f"layer times {draft.profile.source}" if layer_times.has_times(draft.profile) else "layers take no time"
    searched = searched_order.line(draft.plan.predicted, [stage.device for stage in draft.plan.stages])
    return f"{summary}\n  {times}; profile {profile}" + (f"\n  schedule: {searched}" if searched else "")


def _of_devices(done: Mapping[str, float | None]) -> Iterator[str]:
    if tokens := done["tokens_per_s_per_device"]:
        yield f"{units.rate(tokens, 'tokens/s')} per device"
    if share := done["percent_of_peak"]:
        yield f"MFU {units.percent(share / 100)}"


def starting(ranks: int) -> str:
    """Returns what happens until the first step."""
    return f"{ranks} ranks load torch and build the model" if ranks > 1 else "torch is loaded, and the model built"


COLUMNS = ("stage", "device", "layers", "", "parameters", "peak memory", "forward", "backward")


def stage_table(plan: Plan, profile: ModelProfile) -> Table:
    """Returns a row for each stage: times of one micro-batch, predicted peak memory of the stage's device.

    Times are dashes for a profile without layer times.
    """
    table = Table(box=None, pad_edge=False)
    for title in COLUMNS:
        table.add_column(title, justify="left" if not title else "right", overflow="fold")
    peaks = dict(zip(plan.devices, plan.predicted["peak_memory_bytes"], strict=True))
    for number, stage in enumerate(plan.stages):
        first, last = stage.first, stage.last
        parameters = profile.parameter_bytes(first, last) / DTYPE_BYTES.get(profile.dtype, 4)
        times = (profile.sum(field, first, last) for field in ("forward_s", "backward_s"))
        row = (number, stage.device, stage.layers, f"{first}..{last}", f"{parameters:,.0f}", size(peaks[stage.device]))
        shown = [seconds(time) if has_times(profile) else UNKNOWN for time in times]
        table.add_row(*(Text(str(cell)) for cell in (*row, *shown)))
    return table
