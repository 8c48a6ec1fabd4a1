"""The estimate of the step time (`harness.planning.tune.step_time`) of a schedule of many ops, on columns.

Where a method has the name of one there it does the same, and adds in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from harness.core.op import Op
from harness.planning.tune import peak_memory
from harness.schedule import Schedule

if TYPE_CHECKING:
    from harness.simulator.compiled.alone import Alone
    from harness.simulator.compiled.tables import Numbers

MESSAGES = ("copy", "send")
BACK = ("R", "B")
NONE = -1


class StepOnColumns:
    """The nodes of a short step of `count` micro-batches, each executed as if it were alone."""

    def __init__(self, schedule: Schedule, alone: Alone, count: int) -> None:
        self.schedule, self.alone, self.count = schedule, alone, count
        columns = alone.columns
        has_batch = columns.column > 0
        self.tasks = np.flatnonzero(has_batch)
        self.templates, self.template = columns.templates, columns.template[self.tasks]
        collective = np.array([op.kind == "collective" for op in columns.templates])[columns.template]
        tails: dict[int, list[Numbers]] = {device: [self.tasks[:0]] for device in schedule.devices}
        self.slot = 0.0
        for queue, nodes in zip(schedule.queues, columns.queues, strict=True):
            own = nodes[collective[nodes]] if queue.name == "network" else nodes
            tails[queue.device].append(own[~has_batch[own]])
            self.slot = max(self.slot, sum(alone.seconds[own[has_batch[own]]].tolist()) / count)
        self.tails = {device: np.concatenate(nodes) for device, nodes in tails.items()}

    def seconds(self, micro_batches: int, held: Sequence[peak_memory.Held]) -> float:
        """Return the seconds of a step of so many micro-batches; the stages have `held` of them in flight."""
        paths = self.paths(len(held))
        _, demand = self.alone.demand(self.tasks)
        shared = float(demand.max(initial=0.0)) / self.count
        last_s = float(self.alone.end_s[self.tasks].max())
        late = max(0.0, paths[0] + (self.count - 1) * shared - last_s)
        flying = (one.of(micro_batches, self.count) for one in held)
        period = max(self.slot, shared, *(path / count for path, count in zip(paths, flying, strict=True)))
        return self.end() + late + (micro_batches - self.count) * period

    def paths(self, stages: int) -> list[float]:
        """Seconds of a micro-batch from each stage to the last one and back."""
        stage = np.array([_stage(op) for op in self.templates])[self.template]
        on_path = self.tasks[stage != NONE]
        each = np.bincount(stage[stage != NONE], self.alone.seconds[on_path] / self.count, minlength=stages)
        return [*accumulate(reversed(each.tolist()))][::-1]

    def end(self) -> float:
        """Return the end of a step whose nodes end so if none waits for a shared resource."""
        end_s, begun = self.alone.end_s, dict.fromkeys(self.schedule.devices, 0.0)
        back = np.array([self.schedule.devices[op.stage] if op.kind in BACK else NONE for op in self.templates])
        last_s = np.zeros(max(begun) + 1)
        device = back[self.template]
        np.maximum.at(last_s, device[device != NONE], end_s[self.tasks[device != NONE]])
        begun = {device: float(last_s[device]) for device in begun}
        ends = [float(end_s.max())]
        tails = [(tail, self.alone.flowing(tail)) for device in begun if len(tail := self.tails[device])]
        after = [float(end_s[tail].max()) - float(end_s[flowing].max()) for tail, flowing in tails if len(flowing)]
        demands = {device: self.alone.demand(self.tails[device]) for device in begun}
        for resource in {resource for used, _ in demands.values() for resource in used.tolist()}:
            left = 0.0
            for own in sorted(begun, key=begun.__getitem__, reverse=True):
                left += float(demands[own][1][resource])
                ends.append(begun[own] + left + max(after, default=0.0))
        return max(ends)


def _stage(op: Op) -> int:
    """The stage whose path an op with a micro-batch is on; a skip is on none."""
    if op.peer is None:
        return op.stage
    return min(op.stage, op.peer) if op.kind in MESSAGES and not op.part else NONE
