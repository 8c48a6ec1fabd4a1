"""A schedule as a picture: what each device does in each time slot, as papers draw it."""

from __future__ import annotations

from harness.cluster import Cluster
from harness.memory import MemoryModel
from harness.mesh import Mesh
from harness.op import COMPUTE
from harness.plan import Plan, Stage
from harness.profile import LayerProfile, ModelProfile
from harness.schedule import Schedule
from harness.simulate import simulate

SLOT = LayerProfile(forward_s=1, backward_s=2)
IDLE = "."


def grid(schedule: Schedule) -> str:
    """A row for each device, a column for each time slot; every op starts as early as the schedule lets it.

    time      0   1   2   3   4   5   6   7   8
    device 0  0F0 0F1 .   .   0B0---- .   0B1----
    device 1  .   1F0 1B0---- 1F1 1B1---- .   .

    Forward tasks and recomputations take one slot, backward tasks two (where the weights' gradients are tasks of their
    own, one each). Messages and the optimizer take no time and are not drawn. Raises `Deadlock` where the schedule
    cannot end.
    """
    if not schedule.devices:
        return ""
    plan = Plan(Mesh(), tuple(Stage(j, j, device) for j, device in enumerate(schedule.devices)))
    profile = ModelProfile((SLOT,) * len(schedule.devices))
    cluster = Cluster(devices_per_node=max(schedule.devices) + 1)
    trace = simulate(schedule, plan, profile, cluster, MemoryModel()).trace
    rows: dict[int, list[tuple[int, int, str]]] = {device: [] for device in plan.devices}
    for span in trace.spans:
        kind = span.parsed.kind
        if kind in COMPUTE and kind != "step":
            rows[span.device].append((round(span.start_s), round(span.end_s), span.op))
    return _drawn(rows)


def _drawn(rows: dict[int, list[tuple[int, int, str]]]) -> str:
    """`rows` holds (first slot, slot after the last, text) of what each device does."""
    slots = max((end for tasks in rows.values() for _, end, _ in tasks), default=0)
    texts = [text for tasks in rows.values() for _, _, text in tasks]
    width = 1 + max(map(len, [*texts, str(slots - 1)]))
    lines = [("time", "".join(f"{slot:<{width}}" for slot in range(slots)))]
    for device, tasks in rows.items():
        row, reached = "", 0
        for start, end, text in sorted(tasks):
            row += f"{IDLE:<{width}}" * (start - reached)
            row += text.ljust((end - start) * width - 1, "-" if end > start + 1 else " ") + " "
            reached = end
        lines.append((f"device {device}", row + f"{IDLE:<{width}}" * (slots - reached)))
    margin = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{margin}}  {row}".rstrip() for name, row in lines)
