"""MadPipe's figures: planned periods against memory, their ratios, and speed-ups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from analysis.madpipe.claim_checks import BASELINE, least_ratio
from analysis.madpipe.fig7 import cell
from analysis.madpipe.sweep_results import CONTIGUOUS, MADPIPE, NETWORKS, PIPEDREAM, Results, Schemes
from analysis.madpipe.tables import MEMORIES, SPEEDS
from analysis.plots.curves import Dash, Line, Look, handle, overlay
from analysis.plots.style import BLUE, COLOURS, DARK, GREEN, ORANGE, SKY, VERMILLION, below, lined, panels, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DEVICES = (2, 4, 6, 8)
BANDWIDTHS: dict[int, Dash] = {12: "solid", 24: "dotted"}
"""GB/s, and how the lines of speed-ups are drawn."""
PERIODS = {BASELINE: ("PipeDream", VERMILLION, ORANGE), MADPIPE: ("MadPipe", BLUE, SKY)}
"""By scheme: its name, the colour of its lines, and that of dashed and dotted ones."""
RATIOS = dict(zip((CONTIGUOUS, *PIPEDREAM.values()), (GREEN, VERMILLION, *COLOURS[3:5], COLOURS[1]), strict=True))


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
    below(figure, handles)
    return figure


def _periods(axes: Axes, schemes: Schemes, devices: int, bandwidth: int) -> None:
    lines = []
    for scheme, (_, colour, pale) in PERIODS.items():
        own = [row for (_, p, _, b), row in schemes[scheme].items() if (p, b) == (devices, bandwidth)]
        own.sort(key=lambda row: row.memory_gb)
        memory = [row.memory_gb for row in own]
        lines.append(Line(memory, [1e3 * row.period_s for row in own], Look(colour)))
        lines.append(Line(memory, [1e3 * row.first_phase_s for row in own], Look(pale, "dashed")))
    overlay(axes, lines)
    axes.set_title(f"{devices} devices, {bandwidth} GB/s")
    axes.set_xticks(range(4, 17, 4))


@styled
def fig7(results: Results) -> Figure | None:
    """Plot periods relative to MadPipe's against memory: geometric means over devices and links."""
    if not results.by_scheme("fig7").get(MADPIPE):
        return None
    figure, axes = panels(1, len(NETWORKS), 13, 4, sharey=True)
    for panel, network in zip(axes[0], NETWORKS.values(), strict=True):
        lines = []
        for scheme, colour in RATIOS.items():
            found = {memory: cell(results, network, memory, scheme).ratio for memory in MEMORIES}
            known = {memory: ratio for memory, ratio in found.items() if ratio is not None}
            lines.append(Line([*known], [*known.values()], Look(colour)))
        overlay(panel, lines)
        panel.axhline(1.0, color=DARK, linewidth=0.9)
        panel.plot([MEMORIES[0], 10], [least_ratio()] * 2, color=DARK, linestyle="--", linewidth=1.2)
        panel.set(title=network, xlabel="memory per device (GB)")
        panel.set_xticks(range(4, 17, 4))
    axes[0, 0].set_ylabel("period relative to MadPipe")
    figure.suptitle("MadPipe, Fig. 7: ratios of periods, planned")
    handles = [handle(scheme, Look(colour)) for scheme, colour in RATIOS.items()]
    below(figure, [*handles, lined(f"paper: at least {least_ratio():g} below 10 GB", DARK, "--")])
    return figure


@styled
def fig8(results: Results) -> Figure | None:
    """Speed-up over one device against the number of devices, a panel for each network and memory."""
    schemes = results.by_scheme("fig8")
    if not all(name in schemes for name in PERIODS):
        return None
    figure, axes = panels(len(NETWORKS), len(SPEEDS), 12, 10, sharex=True, sharey=True)
    for row, network in zip(axes, NETWORKS.values(), strict=True):
        for panel, memory in zip(row, SPEEDS, strict=True):
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
