"""The plan as a table: what each stage holds, needs and takes."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from harness.costs import has_times
from harness.display import UNKNOWN, seconds, size
from harness.memory import DTYPE_BYTES
from harness.plan import Plan
from harness.profile import ModelProfile

COLUMNS = ("stage", "device", "layers", "", "parameters", "peak memory", "forward", "backward")


def stage_table(plan: Plan, profile: ModelProfile) -> Table:
    """A row for each stage; times are those of one micro-batch, memory is the predicted peak of the stage's device.

    Layers that take no time have none to show.
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
