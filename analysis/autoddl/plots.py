"""AutoDDL's figures: volumes, orders, strategies and searches as planned, schemes as simulated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from analysis.autoddl import fig3_fig4, savings
from analysis.autoddl.claim_checks import BILLION, DENSE
from analysis.autoddl.fig8 import BATCHES, EVALUATIONS, NODES, SEARCHES, Curve, curves
from analysis.autoddl.fig9_fig10 import (
    BASELINES,
    CLOUD_VGG,
    LARGE,
    OURS,
    SCHEMES,
    SMALL,
    TRANSFORMERS,
    VGG,
    Setting,
    communication,
    steps,
)
from analysis.autoddl.sweep_results import Results
from analysis.plots.style import (
    BLUE,
    COLOURS,
    DARK,
    GREY,
    LOOKS,
    ORANGE,
    VERMILLION,
    Bars,
    bars,
    below,
    filled,
    legend,
    lined,
    panels,
    styled,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FACTORS = ("p0 (samples)", "p1 (outputs)", "p2 (summed over)")
WIDTHS = ("25088 x 4096", "4096 x 4096", "4096 x 1000")
"""Widths of VGG13's dense layers."""
OF_SEARCH = dict(zip(SEARCHES, COLOURS, strict=False))
PLANS = 100
"""A curve is drawn through so many points."""
CLEAR = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
"""After a number that a mark may cross."""
TICKS = (1, 2, 5, 10, 20, 50)
SHORT = ("data\nparallel", "Megatron-\nlike", "SUMMA", "AutoDDL", "AutoDDL,\nmixed")


@styled
def fig3(results: Results) -> Figure | None:
    """Plot the elements that a device sends for an attention layer in the forward pass."""
    rows = fig3_fig4.fig3(results)
    if not rows:
        return None
    figure, axes = panels(1, 1, 6.5, 3.6)
    paper = [fig3_fig4.published(name) for name in rows]
    ours = [fig3_fig4.elements(row) / BILLION for row in rows.values()]
    bars(axes[0, 0], [*rows], [Bars(paper, BLUE, "paper"), Bars(ours, BLUE)])
    axes[0, 0].set(
        title="AutoDDL, Fig. 3: an attention layer on 64 nodes, planned", ylabel="elements sent per device (2^30)"
    )
    legend(figure, {}, ("paper", "simulated"))
    return figure


@styled
def fig4(results: Results) -> Figure | None:
    """Eight strategies in the order that was predicted: a measured bar below its left neighbour is out of order."""
    by_devices = {devices: own for devices in (2, 4) if (own := fig3_fig4.fig4(results, devices))}
    if not by_devices:
        return None
    figure, axes = panels(1, len(by_devices), 12, 3.8, sharey=True)
    for panel, (devices, own) in zip(axes[0], by_devices.items(), strict=True):
        longest = max(one.predicted_s for one in own), max(one.measured_s for one in own)
        bars(
            panel,
            [str(number) for number in range(1, len(own) + 1)],
            [
                Bars([one.predicted_s / longest[0] for one in own], BLUE),
                Bars([one.measured_s / longest[1] for one in own], BLUE, "measured"),
            ],
            "{:.2f}",
        )
        panel.set(
            title=f"{devices} processes: Kendall's tau {fig3_fig4.tau(own):.2f}",
            xlabel="strategies, the fastest predicted first",
        )
    axes[0, 0].set_ylabel("time relative to the slowest strategy")
    figure.suptitle("AutoDDL, Fig. 4: communication time of eight strategies of a Transformer layer")
    legend(figure, {}, ("simulated", "measured"))
    return figure


@styled
def fig7(results: Results) -> Figure | None:
    """The factors of VGG13's dense layers."""
    run = [row for row in results.rows("fig7") if row.ok]
    if not run:
        return None
    figure, axes = panels(1, len(run), 11, 3.6, sharey=True)
    for panel, row in zip(axes[0], run, strict=True):
        factors = zip(*(row.strategy[name] for name in DENSE), strict=True)
        bars(panel, WIDTHS, [Bars(own, colour) for own, colour in zip(factors, COLOURS, strict=False)], "{:g}")
        panel.set_yscale("log", base=2)
        panel.set(title=f"planner.paths={row['planner.paths']}", ylim=(0.8, 48), yticks=[1, 2, 4, 8, 16, 32])
        panel.set_yticklabels(["1", "2", "4", "8", "16", "32"])
    axes[0, 0].set_ylabel("number of devices")
    figure.suptitle("AutoDDL, Fig. 7: VGG13's dense layers on 32 nodes, planned; p0 = 1: no weight is replicated")
    legend(figure, dict(zip(FACTORS, COLOURS, strict=False)))
    return figure


@styled
def fig8(results: Results) -> Figure | None:
    """Plot the cost that searches have found after so many plans: medians of ten seeds, and bands with nine of them."""
    batch = BATCHES[0]
    all_curves = {(nodes, name): curves(results, nodes, batch, name) for nodes in NODES for name in SEARCHES}
    if not all(all_curves.values()):
        return None
    figure, axes = panels(1, len(NODES), 12, 4.6, sharey=True)
    for panel, nodes in zip(axes[0], NODES, strict=True):
        _searches(panel, nodes, {name: all_curves[nodes, name] for name in SEARCHES})
    axes[0, 0].set_ylabel("communication relative to the optimum")
    figure.suptitle(f"AutoDDL, Fig. 8: searches against the proven optimum, batch {batch}, planned")
    below(
        figure,
        [
            *(lined(title, OF_SEARCH[name], "-") for name, title in SEARCHES.items()),
            lined("optimum", DARK, "--"),
        ],
    )
    return figure


def _searches(axes: Axes, nodes: str, by_search: dict[str, list[Curve]]) -> None:
    import seaborn

    first = max(curve.points[0][0] for own in by_search.values() for curve in own)
    plans = [first * (EVALUATIONS / first) ** (step / PLANS) for step in range(PLANS + 1)]
    for name, own in by_search.items():
        x = [count for _ in own for count in plans]
        y = [curve.at(round(count)) for curve in own for count in plans]
        seaborn.lineplot(x=x, y=y, estimator="median", errorbar=("pi", 90), color=OF_SEARCH[name], ax=axes)
    axes.axhline(1.0, color=DARK, linewidth=1.0, linestyle="--")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_yticks(TICKS, [f"{tick:g}" for tick in TICKS])
    axes.set_yticks([], minor=True)
    axes.set(title=f"{nodes} nodes", xlabel="plans evaluated")


def fig9(results: Results) -> Figure | None:
    """Schemes on Piz Daint."""
    return _schemes(results, (*VGG, *TRANSFORMERS), "AutoDDL, Fig. 9: Piz Daint, simulated")


def fig10(results: Results) -> Figure | None:
    """Schemes on Google Cloud."""
    return _schemes(results, (*CLOUD_VGG, SMALL, LARGE), "AutoDDL, Fig. 10: two nodes of Google Cloud, simulated")


@styled
def _schemes(results: Results, settings: Sequence[Setting], title: str) -> Figure | None:
    """A step of each scheme, communication at the bottom; a mark where the paper's saving would have AutoDDL."""
    if not any(setting.chosen(results, OURS) for setting in settings):
        return None
    columns = (len(settings) + 1) // 2
    figure, axes = panels(2, columns, 4.4 * columns, 7.4)
    for panel, setting in zip(axes.flat, settings, strict=True):
        _steps(panel, results, setting)
    for row in axes:
        row[0].set_ylabel("step time (s)")
    figure.suptitle(title)
    below(
        figure,
        [
            filled("communication", ORANGE),
            filled("the rest of a step", BLUE),
            lined("AutoDDL, had it saved as much of the second best's step as in the paper", VERMILLION, "--"),
        ],
    )
    return figure


def _steps(axes: Axes, results: Results, setting: Setting) -> None:
    whole, talk = setting.seconds(results, steps), setting.seconds(results, communication)
    for place, scheme in enumerate(SCHEMES):
        if scheme not in whole:
            axes.annotate(
                "does not fit",
                (place, 0),
                (0, 4),
                textcoords="offset points",
                rotation=90,
                ha="center",
                fontsize=8.5,
                color=GREY,
            )
            continue
        sent = min(talk[scheme], whole[scheme])
        axes.bar(place, sent, 0.75, color=ORANGE)
        drawn = axes.bar(place, whole[scheme] - sent, 0.75, bottom=sent, color=BLUE)
        axes.bar_label(drawn, [f"{whole[scheme]:.3g}"], padding=1.5, fontsize=8.5, zorder=3, bbox=CLEAR)
    axes.set_title(setting.title)
    _mark(axes, setting, whole)
    axes.set_xticks(range(len(SCHEMES)), SHORT)
    axes.set_xlim(-0.6, len(SCHEMES) - 0.4)
    axes.grid(axis="x", visible=False)
    axes.margins(y=0.12)


def _mark(axes: Axes, setting: Setting, whole: dict[str, float]) -> None:
    """Mark AutoDDL's step time if it saved as much of the second best's as in the paper."""
    percent = savings.step_saving(setting)
    others = [seconds for scheme, seconds in whole.items() if scheme in BASELINES]
    if percent is not None and others:
        place, level = [*SCHEMES].index(OURS), min(others) * (1 - percent / 100)
        axes.plot([place - 0.45, place + 0.45], [level, level], LOOKS["paper"].dash, color=VERMILLION)
        axes.set_title(f"{setting.title} (paper: {percent:g} % saved)")


FIGURES = {
    "autoddl_fig3": fig3,
    "autoddl_fig4": fig4,
    "autoddl_fig7": fig7,
    "autoddl_fig8": fig8,
    "autoddl_fig9": fig9,
    "autoddl_fig10": fig10,
}
"""Figures by the names of their files."""
