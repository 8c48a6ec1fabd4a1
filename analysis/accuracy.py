"""The accuracy ledger: predicted and measured step time and memory of every measured record, the misses first.

    python -m analysis.accuracy                    the committed records
    python -m analysis.accuracy runs/mine ...      those of folders, archives and W&B (`analysis.records`)

    engine    runs   predicted / measured   / quick steps   error: median   worst   within 10 %   20 %
    gpipe       21                   0.92            10 %    41 %          48 %
    contest                        runs   Kendall's tau   predicted best / measured best

A contest is a sweep over several engines with the same work; its tau compares the two orders. Predictions are made
again, by today's simulator, where the profile of a run was stored (`analysis.predict_again`); others are those that the
runs were started with, and the ledger says why. It lists what it leaves out, too.
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

from analysis import predict_again, records
from analysis.run_artifacts import ORIGIN
from harness.config import registry
from harness.config.registry import ROOT
from harness.core.problem import CannotRun
from harness.core.record import EXIT_CODES, RunRecord
from harness.core.units import UNKNOWN, seconds
from harness.report import comparison

COMMITTED = ROOT / "analysis" / "results" / "records"
NEAR = (0.1, 0.2)
"""Errors of step times that are counted."""
LENGTHS, SHORT = {"50 ms and more": 0.05, "5 to 50 ms": 0.005}, "below 5 ms"
"""Least seconds of a step."""
SHOWN = 3
"""Records that are named for a reason."""
MISSES = 10
"""Rows of the worst predictions."""


@dataclass(frozen=True)
class Case:
    """One measured run: seconds of a step, and predicted / measured of the memory of each device that was metered.

    `quick_s` is the 10th percentile of its steps: what slows a machine down now and then has little part in it.
    `stored` says why the prediction is that of the record; it is empty for one by today's simulator.
    """

    id: str
    engine: str
    model: str
    contest: str
    measured_s: float
    predicted_s: float
    memory: tuple[float, ...]
    stored: str = ""
    quick_s: float | None = None

    @property
    def ratio(self) -> float:
        """Predicted / measured step time."""
        return self.predicted_s / self.measured_s

    @property
    def quick_ratio(self) -> float | None:
        """Predicted step time / that of the quick steps; None where they are not recorded."""
        return self.predicted_s / self.quick_s if self.quick_s else None

    @property
    def error(self) -> float:
        """Of the step time, relative to the measured one."""
        return abs(self.ratio - 1)

    @property
    def memory_ratio(self) -> float | None:
        """Predicted / measured memory of the device that is furthest off; None where nothing was metered."""
        return max(self.memory, key=lambda ratio: abs(ratio - 1), default=None)

    @property
    def memory_error(self) -> float | None:
        """Of that device's memory."""
        return None if self.memory_ratio is None else abs(self.memory_ratio - 1)


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


@dataclass(frozen=True)
class LeftOut:
    """A record that is no case, and why."""

    id: str
    why: str


@dataclass(frozen=True)
class Ledger:
    """Every record of a source is in one of the two."""

    cases: tuple[Case, ...]
    left_out: tuple[LeftOut, ...]


def ledger(loaded: Iterable[RunRecord]) -> Ledger:
    """The newest record of each measured point that is ok and was predicted, and all others with a reason."""
    listed = list({record.id: record for record in loaded}.values())
    newest = {record.id for record in records.newest(listed, records.point_of).values()}
    found: list[Case] = []
    left_out: list[LeftOut] = []
    for record in listed:
        if why := _unfit(record) or ("" if record.id in newest else "there is a newer run of its point"):
            left_out.append(LeftOut(record.id, why))
        else:
            found.append(_case(record))
    return Ledger(tuple(found), tuple(left_out))


def cases(loaded: Iterable[RunRecord]) -> list[Case]:
    """The cases of the ledger."""
    return list(ledger(loaded).cases)


def _unfit(record: RunRecord) -> str:
    """Why a record says nothing about a prediction."""
    if record.source != "measured":
        return f"{record.source}, not measured"
    if record.status != "ok":
        return f"{record.status}, not measured to its end"
    if (name := record.config.get("engine", {}).get("name", "")) and not registry.is_scheme(name):
        return f"engine={name} stands in for another engine, on one device"
    if not record.config or not record.metrics.get("step_time_s"):
        return "has no measured step time"
    if comparison.slowed(record):
        return "the machine was busy with other things"
    return "" if (record.metrics.get("predicted_over_measured") or {}).get("step_time_s") else "was not predicted"


def _case(record: RunRecord) -> Case:
    """The case of a measured record, with the prediction of today's simulator, or else with its own."""
    measured, ratios = record.metrics, record.metrics["predicted_over_measured"]
    step_s, stored = measured["step_time_s"], ""
    memory = ratios.get("peak_memory_bytes") or ()
    predicted_s = ratios["step_time_s"] * step_s
    try:
        again = predict_again.figures(record)
        predicted_s = again["step_time_s"]
        if memory:
            memory = [p / m for p, m in zip(again["peak_memory_bytes"], measured["peak_memory_bytes"], strict=True)]
    except predict_again.NotPredictable as error:
        stored = str(error)
    return Case(
        record.id,
        record.config["engine"]["name"],
        record.config["model"]["name"],
        _contest(record),
        step_s,
        predicted_s,
        tuple(one for one in memory if one is not None),
        stored,
        next(iter(measured.get("step_time_spread_s") or ()), None),
    )


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
    work = [record.config.get("batch", {}).get("size"), *(record.config.get(key) for key in comparison.SAME)]
    return f"{place.parent.name or place.name} {json.dumps(work, sort_keys=True)}"


def by(found: Iterable[Case], key: Callable[[Case], str]) -> list[tuple[str, ...]]:
    """A row for each group: how many, median ratio, errors of time, share that is near, errors of memory."""
    groups: dict[str, list[Case]] = defaultdict(list)
    for case in found:
        groups[key(case)].append(case)
    return [(name, *_summary(own)) for name, own in sorted(groups.items())]


def _summary(own: Sequence[Case]) -> tuple[str, ...]:
    errors, memory = [one.error for one in own], [one.memory_error for one in own if one.memory_error is not None]
    quick = [one.quick_ratio for one in own if one.quick_ratio is not None]
    near = [sum(error <= most for error in errors) / len(errors) for most in NEAR]
    return (
        str(len(own)),
        f"{statistics.median(one.ratio for one in own):.2f}",
        f"{statistics.median(quick):.2f}" if quick else UNKNOWN,
        f"{statistics.median(errors):.0%}",
        f"{max(errors):.0%}",
        *(f"{share:.0%}" for share in near),
        f"{statistics.median(memory):.1%}" if memory else UNKNOWN,
        f"{max(memory):.1%}" if memory else UNKNOWN,
    )


TITLES = (
    "runs",
    "predicted\n/ measured",
    "/ quick\nsteps",
    "error of\ntime: median",
    "worst",
    *(f"within\n{most:.0%}" for most in NEAR),
    "of memory:\nmedian",
    "worst",
)


def length(case: Case) -> str:
    """The class of a run by its measured step: short ones are mostly the host's."""
    return next((name for name, least_s in LENGTHS.items() if case.measured_s >= least_s), SHORT)


MISS_TITLES = (
    *("worst predictions", "engine", "model", "measured", "predicted"),
    *("predicted\n/ measured", "memory\nfurthest off"),
)
ORDER_TITLES = ("contest", "runs", "Kendall's\ntau", "predicted best\n/ measured best")


def misses(found: Iterable[Case]) -> list[tuple[str, ...]]:
    """A row for each of the worst predictions of a step time."""
    worst = sorted(found, key=lambda one: -one.error)[:MISSES]
    names = [(one.id, one.engine, one.model, seconds(one.measured_s), seconds(one.predicted_s)) for one in worst]
    return [
        (*own, f"{one.ratio:.2f}", UNKNOWN if one.memory_ratio is None else f"{one.memory_ratio:.2f}")
        for own, one in zip(names, worst, strict=True)
    ]


def orders(found: Iterable[Case]) -> list[tuple[str, ...]]:
    """A row for each contest."""
    return [
        (one.name, str(len(one.cases)), UNKNOWN if one.tau is None else f"{one.tau:.2f}", f"{one.regret:.2f}")
        for one in contests(found)
    ]


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
    found = ledger(loaded.records)
    if not found.cases:
        print("no measured record with a prediction", file=sys.stderr)
        return EXIT_CODES["infeasible"]
    console = Console()
    _show(found.cases, console if console.is_terminal else Console(width=140))
    for line in [*sources(found), *(f"skipped {one.place}: {one.why}" for one in loaded.skipped)]:
        console.print(Text(line), soft_wrap=True)
    return 0


def sources(found: Ledger) -> list[str]:
    """Lines that say whose the predictions are, and which records are left out, each with its reason."""
    again = sum(not case.stored for case in found.cases)
    lines = [f"{again} of {len(found.cases)} predictions are of today's simulator"]
    lines += [f"prediction of the record, {text}" for text in _counted((case.id, case.stored) for case in found.cases)]
    return [*lines, *(f"left out, {text}" for text in _counted((one.id, one.why) for one in found.left_out))]


def _counted(reasons: Iterable[tuple[str, str]]) -> list[str]:
    """ "3: why (ID, ID, ID)" for each reason; of many the first ones."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name, why in reasons:
        if why:
            groups[why].append(name)
    return [
        f"{len(own)}: {why} ({', '.join(own[:SHOWN])}{', ...' if len(own) > SHOWN else ''})"
        for why, own in sorted(groups.items(), key=lambda item: -len(item[1]))
    ]


def _show(found: Sequence[Case], console: Console) -> None:
    console.print(_table(MISS_TITLES, misses(found), 3))
    console.print(_table(("engine", *TITLES), [*by(found, lambda one: one.engine), *by(found, lambda _: "all")], 1))
    console.print(_table(("model", *TITLES), by(found, lambda one: one.model), 1))
    console.print(_table(("steps of", *TITLES), by(found, length), 1))
    if held := orders(found):
        console.print(_table(ORDER_TITLES, held, 1))


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
