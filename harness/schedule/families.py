"""TEMPORARY until the families are merged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.core.problem import Problem
from harness.schedule import Schedule
from harness.schedule.builders.fill_drain import fill_drain
from harness.schedule.builders.interleaved import interleaved
from harness.schedule.builders.one_f_one_b import one_f_one_b
from harness.schedule.builders.zero_bubble import zbv
from harness.schedule.transfers import Transfer


@dataclass(frozen=True)
class Family:
    name: str
    stages_per_device: int | None
    builder: Callable[[int, int, int, Sequence[Transfer]], Schedule]
    v: bool = False

    def build(self, micro_batches: int, devices: int, chunks: int, transfers: Sequence[Transfer]) -> Schedule:
        return self.builder(micro_batches, devices, chunks, transfers)

    def placement(self, devices: int, chunks: int) -> tuple[int, ...]:
        if self.v:
            return (*range(devices), *reversed(range(devices)))
        return tuple(range(devices)) * (self.stages_per_device or chunks)

    def refuses(self, micro_batches: int, devices: int, chunks: int) -> Problem | None:
        return None


FAMILIES = {
    f.name: f
    for f in (
        Family("gpipe", 1, lambda m, n, c, t: fill_drain(m, range(n), t)),
        Family("1f1b", 1, lambda m, n, c, t: one_f_one_b(m, range(n), t)),
        Family("interleaved1f1b", None, lambda m, n, c, t: interleaved(m, n, c, t)),
        Family("zbv", 2, lambda m, n, c, t: zbv(m, n, t), True),
    )
}
