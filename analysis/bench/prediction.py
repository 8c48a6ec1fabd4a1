"""The accuracy of predictions: predicted and measured time and memory on two CPU devices, per checkpointing mode."""

from __future__ import annotations

import statistics
from typing import Any

from analysis.bench.gpipe import Bench, Row
from engines.gpipe.engine import Config, build
from harness.config import cluster_config
from harness.config.cluster_config import ClusterConfig
from harness.core.cluster import Cluster
from harness.core.memory_model import named
from harness.measure import benchmark_machine
from harness.schedule.builders.gpipe import RECOMPUTE
from harness.simulator import simulate

MICRO_BATCHES = (1, 2, 4, 8)


def prediction(rounds: int) -> list[Row]:
    """U-Net on two CPU devices: the simulator against the run, time and memory (predicted / measured)."""
    cluster = cluster_config.build(ClusterConfig(devices=2), benchmark_machine.whole())
    rows = [_row(m, mode, cluster, rounds) for m in MICRO_BATCHES for mode in RECOMPUTE]
    errors = {
        "time": [abs(row["predicted / measured"] - 1) for row in rows],
        "memory": [abs(ratio - 1) for row in rows for ratio in (row["memory, device 0"], row["memory, device 1"])],
    }
    return [
        *rows,
        {"entry": "median absolute error"}
        | {f"error of {what}": statistics.median(values) for what, values in errors.items()},
    ]


def _row(micro_batches: int, mode: str, cluster: Cluster, rounds: int) -> Row:
    with Bench(16, micro_batches) as bench:
        plan = bench.balanced(2, mode)
        session: Any = bench.gpipe(plan)
        times = bench.run_interleaved({"gpipe": session}, rounds)["gpipe"]
        peaks = session.step(bench.batch, meter=True).peak_memory_bytes
        schedule = build(Config()).schedule(plan, bench.profile)
        figures = simulate(schedule, plan, bench.profile, cluster, named("sgd_fp32")).figures
    memory = [p / m for p, m in zip(figures["peak_memory_bytes"], peaks, strict=True)]
    return {
        "entry": f"{micro_batches} micro-batches, {mode}",
        "step": times.median_s,
        "quartiles": [*times.spread_s],
        "predicted": figures["step_time_s"],
        "predicted / measured": figures["step_time_s"] / times.median_s,
        "memory, device 0": memory[0],
        "memory, device 1": memory[1],
    }
