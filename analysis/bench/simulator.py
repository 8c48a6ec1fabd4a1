"""How many ops of a schedule are simulated in a second, by compiled code and by the reference, which has the same
results."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from analysis.bench.round_robin import run_interleaved
from harness.core.cluster import Cluster, Link
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.plan import Plan
from harness.schedule import Schedule
from harness.schedule.builders.gpipe import gpipe
from harness.schedule.builders.one_f_one_b import one_f_one_b
from harness.schedule.transfers import Transfer, plan_transfers
from harness.simulator import LARGE_OPS, Simulation, reference, simulate

Make = Callable[[int, range, list[Transfer]], Schedule]
SMALL, LARGE, LARGEST = (4, 16), (48, 1024), (100, 2500)
"""Stages and micro-batches: a candidate of mode=tune; 200,000 ops; 100 devices with 10,000 ops each."""


class Case:
    """A schedule with messages inside a node, and what it is simulated with."""

    def __init__(self, make: Make, stages: int, micro_batches: int) -> None:
        layer = LayerProfile("layer", 1e-3, 2e-3, output_bytes=10**6, saved_bytes=10**6)
        self.profile = ModelProfile((layer,) * stages)
        self.plan = Plan.contiguous([1] * stages, micro_batches)
        self.cluster = Cluster(devices_per_node=stages, intra=Link(1e-6, 1 / 12e9))
        start = time.perf_counter()
        self.schedule = make(micro_batches, range(stages), plan_transfers(self.plan, self.profile, portals=True))
        self.make_s = time.perf_counter() - start
        self.ops = sum(len(queue.ops) for queue in self.schedule.queues)

    def timed(self, run: Callable[..., Simulation]) -> float:
        """Seconds of a simulation."""
        start = time.perf_counter()
        run(self.schedule, self.plan, self.profile, self.cluster, MemoryModel())
        return time.perf_counter() - start


def simulator(rounds: int) -> list[dict[str, Any]]:
    """Schedules that are simulated in one process, in turns; messages are ops, too. The small one is not compiled."""
    cases = {
        "1F1B, 4 stages, 16 micro-batches": Case(one_f_one_b, *SMALL),
        "GPipe, 48 stages, 1,024 micro-batches": Case(gpipe, *LARGE),
        "1F1B, 48 stages, 1,024 micro-batches": Case(one_f_one_b, *LARGE),
        "1F1B, 100 stages, 2,500 micro-batches": Case(one_f_one_b, *LARGEST),
    }
    entries: dict[str, Callable[[], float]] = {}
    of_entry: dict[str, Case] = {}
    for name, case in cases.items():
        for suffix, run in (("", simulate), (": reference", reference)):
            if not (suffix and (case.ops > 500_000 or case.ops < LARGE_OPS)):  # it takes minutes, or is the same
                entries[name + suffix] = lambda case=case, run=run: case.timed(run)  # type: ignore[misc]
                of_entry[name + suffix] = case
    times = run_interleaved(entries, rounds // 2 + 1)
    return [
        {
            "entry": name,
            "step": one.median_s,
            "quartiles": one.spread_s,
            "schedule": round(of_entry[name].make_s, 3),
            "ops": of_entry[name].ops,
            "ops a second": round(of_entry[name].ops / one.median_s),
        }
        for name, one in times.items()
    ]
