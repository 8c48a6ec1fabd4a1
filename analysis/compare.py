"""Compare runs, sweeps, races, packs of records or results of `make bench`, figure by figure, and fail where the second
one is worse:

    python -m analysis.compare runs/before runs/after
    python -m analysis.compare runs/gpipe runs/ddp --figures step_time_s --max-regression 3
    python -m analysis.compare bench:1 bench:0

    point                 figure        runs/before  runs/after  after / before   95 % interval
    engine=gpipe seed=1   step_time_s      101.2 ms    112.9 ms            1.12    1.08 to 1.15   worse
                          memory           63.1 MiB    63.1 MiB            1.00                   the same

Points with the same keys are compared; two single runs are, whatever their keys. The interval is that of the ratio of
two medians, by a bootstrap over the measured steps in metrics.jsonl; of a benchmark it follows from quartiles and
rounds; records in a pack have no steps, and so no interval. A difference is real if the interval leaves out 1. Else
there is none where the interval is narrower than --resolution percent, and where it is wider it is not resolved. Losses
are compared after equally many steps. Exit code 1: a figure is worse by more than --max-regression percent, and that is
no noise as far as known; or a point that is ok in the first has failed in the second, or its loss is no number there.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from analysis import records
from analysis.bench import history
from analysis.run_artifacts import ORIGIN
from harness.core.problem import CannotRun, Problem
from harness.core.record import EXIT_CODES, RunRecord
from harness.core.run_files import METRICS
from harness.core.units import UNKNOWN, number, seconds, size
from harness.races.verdict import LEVEL, NARROW, SAMPLES

REGRESSED = 1
QUANTILE = 1.96
"""Standard errors from a ratio to the end of its 95 % interval."""
SOURCE = "a folder of a run, a sweep or a race, a pack (*.jsonl.gz), or bench:N, the last make bench but N"
SELF = "this comparison"
NOT_COMPARED = ("out", "tracker", "steps", "warmup", "race", "export")
"""Keys that do not change what a step computes."""


@dataclass(frozen=True)
class Figure:
    """One number of a run, of which less is better; `steps` gives its value in each measured step, or else `spread` the
    standard error of the number, as a part of it."""

    value: Callable[[RunRecord], float | None]
    shown: Callable[[float | None], str]
    steps: Callable[[RunRecord], list[float]] = lambda record: []
    spread: Callable[[RunRecord], float | None] = lambda record: None


@dataclass(frozen=True)
class Difference:
    """A figure of two runs; `low` and `high` are the interval of second / first, None where there are no steps."""

    figure: str
    first: float
    second: float
    low: float | None = None
    high: float | None = None

    @property
    def ratio(self) -> float:
        return self.second / self.first if self.first else math.nan

    @property
    def increase(self) -> float:
        """Of second over first, as a part of it: a loss may be negative, or nothing."""
        more = self.second - self.first
        return more / abs(self.first) if self.first else math.copysign(math.inf, more) if more else 0.0

    @property
    def is_noise(self) -> bool:
        return self.low is not None and self.high is not None and self.low <= 1.0 <= self.high

    def verdict(self, resolution: float = NARROW) -> str:
        """worse, better, the same, no difference as far as the resolution goes, or none that is known."""
        if self.first == self.second:
            return "the same"
        if self.low is not None and self.high is not None and self.is_noise:
            furthest = max(1 - self.low, self.high - 1)
            narrow = self.high - self.low <= resolution
            return f"no difference (within {100 * furthest:.1f} %)" if narrow else "not resolved"
        return "worse" if self.increase > 0 else "better"

    def is_regression(self, percent: float) -> bool:
        """Whether the second is worse by more than so many percent, and that is no noise as far as known."""
        return not self.is_noise and self.increase > percent / 100


def _step_times(record: RunRecord) -> list[float]:
    with suppress(OSError, ValueError, KeyError):
        lines = (Path(record.manifest[ORIGIN]) / METRICS).read_text(encoding="utf-8").splitlines()
        return [line["step_time_s"] for line in map(json.loads, lines) if line["phase"] == "measured"]
    return []


def _memory(record: RunRecord) -> float | None:
    return max((one for one in record.metrics.get("peak_memory_bytes") or () if one is not None), default=None)


LOSS = "loss"
FIGURES = {
    "step_time_s": Figure(
        lambda record: record.metrics.get("step_time_s"),
        seconds,
        _step_times,
        lambda record: record.metrics.get("step_spread"),
    ),
    "memory": Figure(_memory, size),
    LOSS: Figure(lambda record: record.metrics.get("loss"), lambda value: UNKNOWN if value is None else number(value)),
}
"""Step time, memory of the fullest device, loss of the last step."""


def interval(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the ratio of the medians, second / first, of independent samples (bootstrap)."""
    import numpy as np

    dice = np.random.default_rng(0)
    medians = [
        np.median(np.asarray(own)[dice.integers(0, len(own), (SAMPLES, len(own)))], axis=1) for own in (first, second)
    ]
    low, high = np.quantile(medians[1] / medians[0], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def differences(first: RunRecord, second: RunRecord, names: Sequence[str]) -> Iterator[Difference]:
    """Of each figure that both have."""
    for name in names:
        figure = FIGURES[name]
        one, other = figure.value(first), figure.value(second)
        if one is None or other is None or (name == LOSS and _steps(first) != _steps(second)):
            continue
        steps = figure.steps(first), figure.steps(second)
        spreads = [spread for spread in (figure.spread(first), figure.spread(second)) if spread is not None]
        low, high = None, None
        if all(len(own) > 1 for own in steps):
            low, high = interval(*steps)
        elif len(spreads) == 2:
            width = QUANTILE * math.hypot(*spreads)
            low, high = other / one * math.exp(-width), other / one * math.exp(width)
        yield Difference(name, one, other, low, high)


def pairs(first: Sequence[RunRecord], second: Sequence[RunRecord]) -> dict[str, tuple[RunRecord, RunRecord]]:
    """The runs to compare, by a title: those with the same keys, or the only two.

    Of several that differ in keys which do not count alone, as in steps, those that have these in common, too.
    """
    if len(first) == len(second) == 1:
        titles = dict.fromkeys(_title(_key(one)) for one in (first[0], second[0]))
        return {" and ".join(titles): (first[0], second[0])}
    own, others = _by_key(first), _by_key(second)
    found: dict[str, tuple[RunRecord, RunRecord]] = {}
    for key in own.keys() & others.keys():
        alone = len(own[key]) == len(others[key]) == 1
        exact = {records.point_of(record): record for record in others[key]}
        for record in own[key]:
            point = records.point_of(record)
            if other := others[key][0] if alone else exact.get(point):
                found[_title(key if alone else point)] = record, other
    return dict(sorted(found.items()))


def _by_key(found: Sequence[RunRecord]) -> dict[frozenset[str], list[RunRecord]]:
    groups: dict[frozenset[str], list[RunRecord]] = defaultdict(list)
    for record in found:
        groups[_key(record)].append(record)
    return groups


def _key(record: RunRecord) -> frozenset[str]:
    kept = (text for text in records.point_of(record) if text.partition("=")[0].partition(".")[0] not in NOT_COMPARED)
    return frozenset(kept)


def _steps(record: RunRecord) -> int:
    """Steps after which a run has its loss."""
    return int(record.config.get("warmup", 0)) + int(record.config.get("steps", 0))


def _lost(found: Mapping[str, tuple[RunRecord, RunRecord]], options: Any) -> tuple[list[str], list[str]]:
    """Lines about losses that are numbers in the first and none (NaN, infinite) in the second; and about those that are
    none in the first."""
    without = {title: [*map(_without_number, both)] for title, both in found.items()}
    gone = [
        f"{LOSS} is no number in {options.second}: {title}" for title, one in without.items() if one == [False, True]
    ]
    return gone, [f"{LOSS} is no number in {options.first}: {title}" for title, one in without.items() if one[0]]


def _without_number(record: RunRecord) -> bool:
    """Whether it has trained, and its last loss is null: what a record has in the place of NaN and of infinity."""
    return record.source == "measured" and LOSS in record.metrics and record.metrics[LOSS] is None


def _title(key: frozenset[str]) -> str:
    return " ".join(sorted(key)) or "all defaults"


def main(arguments: Sequence[str]) -> int:
    """Print the table; returns 1 for a regression, and 2 for what cannot be compared."""
    parser = argparse.ArgumentParser("python -m analysis.compare", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("first", metavar="A", help=SOURCE)
    parser.add_argument("second", metavar="B")
    parser.add_argument("--figures", default=",".join(FIGURES), help=f"of {', '.join(FIGURES)}; by default all")
    parser.add_argument("--max-regression", type=_percent, default=5.0, metavar="PERCENT", help="by default 5")
    parser.add_argument(
        "--resolution", type=_percent, default=100 * NARROW, metavar="PERCENT", help=f"by default {100 * NARROW:g}"
    )
    options = parser.parse_args(arguments)
    names = [name.strip() for name in options.figures.split(",")]
    try:
        if unknown := [name for name in names if name not in FIGURES]:
            message = f"is no figure: there are {', '.join(FIGURES)}"
            raise CannotRun([Problem("--figures", name, message) for name in unknown], SELF)
        found, lines, failed = _loaded(options.first, options.second)
        gone, come = _lost(found, options) if LOSS in names else ([], [])
        rows = [(title, one) for title, (first, second) in found.items() for one in differences(first, second, names)]
        if not rows and not failed + gone + come:
            raise CannotRun([Problem("--figures", options.figures, "is in no two runs that are compared")], SELF)
    except CannotRun as error:
        print(error, file=sys.stderr)
        return EXIT_CODES["infeasible"]
    worse = [one for _, one in rows if one.is_regression(options.max_regression)]
    console = Console()
    if rows:
        _show(rows, options, console if console.is_terminal else Console(width=160))
    for line in [*lines, *come, *failed, *gone]:
        print(line)
    print(f"{len(worse)} of {len(rows)} figures are worse by more than {options.max_regression:g} %")
    return REGRESSED if worse or failed or gone else 0


def _percent(text: str) -> float:
    found = float(text)
    if math.isnan(found):  # no figure is worse than that
        raise argparse.ArgumentTypeError(f"{text} is no number")
    return found


def _loaded(first: str, second: str) -> tuple[dict[str, tuple[RunRecord, RunRecord]], list[str], list[str]]:
    """The runs to compare; lines about those that are skipped or on one side alone, and about those that are ok in the
    first and have failed in the second. Raises CannotRun where there are none of these."""
    names, loaded = (first, second), [_source(name) for name in (first, second)]
    sides = [_ok(one.records) for one in loaded]
    found = pairs(*sides)
    skipped = [f"skipped {one.place}: {one.why}" for side in loaded for one in side.skipped]
    matched = {id(record) for both in found.values() for record in both}
    alone = [[record for record in own if id(record) not in matched] for own in sides]
    ended = [record for record in _newest(loaded[1].records) if record.status != "ok"]
    failed, only = [], []
    for record in alone[0]:
        others = ended if len(sides[0]) == 1 == len(loaded[1].records) else _of_point(record, ended)
        if others:
            failed.append(f"{_named(record, sides[0])} is {others[-1].status} in {second}")
        else:
            only.append(f"only in {first}: {_named(record, sides[0])}")
    only += [f"only in {second}: {_named(record, sides[1])}" for record in alone[1]]
    if not found and not failed:
        counts = " and ".join(f"{len(own)} in {name}" for own, name in zip(sides, names, strict=True))
        message = "; ".join([f"have no run that is ok with the same keys ({counts})", *skipped])
        raise CannotRun([Problem("A B", None, message)], SELF)
    other = [
        f"{LOSS} after {_steps(one)} and after {_steps(two)} steps is not compared: {title}"
        for title, (one, two) in found.items()
        if _steps(one) != _steps(two)
    ]
    return found, [*skipped, *other, *only], sorted(failed)


def _of_point(record: RunRecord, others: Sequence[RunRecord]) -> list[RunRecord]:
    """Those of the same point; where there are none, those with the same keys."""
    same = [one for one in others if records.point_of(one) == records.point_of(record)]
    return same or [one for one in others if _key(one) == _key(record)]


def _named(record: RunRecord, side: Sequence[RunRecord]) -> str:
    """A run by its keys that count, or by all where another one of its side has the same."""
    several = len(_by_key(side)[_key(record)]) > 1
    return _title(records.point_of(record) if several else _key(record))


def _source(name: str) -> records.Loaded:
    """The records of a place, or of the history of `make bench`."""
    if not name.startswith(history.PREFIX):
        return records.load([name])
    found = history.load(name)
    return records.Loaded(tuple(found), {name: len(found)}, ())


def _ok(loaded: Sequence[RunRecord]) -> list[RunRecord]:
    return [record for record in _newest(loaded) if record.status == "ok"]


def _newest(loaded: Sequence[RunRecord]) -> list[RunRecord]:
    return [*records.newest(loaded, records.point_of).values()]


def _show(rows: Sequence[tuple[str, Difference]], options: Any, console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    for title in ("point", "figure", options.first, options.second, "second / first", "95 % interval", ""):
        table.add_column(title, justify="left" if title in ("point", "figure", "") else "right", overflow="fold")
    former = ""
    for point, one in rows:
        between = f"{one.low:.3f} to {one.high:.3f}" if one.low is not None else ""
        shown = FIGURES[one.figure].shown
        cells = (
            shown(one.first),
            shown(one.second),
            f"{one.ratio:.3f}",
            between,
            one.verdict(options.resolution / 100),
        )
        table.add_row(Text("" if point == former else point), one.figure, *cells)
        former = point
    console.print(table)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
