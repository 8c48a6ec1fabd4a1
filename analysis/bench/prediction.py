"""Is the prediction true? Predicted and measured time and memory on two CPU devices, for each way to checkpoint."""

from __future__ import annotations

import statistics
from typing import Any

from analysis.bench.pipeline import Bench, Row
from engines.gpipe.config import Config, build
from harness import clusters, machine
from harness.cluster import Cluster
from harness.clusters import ClusterConfig
from harness.memory import named
from harness.schedule.gpipe import RECOMPUTE
from harness.simulate import simulate

MICRO_BATCHES = (1, 2, 4, 8)


def prediction(rounds: int) -> list[Row]:
    """U-Net on two CPU devices: the simulator against the run, time and memory (predicted / measured)."""
    cluster = clusters.build(ClusterConfig(devices=2), machine.stored() or machine.measure())
    rows = [_row(m, mode, cluster, rounds) for m in MICRO_BATCHES for mode in RECOMPUTE]
    errors = {
        "time": [abs(row["predicted / measured"] - 1) for row in rows],
        "memory": [abs(ratio - 1) for row in rows for ratio in (row["memory, device 0"], row["memory, device 1"])],
    }
    return [*rows, {"contestant": "median absolute error"} | {
        f"error of {what}": statistics.median(found) for what, found in errors.items()
    }]  # fmt: skip


def _row(micro_batches: int, mode: str, cluster: Cluster, rounds: int) -> Row:
    with Bench(16, micro_batches) as bench:
        plan = bench.balanced(2, mode)
        session: Any = bench.gpipe(plan)
        times = bench.race({"gpipe": session}, rounds)["gpipe"]
        peaks = session.step(bench.batch, meter=True).peak_memory_bytes
        schedule = build(Config()).schedule(plan, bench.profile)
        figures = simulate(schedule, plan, bench.profile, cluster, named("sgd_fp32")).figures
    memory = [p / m for p, m in zip(figures["peak_memory_bytes"], peaks, strict=True)]
    return {
        "contestant": f"{micro_batches} micro-batches, {mode}", "step": times.median_s, "quartiles": [*times.spread_s],
        "predicted": figures["step_time_s"], "predicted / measured": figures["step_time_s"] / times.median_s,
        "memory, device 0": memory[0], "memory, device 1": memory[1],
    }  # fmt: skip
