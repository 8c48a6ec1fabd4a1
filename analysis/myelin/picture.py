"""The figures of the paper as one picture: what it prints beside what was simulated."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from analysis.myelin import figures
from analysis.myelin.figures import IPDPS, published
from analysis.myelin.rows import FRAMEWORKS, MYELIN, SIZES, Results
from analysis.myelin.verdicts import by_size
from harness import files

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAPER_COLOUR, OURS_COLOUR = "#BBBBBB", "#0072B2"
COLOURS = dict(zip(FRAMEWORKS, ("#0072B2", "#E69F00", "#009E73"), strict=True))
PHASES = {"pipelining": "#0072B2", "data_parallel": "#E69F00", "optimizer": "#009E73"}
_SIZE_IN, _DPI, _BAR = (14.0, 8.0), 100, 0.38


def draw(results: Results, path: Path) -> bool:
    """Write the picture to `path`; False if one of its figures has not been run.

    Fig. 5 | Fig. 6 | Fig. 8         bars or points: the paper in grey, simulated in colour
    Fig. 10         | Fig. 11
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if not all(results.good(sweep) for sweep in ("fig5", "fig6", "fig8", "fig10", "fig11")) or not by_size(results):
        return False
    drawn = Figure(figsize=_SIZE_IN, dpi=_DPI, layout="constrained")
    FigureCanvasAgg(drawn)
    panels = drawn.subplot_mosaic([["5", "5", "6", "6", "8", "8"], ["10", "10", "10", "11", "11", "11"]])
    _fig5(panels["5"], results)
    _fig6(panels["6"], results)
    _fig8(panels["8"], results)
    _fig10(panels["10"], results)
    _fig11(panels["11"], results)
    for axes in panels.values():
        axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    buffer = io.BytesIO()
    drawn.savefig(buffer, format="png", dpi=_DPI)
    files.write_bytes(path, buffer.getvalue())
    return True


def _pairs(axes: Axes, names: Sequence[str], paper: Sequence[float], ours: Sequence[float]) -> None:
    """Two bars for each name."""
    places = range(len(names))
    axes.bar([x - _BAR / 2 for x in places], paper, _BAR, color=PAPER_COLOUR, label="paper")
    axes.bar([x + _BAR / 2 for x in places], ours, _BAR, color=OURS_COLOUR, label="simulated")
    axes.set_xticks(list(places), list(names))


def _fig5(axes: Axes, results: Results) -> None:
    rows = results.good("fig5")
    stages = [row.mesh.pipeline for row in rows]
    paper = [published(IPDPS, "batch_time", MYELIN, case=f"G_inter={count}") or 0.0 for count in stages]
    _pairs(axes, [str(count) for count in stages], paper, [row.phase_s("pipelining") for row in rows])
    axes.set(title="Fig. 5: pipelining phase, 12B on 48 GPUs", xlabel="stages (G_inter)", ylabel="s")
    axes.legend(frameon=False, loc="upper left")


def _fig6(axes: Axes, results: Results) -> None:
    rows = results.good("fig6")
    names, bars = [], []
    for row, scheme in ((rows[0], "without memory optimization"), (rows[-1], "with memory optimization")):
        paper = [
            published("myelin_fig6_memopt", f"{phase}_phase_time", scheme) or 0.0
            for phase in ("pipelining", "data_parallel")
        ] + [published(IPDPS, "optimizer_time", MYELIN, case=scheme) or 0.0]
        names += [f"paper\n{row.mesh.pipeline} x {row.mesh.data}", f"simulated\n{row.mesh.pipeline} x {row.mesh.data}"]
        bars += [paper, [row.phase_s(phase) for phase in PHASES]]
    below = [0.0] * len(bars)
    for number, (phase, colour) in enumerate(PHASES.items()):
        height = [bar[number] for bar in bars]
        axes.bar(range(len(bars)), height, 0.7, bottom=below, color=colour, label=phase.replace("_", " "))
        below = [low + one for low, one in zip(below, height, strict=True)]
    axes.set_xticks(range(len(bars)), names)
    axes.set(title="Fig. 6: without (24 x 2) and with memopt (6 x 8)", ylabel="s", ylim=(0, 1.35 * max(below)))
    axes.legend(frameon=False, loc="upper right")


def _fig8(axes: Axes, results: Results) -> None:
    rows = results.good("fig8")
    times = {int(row["engine.k"]): figures.tail_s(row) for row in rows}
    paper = {k: published(IPDPS, "allreduce_plus_optimizer_time", MYELIN, case=f"k={k}") for k in times}
    printed = {k: seconds for k, seconds in paper.items() if seconds is not None}
    ours = {k: seconds for k, seconds in times.items() if k}
    axes.plot([*printed], [*printed.values()], "o-", color="#888888", label="paper")
    axes.plot([*ours], [*ours.values()], "o-", color=OURS_COLOUR, label="simulated")
    axes.axhline(4.32 * 1.4, color="#888888", linestyle="--", linewidth=1, label="paper, no overlap")
    if 0 in times:
        axes.axhline(times[0], color=OURS_COLOUR, linestyle="--", linewidth=1, label="simulated, no overlap")
    axes.set_xscale("log", base=2)
    axes.set_xticks([*ours], [str(k) for k in ours])
    highest = max(*printed.values(), *times.values())
    axes.set(title="Fig. 8: sums and updates, overlapped", xlabel="buckets in a chunk (k)", ylabel="s",
             ylim=(0, 1.5 * highest))  # fmt: skip
    axes.legend(frameon=False, loc="upper right", ncols=2)


def _fig10(axes: Axes, results: Results) -> None:
    """Three pairs of bars for each size, pale for the paper."""
    found = by_size(results)
    width = 0.13
    for number, name in enumerate(FRAMEWORKS):
        for shift, (label, pale) in enumerate((("paper", 0.4), ("simulated", 1.0))):
            heights = [
                figures.days(found[size][name]) if pale == 1.0 else
                published(IPDPS, "expected_training_time", name, table="Fig. 10", model=size) or 0.0
                for size in SIZES
            ]  # fmt: skip
            places = [x + (2 * number + shift - 2.5) * width for x in range(len(SIZES))]
            axes.bar(places, heights, width, color=COLOURS[name], alpha=pale, label=f"{name}, {label}")
    axes.set_xticks(range(len(SIZES)), [f"{size}, {found[size][MYELIN].mesh.size} GPUs" for size in SIZES])
    axes.set(title="Fig. 10: training on 300e9 words, batch 16384", ylabel="days")
    axes.legend(frameon=False, loc="upper left")


def _fig11(axes: Axes, results: Results) -> None:
    """Days times how many times 48 GPUs there are: what scales perfectly is level."""
    rows = results.good("fig11")
    for name in FRAMEWORKS:
        own = [row for row in rows if row.framework == name]
        gpus = [row.mesh.size for row in own]
        paper = [
            (published(IPDPS, "expected_training_time", name, table="Fig. 11", devices=count) or 0.0) * count / 48
            for count in gpus
        ]
        ours = [figures.days(row) * row.mesh.size / 48 for row in own]
        axes.plot(gpus, paper, "o--", color=COLOURS[name], alpha=0.4, label=f"{name}, paper")
        axes.plot(gpus, ours, "o-", color=COLOURS[name], label=f"{name}, simulated")
    gpus = sorted({row.mesh.size for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(gpus, [str(count) for count in gpus])
    axes.minorticks_off()
    axes.set(title="Fig. 11: 12B, the batch grows with the GPUs", xlabel="GPUs", ylabel="days x GPUs / 48",
             ylim=(0, 165))  # fmt: skip
    axes.legend(frameon=False, loc="lower center", ncols=3, fontsize=9)
