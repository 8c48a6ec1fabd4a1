"""Timelines of several runs, one below the other, on the same axis:

    python -m analysis.timelines RUN_DIR [RUN_DIR ...] --out FILE.png [--step K] [--titles "A,B"]

A sweep's folder stands for all its points, in the order in which they began. A measured run that has its simulation
beside it gets a second panel. So torchgpipe's Figure 7, what each component adds (section 4.1), is

    python run.py -m +sweeps=torchgpipe_table1 scale=paper
    python -m analysis.timelines runs/torchgpipe_table1-paper --out docs/figure7.png \\
        --titles "baseline,dep-x-x,dep-str-x,dep-str-ptl"
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from harness import request
from harness.record import RunRecord
from harness.runner import RECORD, SIMULATED
from harness.serial import SchemaError
from harness.timeline import draw_panels
from harness.trace import Trace

TOLD = ("out", "mode", "engine", "model", "cluster")
"""Keys that a title says anyway; the run's mode is its "measured" or "simulated"."""
ASIDE = ("tracker", "launch", "steps", "warmup")
"""Keys, and groups of keys, that the timeline of one step does not depend on."""


class NoTrace(ValueError):
    """A folder without the trace that is asked for; says what to do."""


@dataclass
class Run:
    """A run's folder with its record.

    `values` are its keys, {"batch.size": 16, "planner": "balance", ...}, without those that are null; `names` what it
    chose in each group of keys, {"model": "unet_5_64", ...}.
    """

    folder: Path
    record: RunRecord
    title: str = field(init=False)
    names: dict[str, str] = field(init=False)
    values: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        overrides, config = self.record.manifest.get("overrides", []), self.record.config
        self.title, self.names = self.record.id, {}
        if config:  # a run that could not even be composed has none
            composed = OmegaConf.create(config)
            self.title = request.title(composed, overrides)
            self.names = {
                key: group["name"] for key, group in config.items() if isinstance(group, dict) and "name" in group
            }
            self.names |= request.choices(composed, overrides)
        self.values = {key.removesuffix(".name"): value for key, value in _flat(config) if value is not None}

    def traces(self, step: int | None) -> Iterator[tuple[str, Trace]]:
        """("measured", its trace) and, where it is there, ("simulated", that of its prediction)."""
        record = self.record
        if record.trace is None:
            why = textwrap.shorten(f"status {record.status} {record.reason}", 160)
            raise NoTrace(f"{self.folder}   has no trace ({why})   -> a run with mode=run or mode=simulate")
        measured = record.source == "measured"
        yield record.source, _load(self.folder / record.trace, step if measured else None)
        if measured and (self.folder / SIMULATED).exists():
            yield "simulated", _load(self.folder / SIMULATED, None)


def main(arguments: Sequence[str]) -> int:
    """Returns 0, or 2 where nothing could be drawn; says why on stderr."""
    parser = argparse.ArgumentParser("python -m analysis.timelines", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE.png")
    parser.add_argument("--step", type=int, metavar="K", help="of the measured steps, from 0; the last one by default")
    parser.add_argument("--titles", type=_listed, metavar='"A,B"', help="one for each run, in place of what differs")
    options = parser.parse_args(arguments)
    try:
        drawn = panels(options.folders, options.step, options.titles)
        draw_panels(drawn, options.out)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{options.out}: {len(drawn)} timelines")
    return 0


def panels(
    folders: Sequence[Path], step: int | None = None, titles: Sequence[str] | None = None
) -> list[tuple[str, Trace]]:
    """(title, trace of one step) of every run; `titles` are those of the runs, in order.

    Raises `NoTrace` for all folders that have none, at once, and ValueError where `titles` are not as many as the runs.
    A sweep's points without a trace are told on stderr, as long as others have one.
    """
    found = _found(folders, step)
    runs = list({id(run): run for run, _, _ in found}.values())
    if titles is not None and len(titles) != len(runs):
        names = ",".join(run.folder.resolve().name for run in runs)
        raise ValueError(f'--titles   gives {len(titles)} for {len(runs)} runs   -> --titles "{names}"')
    of_run = dict(zip(map(id, runs), titles or _titles(runs), strict=True))
    return [(f"{of_run[id(run)]}, {source}", trace) for run, source, trace in found]


def _found(folders: Sequence[Path], step: int | None) -> list[tuple[Run, str, Trace]]:
    """The traces of all runs, with their sources."""
    found: list[tuple[Run, str, Trace]] = []
    missing: list[str] = []
    for folder in folders:
        try:
            runs = _runs(folder)
        except NoTrace as error:
            missing.append(str(error))
            continue
        of_folder, without = _traces(runs, step)
        if without and of_folder:
            print("\n".join(f"left out: {line}" for line in without), file=sys.stderr)
        else:
            missing += without
        found += of_folder
    if missing:
        raise NoTrace("\n".join(missing))
    return found


def _traces(runs: Sequence[Run], step: int | None) -> tuple[list[tuple[Run, str, Trace]], list[str]]:
    """The traces of all runs, and a line for each run that has none."""
    found, missing = [], []
    for run in runs:
        try:
            found += [(run, source, trace) for source, trace in run.traces(step)]
        except NoTrace as error:
            missing.append(str(error))
    return found, missing


def _runs(folder: Path) -> list[Run]:
    """The run in `folder`, or all runs of the sweep in it."""
    try:
        if (folder / RECORD).is_file():
            return [Run(folder, RunRecord.load(folder / RECORD))]
        runs = [Run(path.parent, RunRecord.load(path)) for path in folder.glob(f"*/{RECORD}")]
    except SchemaError as error:
        raise NoTrace(f"{folder}   holds a record that cannot be read: {error}") from error
    if not runs:
        what = "is neither a run's nor a sweep's: it has no" if folder.is_dir() else "is no folder with a"
        raise NoTrace(f"{folder}   {what} {RECORD}   -> the folder that run.py names, such as runs/NAME")
    return sorted(runs, key=lambda run: (run.record.manifest.get("start_time", ""), run.record.id))


def _load(path: Path, step: int | None) -> Trace:
    try:
        trace = Trace.load(path)
    except FileNotFoundError:
        raise NoTrace(f"{path}   is not there   -> run it again") from None
    except (OSError, EOFError, ValueError, KeyError, TypeError, zlib.error) as error:
        raise NoTrace(f"{path}   cannot be read: {error}   -> run it again") from error
    steps = sorted({span.step for span in trace.spans})
    if not steps:
        raise NoTrace(f"{path}   has no spans: its engine leaves none")
    if step is not None and step not in steps:
        raise NoTrace(f"{path}   has steps {steps[0]} to {steps[-1]}, not {step}   -> --step {steps[-1]}")
    return trace.only(steps[-1] if step is None else step)


def _titles(runs: Sequence[Run]) -> list[str]:
    """engine=gpipe model=unet_5_64 streams=true portals=false; runs that differ in nothing get their folder's name."""
    keys = differing(runs)
    lasts = [key.rpartition(".")[2] for key in keys]
    short = {key: last if lasts.count(last) == 1 else key for key, last in zip(keys, lasts, strict=True)}
    titles = [
        " ".join([run.title, *(f"{short[key]}={_shown(run.values[key])}" for key in keys if key in run.values)])
        for run in runs
    ]
    homes: dict[str, set[Path]] = defaultdict(set)
    for run, title in zip(runs, titles, strict=True):
        homes[title].add(run.folder)
    return [
        f"{title} ({run.folder.name})" if len(homes[title]) > 1 else title
        for run, title in zip(runs, titles, strict=True)
    ]


def differing(runs: Sequence[Run]) -> list[str]:
    """The keys in which those runs that have them differ, in order of appearance.

    A choice stands for the keys that it sets: those of model=unet_5_64 and model=unet_6_72 are not compared.
    """
    found = []
    for key in dict.fromkeys(key for run in runs for key in run.values):
        group = key.partition(".")[0]
        values: dict[str | None, set[str]] = defaultdict(set)
        for run in runs:
            if key in run.values:
                choice = run.names.get(group) if group not in (key, "engine") else None
                values[choice].add(_shown(run.values[key]))
        if key not in TOLD and group not in ASIDE and any(len(shown) > 1 for shown in values.values()):
            found.append(key)
    return found


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """("batch.size", 16) for {"batch": {"size": 16}}"""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _listed(text: str) -> list[str]:
    return [title.strip() for title in text.split(",")]


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
