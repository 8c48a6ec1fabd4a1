"""Runs in the folders that run.py leaves, and titles that distinguish them."""

from __future__ import annotations

import csv
import json
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from analysis import records
from analysis.run_artifacts import ORIGIN
from harness.config import overrides as config_overrides
from harness.config import record_shape
from harness.core.problem import Problem, ProblemError
from harness.core.record import RunRecord
from harness.core.run_files import RECORD, TABLE

IN_TITLE = ("out", "mode", "engine", "model", "cluster")
"""Keys that are in a title anyway; "measured" or "simulated" gives the mode."""
IGNORED = ("tracker", "launch", "steps", "warmup")
"""Keys, and groups of keys, that a comparison does not depend on."""
VAGUE = ("size",)
"""Last parts of keys that do not say alone what they are of: batch.size, model.size."""


RUN_FOLDER = "the folder that run.py names, such as runs/NAME"


class NoRun(ProblemError):
    """A folder without what is asked for; says what to do."""


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
            self.title = config_overrides.title(composed, overrides)
            self.names = {
                key: group["name"] for key, group in config.items() if isinstance(group, dict) and "name" in group
            }
            self.names |= config_overrides.choices(composed, overrides)
        self.values = {key.removesuffix(".name"): value for key, value in _flat(config) if value is not None}


def load(folder: Path) -> list[Run]:
    """The run in `folder`, or all runs of the sweep in it, the oldest first.

    Damaged records of a sweep are printed on stderr; raises `NoRun` if there is no other.
    """
    if not records.in_folder(folder):
        what = "is neither a run's nor a sweep's: it has no" if folder.is_dir() else "is no folder with a"
        raise NoRun(Problem(str(folder), None, f"{what} {RECORD}", hint=RUN_FOLDER))
    loaded = records.load([folder], record_shape.check_identified)
    if not loaded.records:
        skipped = "; ".join(f"{one.place}: {one.why}" for one in loaded.skipped)
        raise NoRun(Problem(str(folder), None, f"holds no record that can be read: {skipped}"))
    for one in loaded.skipped:
        print(f"skipped {one.place}   {one.why}", file=sys.stderr)
    return [Run(Path(record.manifest[ORIGIN]), record) for record in loaded.records]


def newest_points(folder: Path) -> frozenset[str] | None:
    """The points of the sweep that has ended last in a folder, by its table; None where there is none to read."""
    try:
        rows = csv.DictReader((folder / TABLE).read_text(encoding="utf-8").splitlines())
        return frozenset(row["id"] for row in rows)
    except (OSError, ValueError, KeyError, csv.Error):
        return None


def titled(runs: Sequence[Run], titles: Sequence[str] | None = None, without: Collection[str] = ()) -> list[str]:
    """`titles`, if they are given and as many as the runs (else ValueError); else texts that distinguish the runs.

    These do not have the words `without`, such as those that are `common` to all runs.
    """
    if titles is None:
        return _distinguishing(runs, without)
    if len(titles) != len(runs):
        names = ",".join(run.folder.resolve().name for run in runs)
        raise ProblemError(
            Problem("--titles", None, f"gives {len(titles)} for {len(runs)} runs", hint=f'--titles "{names}"')
        )
    return list(titles)


def common(runs: Sequence[Run]) -> list[str]:
    """The words that the titles of all runs share, ["model=unet", "cluster=flat"]; none where there is one run only."""
    first, *others = (run.title.split() for run in runs)
    return [word for word in first if all(word in other for other in others)] if others else []


def _distinguishing(runs: Sequence[Run], without: Collection[str]) -> list[str]:
    """engine=gpipe model=unet_5_64 streams=true portals=false; runs that differ in nothing get their folder's name."""
    keys = differing(runs)
    lasts = [key.rpartition(".")[2] for key in keys]
    short = {
        key: last if lasts.count(last) == 1 and last not in VAGUE else key
        for key, last in zip(keys, lasts, strict=True)
    }
    of_keys = [[f"{short[key]}={_shown(run.values[key])}" for key in keys if key in run.values] for run in runs]
    titles = [" ".join([*_except(without, run.title), *own]) for run, own in zip(runs, of_keys, strict=True)]
    homes: dict[str, set[Path]] = defaultdict(set)
    for run, title in zip(runs, titles, strict=True):
        homes[title].add(run.folder)
    return [
        _with_folder(title, run.folder.resolve().name) if len(homes[title]) > 1 or not title else title
        for run, title in zip(runs, titles, strict=True)
    ]


def _except(without: Collection[str], title: str) -> list[str]:
    return [word for word in title.split() if word not in without]


def _with_folder(title: str, folder: str) -> str:
    return f"{title} ({folder})" if title else folder


def differing(runs: Sequence[Run]) -> list[str]:
    """The keys in which those runs that have them differ, in order of appearance.

    A choice represents the keys that it sets: those of model=unet_5_64 and model=unet_6_72 are not compared.
    """
    found = []
    for key in dict.fromkeys(key for run in runs for key in run.values):
        group = key.partition(".")[0]
        values: dict[str | None, set[str]] = defaultdict(set)
        for run in runs:
            if key in run.values:
                choice = run.names.get(group) if group not in (key, "engine") else None
                values[choice].add(_shown(run.values[key]))
        if key not in IN_TITLE and group not in IGNORED and any(len(shown) > 1 for shown in values.values()):
            found.append(key)
    return found


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """("batch.size", 16) for {"batch": {"size": 16}}"""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def listed(text: str) -> list[str]:
    """Return the names in `--titles "A,B"`."""
    return [title.strip() for title in text.split(",")]


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
