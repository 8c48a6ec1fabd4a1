"""What was measured in small: the sweeps' points of scale=local, on this machine's cores."""

from __future__ import annotations

from analysis.myelin.rows import LOCAL, Results, Row
from analysis.myelin.verdicts import difference, gpt_title
from analysis.report import MISSING, Section

SHARED = "Measured; the ranks share this machine's cores, so that times tell little of real clusters."
TOO_FAST = (
    "Predicted too fast: the model has the optimizer go through memory once, and gradients summed at the speed of "
    "memory. On a CPU AdamW is eight operations one after the other; gloo sums about 1 GB in a second, takes a "
    "millisecond and more for each chunk, and wants the updates' cores. Without overlap the updates take 1.9 times "
    "what is predicted, the sums 12 times, the pipelining phase 1.06 times."
)
"""Under Fig. 8, of whose step these are the larger part."""
MIB = 2**20


def sections(results: Results) -> list[Section]:
    """Those of which something was run."""
    makers = {"fig9": _losses, "fig5": _phases, "fig6": _phases, "fig8": _phases, "fig10": _phases, "fig11": _phases,
              "ablation": _phases}  # fmt: skip
    titles = {"fig5": "Fig. 5", "fig6": "Fig. 6", "fig8": "Fig. 8", "fig10": "Fig. 10", "fig11": "Fig. 11",
              "ablation": "Orders and policies", "fig9": "Fig. 9"}  # fmt: skip
    return [
        make(results.good(sweep, LOCAL), results, titles[sweep])
        for sweep, make in makers.items() if results.good(sweep, LOCAL)
    ]  # fmt: skip


def _losses(own: list[Row], results: Results, title: str) -> Section:
    """The first run of a model is the one that the others are held against."""
    serial: dict[str, Row] = {}
    rows = []
    for row in own:
        first = serial.setdefault(gpt_title(row), row)
        driven = row["engine"] == "myelin"
        rows.append(
            (gpt_title(row), f"{row.mesh.pipeline} x {row.mesh.data}", row["engine"], f"{len(row.losses)}",
             f"{row.config['batch']['micro_batches']}", f"{row.losses[0]:.6f}", f"{row.losses[-1]:.6f}",
             MISSING if row is first else f"{difference(row, first):.1e}",
             f"{row.in_flight} of {row.mesh.pipeline}" if driven else MISSING)
        )  # fmt: skip
    columns = ("model", "G_inter x G_data", "engine", "steps", "micro-batches", "first loss", "last loss",
               "largest relative difference", "in flight, of the limit")  # fmt: skip
    notes = (
        "Measured, float64, English text. A second run on one device, in other micro-batches, shows what rounding "
        "alone does. GPT-2 small itself was not trained: that needs GPUs.",
    )
    return Section(f"{title}, measured in small: losses against one device", columns, tuple(rows), notes, texts=3)


def _phases(own: list[Row], results: Results, title: str) -> Section:
    rows = tuple(
        (row.framework, _told(row), f"{row.mesh.tensor} x {row.mesh.pipeline} x {row.mesh.data}",
         f"{1e3 * row.step_s:.0f}", *(_ms(row, phase) for phase in ("pipelining", "data_parallel", "optimizer")),
         _memory(row), f"{row.metrics['predicted_over_measured']['step_time_s']:.2f}")
        for row in own
    )  # fmt: skip
    columns = ("framework", "keys", "G_intra x G_inter x G_data", "step, ms", "pipelining", "sums", "updates",
               "fullest device, MiB", "predicted / measured step")  # fmt: skip
    notes = (SHARED, TOO_FAST) if title == "Fig. 8" else (SHARED,)
    return Section(f"{title}, measured in small", columns, rows, notes, texts=3)


def _told(row: Row) -> str:
    """The engine's keys in which the points of a sweep differ."""
    keys = ("engine.order", "engine.policy", "engine.pipeline_limit", "engine.offload", "engine.k", "engine.zero")
    return " ".join(f"{key.removeprefix('engine.')}={row[key]}" for key in keys if row[key])


def _ms(row: Row, phase: str) -> str:
    return f"{1e3 * row.phase_s(phase):.1f}" if row.metrics["phases_s"] else MISSING


def _memory(row: Row) -> str:
    peaks = row.metrics["peak_memory_bytes"]
    return f"{max(peaks) / MIB:.1f}" if peaks else MISSING
