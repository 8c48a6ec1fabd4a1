"""Measurements at small scale: the sweeps' points of scale=local, on this machine's cores."""

from __future__ import annotations

import functools

from analysis import run_artifacts
from analysis.myelin.claim_checks import difference, gpt_title
from analysis.myelin.sweep_results import LOCAL, Results, Row
from analysis.report import MISSING, Section

SHARED = "Measured; the ranks share this machine's cores, so that times say little about real clusters."
TOO_FAST = (
    "Predicted too fast: the model has the optimizer go through memory once, and gradients summed at the speed of "
    "memory. On a CPU AdamW is eight operations one after the other; gloo sums about 1 GB in a second, takes a "
    "millisecond and more for each chunk, and wants the updates' cores. Without overlap the updates take 1.9 times "
    "what is predicted, the sums 12 times, the pipelining phase 1.06 times."
)
"""Note under Fig. 8 on steps of which these are the larger part."""
MIB = 2**20


def sections(results: Results) -> list[Section]:
    """Return the sections of which something was run."""
    makers = {
        "fig9": _losses,
        "table2": _tuned,
        "fig5": _phases,
        "fig6": _phases,
        "fig8": _phases,
        "fig10": _phases,
        "fig11": _phases,
        "ablation": _phases,
    }
    titles = {
        "fig5": "Fig. 5",
        "fig6": "Fig. 6",
        "fig8": "Fig. 8",
        "fig10": "Fig. 10",
        "fig11": "Fig. 11",
        "ablation": "Orders and policies",
        "fig9": "Fig. 9",
        "table2": "Table II",
    }
    return [
        make(results.good(sweep, LOCAL), results, titles[sweep])
        for sweep, make in makers.items()
        if results.good(sweep, LOCAL)
    ]


def _losses(own: list[Row], results: Results, title: str) -> Section:
    """The first run of a model is the one that the others are held against."""
    serial: dict[str, Row] = {}
    rows = []
    for row in own:
        first = serial.setdefault(gpt_title(row), row)
        losses = run_artifacts.optional(lambda row: row.losses, row)
        ends = (f"{len(losses)}", f"{losses[0]:.6f}", f"{losses[-1]:.6f}") if losses else (MISSING,) * 3
        apart = None if row is first else run_artifacts.optional(functools.partial(difference, serial=first), row)
        held = run_artifacts.optional(lambda row: row.in_flight, row) if row["engine"] == "myelin" else None
        rows.append(
            (
                gpt_title(row),
                f"{row.mesh.pipeline} x {row.mesh.data}",
                row["engine"],
                f"{row.config['batch']['micro_batches']}",
                *ends,
                MISSING if apart is None else f"{apart:.1e}",
                MISSING if held is None else f"{held} of {row.mesh.pipeline}",
            )
        )
    columns = (
        "model",
        "G_inter x G_data",
        "engine",
        "micro-batches",
        "steps",
        "first loss",
        "last loss",
        "largest relative difference",
        "in flight, of the limit",
    )
    driven = [row for row in own if row["engine"] == "myelin"]
    missing = [
        *run_artifacts.missing_files(own, lambda row: row.losses),
        *run_artifacts.missing_files(driven, lambda row: row.in_flight),
    ]
    notes = (
        "Measured, float64, English text. A second run on one device, in other micro-batches, shows what rounding "
        "alone does. GPT-2 small itself was not trained: that needs GPUs.",
        *missing,
    )
    return Section(f"{title}, measured in small: losses against one device", columns, tuple(rows), notes, texts=3)


def _tuned(own: list[Row], results: Results, title: str) -> Section:
    rows = []
    for row in own:
        tuned = row.metrics["tuned"]
        rows.append(
            (
                row.framework,
                configuration(row),
                f"{tuned['simulated']} of {tuned['candidates']}",
                f"{1e3 * row.step_s:.0f}",
                f"{tuned['closed_form_step_time_s'] / row.step_s:.2f}",
                _memory(row),
            )
        )
    columns = (
        "framework",
        "tuned",
        "candidates",
        "simulated step, ms",
        "analytic / simulated",
        "fullest device, MiB",
    )
    notes = (
        "Micro-batch / G_intra / G_inter / G_data. Candidates: how many were simulated, of all.",
        f"For {own[0]['cluster.devices']} ranks of the local machine, with layer times measured there; not run.",
    )
    return Section(f"{title}, in small: the fastest configurations", columns, tuple(rows), notes, texts=2)


def configuration(row: Row) -> str:
    """Return the choice of mode=tune, as in Table II: micro-batch / G_intra / G_inter / G_data."""
    ours = row.tuned
    return " / ".join(map(str, (row.metrics["tuned"]["micro_batch"], ours.tensor, ours.pipeline, ours.data)))


def _phases(own: list[Row], results: Results, title: str) -> Section:
    rows = tuple(
        (
            row.framework,
            _keys(row),
            f"{row.mesh.tensor} x {row.mesh.pipeline} x {row.mesh.data}",
            f"{1e3 * row.step_s:.0f}",
            *(_ms(row, phase) for phase in ("pipelining", "data_parallel", "optimizer")),
            _memory(row),
            f"{row.metrics['predicted_over_measured']['step_time_s']:.2f}",
        )
        for row in own
    )
    columns = (
        "framework",
        "keys",
        "G_intra x G_inter x G_data",
        "step, ms",
        "pipelining, ms",
        "sums, ms",
        "updates, ms",
        "fullest device, MiB",
        "predicted / measured step",
    )
    notes = (SHARED, TOO_FAST) if title == "Fig. 8" else (SHARED,)
    return Section(f"{title}, measured in small", columns, rows, notes, texts=3)


def _keys(row: Row) -> str:
    """The engine's keys in which the points of a sweep differ."""
    keys = ("engine.order", "engine.policy", "engine.pipeline_limit", "engine.offload", "engine.k", "engine.zero")
    return " ".join(f"{key.removeprefix('engine.')}={row[key]}" for key in keys if row[key])


def _ms(row: Row, phase: str) -> str:
    return f"{1e3 * row.phase_s(phase):.1f}" if row.metrics["phases_s"] else MISSING


def _memory(row: Row) -> str:
    peaks = row.metrics["peak_memory_bytes"]
    return f"{max(peaks) / MIB:.1f}" if peaks else MISSING
