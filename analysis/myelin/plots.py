"""Myelin's figures: published next to simulated values, and measured losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from analysis import losses, run_artifacts
from analysis.myelin import quantities
from analysis.myelin.claim_checks import by_size, gpt_title
from analysis.myelin.quantities import DAYS, PHASES
from analysis.myelin.sweep_results import FRAMEWORKS, GPUS, LOCAL, SIZES, Results, Row
from analysis.plots.style import BLUE, COLOURS, DARK, Bars, Source, bars, legend, line, panels, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BOTH: tuple[Source, ...] = ("paper", "simulated")
OF_PHASE = dict(zip(PHASES, COLOURS, strict=False))
PHASES_AS = {"pipelining": "pipeline phase", "data_parallel": "all-reduce of gradients", "optimizer": "optimizer"}
OF_FRAMEWORK = dict(zip(FRAMEWORKS, COLOURS, strict=False))


@styled
def fig5(results: Results) -> Figure | None:
    """The pipelining phase against the number of stages."""
    rows = results.good("fig5")
    if not rows:
        return None
    figure, axes = panels(1, 1, 7, 3.8)
    stages = [row.mesh.pipeline for row in rows]
    paper = [quantities.published_batch_s(count) for count in stages]
    ours = [row.phase_s("pipelining") for row in rows]
    bars(axes[0, 0], [str(count) for count in stages], [Bars(paper, BLUE, "paper"), Bars(ours, BLUE)])
    axes[0, 0].set(
        title="Myelin, Fig. 5: 12B on 48 GPUs, batch 2048",
        xlabel="stages (G_inter)",
        ylabel="time of the pipeline phase (s)",
    )
    legend(figure, {}, BOTH)
    return figure


@styled
def fig6(results: Results) -> Figure | None:
    """Phases without and with the memory optimization, on the grids that the paper draws."""
    rows = results.good("fig6")
    ends = [row for row in rows if (row["engine.offload"], row.mesh.pipeline) in (("false", 24), ("true", 6))]
    if len(ends) < 2:
        return None
    figure, axes = panels(1, len(PHASES), 12, 3.8)
    grids = [
        f"{row.mesh.pipeline} x {row.mesh.data}, {quantities.memory_scheme(row).replace(' ', chr(10), 1)}"
        for row in ends
    ]
    for panel, (phase, colour) in zip(axes[0], OF_PHASE.items(), strict=True):
        paper = [quantities.published_phase_s(row, phase) for row in ends]
        bars(panel, grids, [Bars(paper, colour, "paper"), Bars([row.phase_s(phase) for row in ends], colour)])
        panel.set(title=PHASES_AS[phase], ylabel="time (s)")
    figure.suptitle("Myelin, Fig. 6: phases of a step without and with the memory optimization, 12B on 48 GPUs")
    legend(figure, {}, BOTH)
    return figure


@styled
def fig8(results: Results) -> Figure | None:
    """All-reduce and optimizer against the buckets in a chunk; levels are without overlap."""
    times = {int(row["engine.k"]): quantities.tail_s(row) for row in results.good("fig8")}
    counts = sorted(k for k in times if k)
    if not counts:
        return None
    figure, axes = panels(1, 1, 7.5, 4)
    paper = [quantities.published_overlapped_s(k) for k in counts]
    panel = axes[0, 0]
    line(panel, counts, [float("nan") if one is None else one for one in paper], BLUE, "paper")
    line(panel, counts, [times[k] for k in counts], BLUE)
    levels = {"paper": sum(quantities.published_tail_s()), "simulated": times.get(0, math.nan)}
    for (source, level), dash, above in zip(levels.items(), ("--", "-"), (True, False), strict=True):
        panel.axhline(level, color=DARK, linewidth=1, linestyle=dash)
        where, offset = (counts[above and len(counts) > 1], level), (0, 3 if above else -4)
        panel.annotate(
            f"no overlap, {source}",
            where,
            offset,
            fontsize=8.5,
            textcoords="offset points",
            va="bottom" if above else "top",
        )
    panel.set_xscale("log", base=2)
    panel.set_xticks(counts, [str(k) for k in counts])
    panel.set(
        title="Myelin, Fig. 8: overlapped all-reduce and optimizer, 12B on 48 GPUs, batch 2048",
        xlabel=f"buckets in a chunk (k){_unpublished(counts, paper)}",
        ylabel="time after the pipeline phase (s)",
    )
    panel.set_ylim(0, 1.1 * max(*times.values(), levels["paper"], *filter(None, paper)))
    legend(figure, {}, BOTH, lines=True)
    return figure


def _unpublished(counts: Sequence[int], paper: Sequence[float | None]) -> str:
    """; the paper has no value for 2, 128"""
    without = [str(k) for k, one in zip(counts, paper, strict=True) if one is None]
    return f"; the paper has no value for {', '.join(without)}" if without else ""


@styled
def fig9(results: Results) -> Figure | None:
    """Losses of a small GPT on one device and on grids of ranks; below, how far they are apart."""
    rows = [row for row in results.good("fig9", LOCAL) if run_artifacts.optional(lambda row: row.losses, row)]
    if not rows:
        return None
    first = [row for row in rows if gpt_title(row) == gpt_title(rows[0])]
    title = f"Myelin, Fig. 9: losses of {gpt_title(rows[0])}, measured"
    return losses.figure([losses.Curve(_run(row), tuple(row.losses)) for row in first], title=title)


def _run(row: Row) -> str:
    where = "one device" if row["engine"] == "single" else f"{row.mesh.pipeline} stages x {row.mesh.data} replicas"
    return f"{row['engine']} on {where}"


@styled
def fig10(results: Results) -> Figure | None:
    """Days of training for four sizes and three frameworks."""
    rows = by_size(results)
    if not rows:
        return None
    figure, axes = panels(1, 1, 12, 4.2)
    series = []
    for name, colour in OF_FRAMEWORK.items():
        paper = [quantities.published_scaling(rows[size][name], "Fig. 10", DAYS) for size in SIZES]
        ours = [quantities.days(rows[size][name]) for size in SIZES]
        series += [Bars(paper, colour, "paper"), Bars(ours, colour)]
    bars(axes[0, 0], [f"{size}, {GPUS[size]} GPUs" for size in SIZES], series, "{:.0f}")
    axes[0, 0].set(title="Myelin, Fig. 10: training on 300e9 words, batch 16384", ylabel="training time (days)")
    legend(figure, OF_FRAMEWORK, BOTH)
    return figure


@styled
def fig11(results: Results) -> Figure | None:
    """Days times how many times 48 GPUs there are: what scales perfectly is level."""
    rows = results.good("fig11")
    if not rows:
        return None
    figure, axes = panels(1, 1, 8, 4.2)
    for name, colour in OF_FRAMEWORK.items():
        own = [row for row in rows if row.framework == name]
        gpus = [row.mesh.size for row in own]
        paper = [quantities.published_scaling(row, "Fig. 11", DAYS) for row in own]
        level = [float("nan") if days is None else days * n / 48 for days, n in zip(paper, gpus, strict=True)]
        line(axes[0, 0], gpus, level, colour, "paper")
        line(axes[0, 0], gpus, [quantities.days(row) * row.mesh.size / 48 for row in own], colour)
    every = sorted({row.mesh.size for row in rows})
    axes[0, 0].set_xscale("log", base=2)
    axes[0, 0].set_xticks(every, [str(count) for count in every])
    axes[0, 0].set(
        title="Myelin, Fig. 11: 12B, the batch grows with the GPUs",
        xlabel="GPUs",
        ylabel="training time (days) x GPUs / 48",
    )
    axes[0, 0].margins(y=0.1)
    axes[0, 0].set_ylim(bottom=0)
    legend(figure, OF_FRAMEWORK, BOTH, lines=True)
    return figure


FIGURES = {
    "myelin_fig5": fig5,
    "myelin_fig6": fig6,
    "myelin_fig8": fig8,
    "myelin_fig9": fig9,
    "myelin_fig10": fig10,
    "myelin_fig11": fig11,
}
"""Figures by the names of their files."""
