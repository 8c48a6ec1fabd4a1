"""The accuracy ledger: predicted and measured step time and memory of every measured record, the misses first.

    python -m analysis.accuracy                    the committed records
    python -m analysis.accuracy runs/mine ...      those of folders, archives and W&B (`analysis.records`)

    engine    runs   predicted / measured   error: median   worst   within 10 %      of the step time
    gpipe       21                   0.92            10 %    41 %          48 %
    contest                        runs   Kendall's tau   predicted best / measured best

A contest is a sweep over several engines with the same work; its tau compares the two orders. The predictions are those
that the runs were started with.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from rich.console import Console
from rich.table import Table
from rich.text import Text

from analysis import records
from analysis.run_artifacts import ORIGIN
from harness.config.registry import ROOT
from harness.core.problem import CannotRun
from harness.core.record import EXIT_CODES, RunRecord
from harness.core.units import UNKNOWN, seconds
from harness.report.comparison import SAME

COMMITTED = ROOT / "analysis" / "results" / "records"
NEAR = 0.1
MISSES = 10
"""Rows of the worst predictions."""


@dataclass(frozen=True)
class Case:
    """One measured run: seconds of a step, and predicted / measured of the memory of each device that was metered."""

    id: str
    engine: str
    model: str
    contest: str
    measured_s: float
    predicted_s: float
    memory: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Predicted / measured step time."""
        return self.predicted_s / self.measured_s

    @property
    def error(self) -> float:
        """Of the step time, relative to the measured one."""
        return abs(self.ratio - 1)

    @property
    def memory_error(self) -> float | None:
        """The largest of all devices; None where nothing was metered."""
        return max((abs(ratio - 1) for ratio in self.memory), default=None)


@dataclass(frozen=True)
class Contest:
    """A sweep over several engines with the same work: how good the predicted order was."""

    name: str
    cases: tuple[Case, ...]

    @property
    def tau(self) -> float | None:
        """Kendall's tau-b between the predicted and the measured order; None where one has no order."""
        from harness.races.verdict import kendalls_tau

        return kendalls_tau([one.measured_s for one in self.cases], [one.predicted_s for one in self.cases])

    @property
    def regret(self) -> float:
        """The measured step time of the predicted best / that of the measured best."""
        from harness.races.verdict import regret

        found = regret({one.id: one.measured_s for one in self.cases}, {one.id: one.predicted_s for one in self.cases})
        assert found
        return found[1]


def cases(loaded: Iterable[RunRecord]) -> list[Case]:
    """The newest record of each measured point that is ok and was predicted."""
    found = []
    for record in records.newest(loaded, records.point_of).values():
        ratios, step_s = record.metrics.get("predicted_over_measured") or {}, record.metrics.get("step_time_s")
        if record.source != "measured" or record.status != "ok" or not record.config or not step_s:
            continue
        if ratios.get("step_time_s"):
            memory = tuple(one for one in ratios.get("peak_memory_bytes") or () if one is not None)
            engine, model = record.config["engine"]["name"], record.config["model"]["name"]
            predicted_s = ratios["step_time_s"] * step_s
            found.append(Case(record.id, engine, model, _contest(record), step_s, predicted_s, memory))
    return found


def contests(found: Iterable[Case]) -> list[Contest]:
    """Those of several engines, in order of their names."""
    groups: dict[str, list[Case]] = defaultdict(list)
    for case in found:
        groups[case.contest].append(case)
    several = {name: own for name, own in groups.items() if len({one.engine for one in own}) > 1}
    return [Contest(name.partition(" ")[0] + f" {own[0].model}", tuple(own)) for name, own in sorted(several.items())]


def _contest(record: RunRecord) -> str:
    """The sweep of a run, and what it computes."""
    place = PurePath(record.config.get("out") or record.manifest.get(ORIGIN, ""))
    work = [record.config.get("batch", {}).get("size"), *(record.config.get(key) for key in SAME)]
    return f"{place.parent.name or place.name} {json.dumps(work, sort_keys=True)}"


def by(found: Iterable[Case], key: Callable[[Case], str]) -> list[tuple[str, ...]]:
    """A row for each group: how many, median ratio, errors of time, share that is near, errors of memory."""
    groups: dict[str, list[Case]] = defaultdict(list)
    for case in found:
        groups[key(case)].append(case)
    return [(name, *_summary(own)) for name, own in sorted(groups.items())]


def _summary(own: Sequence[Case]) -> tuple[str, ...]:
    errors, memory = [one.error for one in own], [one.memory_error for one in own if one.memory_error is not None]
    near = sum(error <= NEAR for error in errors) / len(errors)
    return (
        str(len(own)),
        f"{statistics.median(one.ratio for one in own):.2f}",
        f"{statistics.median(errors):.0%}",
        f"{max(errors):.0%}",
        f"{near:.0%}",
        f"{statistics.median(memory):.1%}" if memory else UNKNOWN,
        f"{max(memory):.1%}" if memory else UNKNOWN,
    )


TITLES = (
    "runs",
    "predicted\n/ measured",
    "error of\ntime: median",
    "worst",
    "within 10 %",
    "of memory:\nmedian",
    "worst",
)


def main(arguments: Sequence[str]) -> int:
    """Print the ledger; returns 0, or 2 where there is nothing to compare."""
    parser = argparse.ArgumentParser("python -m analysis.accuracy", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("sources", nargs="*", metavar="SOURCE", help="folders, archives, wandb:...; the committed ones")
    options = parser.parse_args(arguments)
    try:
        loaded = records.load(options.sources or sorted(COMMITTED.glob("*.jsonl.gz")))
    except CannotRun as error:
        print(error, file=sys.stderr)
        return EXIT_CODES["infeasible"]
    found = cases(loaded.records)
    if not found:
        print("no measured record with a prediction", file=sys.stderr)
        return EXIT_CODES["infeasible"]
    console = Console()
    _show(found, console if console.is_terminal else Console(width=140))
    return 0


def _show(found: Sequence[Case], console: Console) -> None:
    worst = sorted(found, key=lambda one: -one.error)[:MISSES]
    rows = [(o.id, o.engine, o.model, seconds(o.measured_s), seconds(o.predicted_s), f"{o.ratio:.2f}") for o in worst]
    titles = ("worst predictions", "engine", "model", "measured", "predicted", "predicted\n/ measured")
    console.print(_table(titles, rows, 3))
    console.print(_table(("engine", *TITLES), [*by(found, lambda one: one.engine), *by(found, lambda _: "all")], 1))
    console.print(_table(("model", *TITLES), by(found, lambda one: one.model), 1))
    held = contests(found)
    orders = [
        (c.name, str(len(c.cases)), UNKNOWN if c.tau is None else f"{c.tau:.2f}", f"{c.regret:.2f}") for c in held
    ]
    if orders:
        console.print(_table(("contest", "runs", "Kendall's\ntau", "predicted best\n/ measured best"), orders, 1))


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]], texts: int) -> Table:
    """The first `texts` columns are texts."""
    table = Table(box=None, pad_edge=False)
    for number, title in enumerate(titles):
        table.add_column(title, justify="left" if number < texts else "right")
    for row in rows:
        table.add_row(*map(Text, row))
    table.add_row()
    return table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
