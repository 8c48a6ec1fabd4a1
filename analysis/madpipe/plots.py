"""MadPipe's figures: planned periods against memory, their ratios, and speed-ups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from analysis.madpipe.claim_checks import SPEED_GB, least_ratio
from analysis.madpipe.fig7 import cell
from analysis.madpipe.sweep_results import (
    BASELINE,
    CONTIGUOUS,
    EXACT,
    NETWORKS,
    PERCENTS,
    PIPEDREAM,
    PUBLISHED,
    Results,
    Schemes,
)
from analysis.madpipe.tables import MEMORIES
from analysis.plots.curves import Dash, Line, Look, handle, overlay
from analysis.plots.style import BLUE, COLOURS, DARK, GREEN, ORANGE, SKY, VERMILLION, below, lined, panels, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DEVICES = (2, 4, 6, 8)
BANDWIDTHS: dict[int, Dash] = {12: "solid", 24: "dotted"}
"""GB/s, and how the lines of speed-ups are drawn."""
PERIODS = {BASELINE: ("PipeDream", VERMILLION, ORANGE), PUBLISHED: ("MadPipe as published", BLUE, SKY)}
"""By scheme: its name, the colour of its lines, and that of dashed and dotted ones."""
RATIOS = dict(zip((CONTIGUOUS, *PIPEDREAM.values()), (GREEN, VERMILLION, *COLOURS[3:5], COLOURS[1]), strict=True))
RATIOS[EXACT] = BLUE
BAND: dict[int, Dash] = dict(zip(PERCENTS, ("dotted", "dash-dotted"), strict=True))
"""How PipeDream's ratio is drawn where activations have this percentage of their size."""


@styled
def fig6(results: Results) -> Figure | None:
    """Periods of ResNet-50 against memory, a panel for each number of devices that was run, and link."""
    schemes = results.by_scheme("fig6")
    known = {(devices, bandwidth) for own in schemes.values() for _, devices, _, bandwidth in own}
    devices = [count for count in DEVICES if any(count == one for one, _ in known)]
    if not devices or not all(name in schemes for name in PERIODS):
        return None
    figure, axes = panels(len(BANDWIDTHS), len(devices), 13, 6.2, sharex=True, sharey=True)
    for row, bandwidth in zip(axes, BANDWIDTHS, strict=True):
        for panel, count in zip(row, devices, strict=True):
            _periods(panel, schemes, count, bandwidth)
        row[0].set_ylabel("period (ms)")
    axes[0, 0].set_ylim(bottom=0)
    for panel in axes[-1]:
        panel.set_xlabel("memory per device (GB)")
    figure.suptitle("MadPipe, Fig. 6: periods of ResNet-50, planned")
    handles = []
    for title, colour, pale in PERIODS.values():
        handles.append(handle(f"{title}: period of the schedule", Look(colour)))
        handles.append(handle(f"{title}: estimate of the first phase", Look(pale, "dashed")))
    handles.append(handle(f"{EXACT}: period of the schedule", Look(GREEN)))
    below(figure, handles)
    return figure


def _periods(axes: Axes, schemes: Schemes, devices: int, bandwidth: int) -> None:
    def of(scheme: str, field: str, look: Look) -> Line:
        rows = schemes.get(scheme, {}).items()
        own = {m: 1e3 * getattr(row, field) for (_, p, m, b), row in rows if (p, b) == (devices, bandwidth)}
        return Line(sorted(own), [own[memory] for memory in sorted(own)], look)

    lines = [of(EXACT, "period_s", Look(GREEN))]
    for scheme, (_, colour, pale) in PERIODS.items():
        lines += [of(scheme, "period_s", Look(colour)), of(scheme, "first_phase_s", Look(pale, "dashed"))]
    overlay(axes, [line for line in lines if line.x])
    axes.set_title(f"{devices} devices, {bandwidth} GB/s")
    axes.set_xticks(range(4, 17, 4))


@styled
def fig7(results: Results) -> Figure | None:
    """Plot periods relative to MadPipe's against memory: geometric means over devices and links."""
    schemes = results.by_scheme("fig7")
    if not schemes.get(PUBLISHED):
        return None
    figure, axes = panels(1, len(NETWORKS), 13, 4, sharey=True)
    ran = {percent: dash for percent, dash in BAND.items() if results.with_activations(percent).get(PUBLISHED)}
    band = {percent: Look(RATIOS[BASELINE], dash) for percent, dash in ran.items()}
    for panel, network in zip(axes[0], NETWORKS.values(), strict=True):
        lines = [_ratios(schemes, network, scheme, Look(colour)) for scheme, colour in RATIOS.items()]
        for percent, look in band.items():
            lines.append(_ratios(results.with_activations(percent), network, BASELINE, look))
        overlay(panel, [line for line in lines if line.x])
        panel.axhline(1.0, color=DARK, linewidth=0.9)
        panel.plot([MEMORIES[0], 10], [least_ratio()] * 2, color=DARK, linestyle="--", linewidth=1.2)
        panel.set(title=network, xlabel="memory per device (GB)")
        panel.set_xticks(range(4, 17, 4))
    axes[0, 0].set_ylabel("period / MadPipe's")
    figure.suptitle("MadPipe, Fig. 7: periods relative to MadPipe as published, planned")
    handles = [handle(scheme, Look(colour)) for scheme, colour in RATIOS.items()]
    handles += [handle(f"{BASELINE}, activations {percent} %", look) for percent, look in band.items()]
    below(figure, [*handles, lined(f"paper: at least {least_ratio():g} below 10 GB", DARK, "--")])
    return figure


def _ratios(schemes: Schemes, network: str, scheme: str, look: Look) -> Line:
    """Of the memories for which there is one."""
    found = {memory: cell(schemes, network, memory, scheme).ratio for memory in MEMORIES}
    known = {memory: ratio for memory, ratio in found.items() if ratio is not None}
    return Line([*known], [*known.values()], look)


@styled
def fig8(results: Results) -> Figure | None:
    """Speed-up over one device against the number of devices, a panel for each network and memory."""
    schemes = results.by_scheme("fig8")
    if not all(name in schemes for name in PERIODS):
        return None
    figure, axes = panels(len(NETWORKS), len(SPEED_GB), 12, 10, sharex=True, sharey=True)
    for row, network in zip(axes, NETWORKS.values(), strict=True):
        for panel, memory in zip(row, SPEED_GB, strict=True):
            _speedups(panel, schemes, network, memory)
        row[0].set_ylabel("speed-up over one device")
    for panel in axes[-1]:
        panel.set_xlabel("number of devices")
    figure.suptitle("MadPipe, Fig. 8: speed-ups, planned")
    below(
        figure,
        [
            handle(f"{title}, {bandwidth} GB/s", Look(colour, dash))
            for title, *colours in PERIODS.values()
            for (bandwidth, dash), colour in zip(BANDWIDTHS.items(), colours, strict=True)
        ],
    )
    return figure


def _speedups(axes: Axes, schemes: Schemes, network: str, memory: int) -> None:
    lines = []
    for scheme, (_, *colours) in PERIODS.items():
        for (bandwidth, dash), colour in zip(BANDWIDTHS.items(), colours, strict=True):
            own = {
                p: row.speedup
                for (name, p, m, b), row in schemes[scheme].items()
                if (name, m, b) == (network, memory, bandwidth) and row.ok
            }
            devices = sorted(own)
            lines.append(Line(devices, [own[count] for count in devices], Look(colour, dash)))
    overlay(axes, lines)
    axes.axline((1, 1), slope=1, color="#CCCCCC", linewidth=0.8)
    axes.set_title(f"{network}, {memory} GB")
    axes.set(xlim=(1.5, 8.5), ylim=(0, 8.5), xticks=range(2, 9, 2))


FIGURES = {"madpipe_fig6": fig6, "madpipe_fig7": fig7, "madpipe_fig8": fig8}
"""Figures by the names of their files."""
