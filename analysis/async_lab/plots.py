"""Pictures: losses by updates and by time, and by depth.

loss |\\                     a line for each method, the mean over seeds in a band with all of them:
     | \\__  ____           by updates (equal tokens), and by the time in which a pipeline makes them
     +--------- updates
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from analysis.async_lab.runs import LAST, SWEEPS, Times, Trained, load, mean, newest, pipelines, trained
from analysis.async_lab.tables import of_model
from analysis.paper_pages import Missing, Picture
from analysis.plots import curves as plotted
from analysis.plots import style
from analysis.records import Loaded, sweep_command

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def figures(loaded: Loaded) -> dict[str, Figure]:
    """Curves of each model, by updates and by simulated time; and losses by depth."""
    runs, times = trained(loaded.records), pipelines(loaded.records)
    found = {}
    for model in dict.fromkeys(one.scheme.model for one in runs):
        own = [one for one in runs if one.scheme.model == model]
        found[f"{model}_curves"] = curves(own, of_model(model, times))
        found[f"{model}_depth"] = depths(own)
    return found


@style.styled
def curves(runs: Sequence[Trained], times: Times) -> Figure:
    """The deepest pipeline of each method, by updates and by time."""
    deepest = max((one.scheme.stages for one in runs), default=0)
    shown = [one for one in runs if one.scheme.stages in (0, deepest)]
    several = deepest in times["1f1b"] and deepest in times["periodic"]
    drawn, axes = style.panels(1, 1 + several, 13, 6.5, sharey=True)
    looks = plotted.looks(len(shown))
    for one, look in zip(shown, looks, strict=True):
        _draw(axes[0, 0], one, look, 1.0)
        if several:
            kind = "1f1b" if one.scheme.synchronous else "periodic"
            _draw(axes[0, 1], one, look, times[kind][deepest].update_s)
    axes[0, 0].set(xlabel="updates", ylabel="loss")
    if several:
        last_s = max(len(one.losses[0]) for one in shown) * times["periodic"][deepest].update_s
        axes[0, 1].set(xlabel="simulated seconds", xlim=(0, last_s))
    labels = [f"{one.scheme.optimizer}, {one.scheme.method}" for one in shown]
    style.title(drawn, f"{runs[0].scheme.model}: {deepest} stages, means over seeds in a band with all of them")
    handles = [style.lined(text, look.colour, _DASHES[look.dash]) for text, look in zip(labels, looks, strict=True)]
    style.below(drawn, handles, grow=True)
    return drawn


_DASHES: dict[str, style.Dash] = {"solid": "-", "dashed": "--", "dotted": ":", "dash-dotted": "--"}
_MARKERS = {"solid": "o", "dashed": "s", "dotted": "^", "dash-dotted": "D"}
"""A method of one depth has no line that shows its dash."""


def _draw(axes: Axes, one: Trained, look: plotted.Look, update_s: float) -> None:
    """Means over the last updates, of each seed."""
    count = max(map(len, one.losses))
    places = range(min(LAST // 4, count), count + 1, max(1, count // 100))
    means = [
        [mean(own[max(0, place - LAST // 2) : place]) for own in one.losses if place <= len(own)] for place in places
    ]
    x = [place * update_s for place in places]
    axes.plot(x, [mean(point) for point in means], color=look.colour, linestyle=_DASHES[look.dash])
    axes.fill_between(x, [min(p) for p in means], [max(p) for p in means], color=look.colour, alpha=0.2, linewidth=0)


@style.styled
def depths(runs: Sequence[Trained]) -> Figure:
    """The loss after all updates against the number of stages, a line for each optimizer and method."""
    drawn, axes = style.panels(1, 1, 9, 5.5)
    lines: dict[str, dict[int, list[float]]] = defaultdict(dict)
    for one in runs:
        lines[f"{one.scheme.optimizer}, {one.scheme.method}"][one.scheme.stages] = one.last()
    stages = sorted({one.scheme.stages for one in runs if one.scheme.stages})
    for (label, of_depth), look in zip(lines.items(), plotted.looks(len(lines)), strict=True):
        points = dict.fromkeys(stages, of_depth[0]) if 0 in of_depth else dict(sorted(of_depth.items()))
        means = [mean(point) for point in points.values()]
        line, marker = _DASHES[look.dash], _MARKERS[look.dash]
        axes[0, 0].plot([*points], means, color=look.colour, linestyle=line, marker=marker, label=label)
    axes[0, 0].set_xscale("log", base=2)
    axes[0, 0].set_xticks(stages, list(map(str, stages)))
    axes[0, 0].set(xlabel="stages", ylabel="loss after all updates", title=runs[0].scheme.model)
    axes[0, 0].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return drawn


def picture(name: str) -> Picture | Missing:
    """One of `figures`, as notebooks show it."""
    found = figures(newest(load()))
    return Picture.of(found[name]) if name in found else Missing(SWEEPS[0], f"Not run yet: {sweep_command(SWEEPS[0])}")
