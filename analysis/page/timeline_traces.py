"""The chosen traces as timeline.js reads them, and as its boxes to tick."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from analysis.torchgpipe.traces import Chosen
from harness.report.timeline_layout import Box, Panel, lay_out
from harness.report.timeline_plot import STYLES

TITLES = {
    "traces-local": "Small runs on this machine, each above its simulation",
    "traces-paper": "Myelin's 12B GPT in 12 stages, simulated",
    "torchgpipe_table1-paper": "torchgpipe's Table 1, simulated",
}
FIRST = 2
"""Number of traces that are shown at first."""
NETWORK_PX = 72
"""Pixels that overlapping ops of a lane share."""
HEIGHTS_PX = {"compute": 26}
LANE_PX, THINNEST_PX = 14, 3
DIGITS = 4
"""Digits of a millisecond after the point: a tenth of a microsecond."""


@dataclass(frozen=True)
class Choice:
    """A box to tick: the number of a trace, and in `label` its source."""

    number: int
    label: str
    chosen: bool


@dataclass(frozen=True)
class Run:
    """The boxes of one run, measured and simulated; `label` is what distinguishes it in its group."""

    label: str
    choices: Sequence[Choice]


@dataclass(frozen=True)
class Group:
    """The runs of a sweep; `common` is what all their titles have."""

    title: str
    common: str
    runs: Sequence[Run]


def groups(traces: Sequence[Chosen]) -> list[Group]:
    """Return a group for each sweep."""
    numbered = groupby(enumerate(traces), lambda one: one[1].sweep)
    return [_group(TITLES[sweep], [(number, one.title) for number, one in own]) for sweep, own in numbered]


def _group(title: str, traces: Sequence[tuple[int, str]]) -> Group:
    """A run's traces follow each other, and their titles end with a comma and their source."""
    names = [name.rpartition(", ")[0].split() for _, name in traces]
    common = [word for word in names[0] if all(word in words for words in names)] if len(names) > 1 else []
    runs = []
    for words, own in groupby(zip(names, traces, strict=True), lambda one: one[0]):
        choices = [Choice(number, name.rpartition(", ")[2], number < FIRST) for _, (number, name) in own]
        runs.append(Run(_label([word for word in words if word not in common] or words), choices))
    return Group(title, "" if len(runs) == 1 else _label(common), runs)


def _label(words: Sequence[str]) -> str:
    """gpipe, unet, checkpoint=never for engine=gpipe model=unet checkpoint=never."""
    return ", ".join(word.removeprefix("engine=").removeprefix("model=") for word in words)


def data(traces: Sequence[Chosen]) -> dict[str, Any]:
    """Return the input of timeline.js; times in milliseconds from a step's start."""
    colours = {kind: (style.label, style.fill, style.ink) for kind, style in STYLES.items()}
    return {"colours": colours, "traces": [_trace(lay_out(one.title, one.trace, 0.0)) for one in traces]}


def legend(traces: Sequence[Chosen]) -> list[tuple[str, str]]:
    """Label and colour of each kind of op that there is."""
    kinds = {span.parsed.kind for one in traces for span in one.trace.spans}
    return [
        (style.label, "var(--optimizer)" if kind == "step" else style.fill)
        for kind, style in STYLES.items()
        if kind in kinds
    ]


def _trace(panel: Panel) -> dict[str, Any]:
    lanes = [
        {
            "device": lane.device,
            "queue": lane.queue,
            "height": max(THINNEST_PX, min(HEIGHTS_PX.get(lane.queue, LANE_PX), NETWORK_PX // len(lane.rows))),
            "rows": [[_box(box) for box in row] for row in lane.rows],
        }
        for lane in panel.lanes
    ]
    return {"lines": panel.lines, "length": panel.length_ms, "lanes": lanes}


def _box(box: Box) -> list[str | float]:
    return [box.kind, box.text, round(box.start_ms, DIGITS), round(box.end_ms, DIGITS), box.op]
