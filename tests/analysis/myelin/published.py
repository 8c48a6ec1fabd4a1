"""Myelin's points as the paper would have them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from analysis import match_records
from analysis.myelin.sweep_results import DEEPSPEED, LOCAL, MEGATRON, MYELIN, PAPER, SWEEPS, Row
from analysis.run_artifacts import ORIGIN
from harness.core.record import RunRecord

Change = Callable[[Row, dict[str, Any]], dict[str, Any]]


SHAPES = {"gpt_12b": (48, 4512), "gpt_24b": (48, 6336), "gpt_50b": (96, 6528), "gpt_100b": (96, 9360)}


FIG10 = {MYELIN: 105, DEEPSPEED: 135, MEGATRON: 210}
DAYS = {"table2": FIG10, "fig10": FIG10, "fig11": {MYELIN: 100, DEEPSPEED: 113, MEGATRON: 122}}
"""To train any of the models, or the 12B one on 48 GPUs."""


PHI = 10**9


BSIZE = 16_000_000


def mesh_of(row: Row) -> dict[str, int]:
    """As the point's keys say it; that of Table II as the claim has it."""
    if row["mode"] == "tune":
        return (
            {"data": 8, "pipeline": 6, "tensor": 1}
            if row.framework == MYELIN
            else {"data": 1, "pipeline": 16, "tensor": 3}
        )
    stages = len(row["planner.balance"].split(",")) if row["planner.balance"] else int(row["mesh.pipeline"] or 1)
    return {"data": int(row["mesh.data"] or 1), "pipeline": stages, "tensor": int(row["mesh.tensor"] or 1)}


def like_the_paper(sweep: str, row: Row) -> dict[str, Any]:
    """Metrics of a point, as the paper would have them."""
    mesh = mesh_of(row)
    pipelining, sums, updates = 30 + mesh["pipeline"] ** 1.03 / 2, 4.32, 1.73
    step_s, stage_bytes = 1.0, [PHI * 20]
    if sweep == "fig6":
        plain = row["engine.offload"] == "false"
        sums, updates = (0.62, 0.1) if mesh["pipeline"] == 24 else (4.34, 1.73)
        pipelining = 46.0 if mesh["pipeline"] == 24 else 34.0
        stage_bytes = [PHI * (20 if plain else 4) + PHI]
    if sweep == "fig8":
        k = int(row["engine.k"])
        updates = {0: 1.73, 1: 2.2}.get(k, 1.2 + 0.02 * abs(k - 4))
    if row["cluster"] == "summit":
        step_s = pipelining + sums + updates
    if sweep in DAYS:
        step_s = DAYS[sweep][row.framework] * 86400 * int(row["batch.size"] or 16) * 512 / 3e11
        step_s /= math.prod(mesh.values()) / 48 if sweep == "fig11" else 1
    weights, offloaded = 2 * PHI, row["engine.offload"] == "true"
    contents = {"weights": weights, "gradients": weights, "optimizer": 0 if offloaded else 16 * PHI}
    contents |= {"buckets": 16 * BSIZE} if offloaded else {}
    return {
        "step_time_s": step_s,
        "phases_s": {"pipelining": pipelining, "data_parallel": sums, "optimizer": updates},
        "peak_memory_bytes": stage_bytes * mesh["pipeline"],
        "peaks": [{"contents": contents}] * mesh["pipeline"],
        "tuned": mesh | {"micro_batch": 8, "simulated": 10, "candidates": 20, "closed_form_step_time_s": 1.0},
        "predicted_over_measured": {"step_time_s": 1.0},
    }


def records(
    folder: Path, change: Change = lambda row, metrics: metrics, sweeps: tuple[str, ...] = SWEEPS
) -> list[RunRecord]:
    """Every point, of both scales, as the paper would have it; all share the files of one run."""
    found = []
    for sweep in sweeps:
        for scale in (PAPER, LOCAL):
            for point in match_records.points_of(f"myelin_{sweep}", scale):
                row = Row(point.values(), None)
                layers, hidden = SHAPES.get(row["model"], (int(row["model.layers"] or 4), 64))
                model = {"layers": layers, "hidden": hidden, "heads": 8, "sequence": 512, "vocabulary": 51200}
                batch = {"size": int(row["batch.size"] or 16), "micro_batches": 4}
                config = {"model": model, "batch": batch, "engine": {"bsize": BSIZE}}
                plan = {"mesh": mesh_of(row), "micro_batches": 4}
                overrides = [f"{key}={value}" for key, value in point.values().items()]
                metrics = change(row, like_the_paper(sweep, row))
                manifest = {"overrides": overrides, ORIGIN: str(folder)}
                found.append(RunRecord("x", "ok", "simulated", "", config, plan, metrics, manifest=manifest))
    return found
