"""Records of runs: from folders, from committed packs and from Weights & Biases, through one function.

    load(["runs/gpt_text", "analysis/results/records/madpipe_fig6.json", "wandb:runs/gpt_text", "wandb:me/regatta"])

A loaded record's `manifest` says where it is from: "origin" is the folder of its files, the pack, or the W&B run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from analysis import packed, sweeps, wandb_runs
from analysis.beside import ORIGIN
from analysis.wandb_runs import Reading
from harness.problem import CannotRun, Problem
from harness.record import RunRecord
from harness.registry import ROOT
from harness.run_files import RECORD
from harness.serial import SchemaError

RESULTS = ("infeasible", "ok")
"""Statuses of runs with a result, the better one last: that nothing fits is a result, too."""
Key = TypeVar("Key")


@dataclass(frozen=True)
class Skipped:
    """What is no record of today's schema, and why."""

    place: str
    why: str


@dataclass(frozen=True)
class Loaded:
    """The records, the oldest first, how many are from where, and what was skipped."""

    records: tuple[RunRecord, ...]
    counts: dict[str, int]
    skipped: tuple[Skipped, ...]

    def __repr__(self) -> str:
        """Loaded(2 records: 2 from runs/mine; skipped 0)"""
        return f"Loaded({self.told()[0]}; skipped {len(self.skipped)})"

    def told(self) -> list[str]:
        """Lines for the user: sources, what was skipped, and points with several records."""
        lines = [f"{len(self.records)} records" + (f": {', '.join(self._sources())}" if self.records else "")]
        if self.skipped:
            lines.append(f"skipped {len(self.skipped)}:")
            lines += [f"  {one.place}   {one.why}" for one in self.skipped]
        several = len(self.records) - len(newest(self.records, point_of))
        if several:
            lines.append(f"of points with several records the newest ok one counts; records that do not: {several}")
        return lines

    def _sources(self) -> Iterator[str]:
        """How many are from where: from a source, or from several in one folder."""
        groups: dict[str, list[str]] = {}
        for source in filter(self.counts.get, self.counts):
            groups.setdefault(str(Path(source).parent), []).append(source)
        for folder, sources in groups.items():
            place = (sources[0] if len(sources) == 1 else folder).removeprefix(f"{ROOT}/")
            several = f" ({len(sources)} of its files and folders)" if len(sources) > 1 else ""
            yield f"{sum(self.counts[source] for source in sources)} from {place}{several}"


def load(sources: Iterable[Path | str]) -> Loaded:
    """The records in folders and right below them, in packs (*.json), and of W&B (wandb:FOLDER, wandb:ENTITY/PROJECT).

    What is no record is skipped, and so is W&B where it cannot be reached. Of a run that is in several sources the
    first one counts. Raises CannotRun for files and folders that are not there, all at once.
    """
    named = [str(source) for source in sources]
    gone = [Problem(name, *why) for name in named if (why := _gone(name))]
    if gone:
        raise CannotRun(gone, "this analysis")
    found: list[RunRecord] = []
    counts: dict[str, int] = {}
    skipped: list[Skipped] = []
    for name in named:
        records, without = _of_source(name)
        known = {record.id for record in found}
        new = [record for record in records if record.id not in known]
        counts[name] = len(new)
        found += new
        skipped += without
    return Loaded(tuple(sorted(found, key=_age)), counts, tuple(skipped))


def newest(records: Iterable[RunRecord], key: Callable[[RunRecord], Key]) -> dict[Key, RunRecord]:
    """Of several records of a key the newest one that is ok; where none is, the newest with a result, or at all.

    `records` are in order, the oldest first.
    """
    found: dict[Key, RunRecord] = {}
    for record in records:
        own = key(record)
        if own not in found or _rank(record) >= _rank(found[own]):
            found[own] = record
    return found


def point_of(record: RunRecord) -> frozenset[str]:
    """What tells a point: its overrides, but for where its files lie; a run without any is a point of its own."""
    return key_of(record.manifest.get("overrides", [])) or frozenset([record.id])


def key_of(overrides: Iterable[str]) -> frozenset[str]:
    """`point_of` a point's overrides; who is told of it does not count."""
    return frozenset(text for text in overrides if not text.startswith(("out=", "tracker")))


def in_folder(folder: Path) -> list[Path]:
    """The record.json of a run, or those of a sweep's runs."""
    return sorted([*folder.glob(RECORD), *folder.glob(f"*/{RECORD}")])


def _rank(record: RunRecord) -> int:
    return RESULTS.index(record.status) if record.status in RESULTS else -1


def _age(record: RunRecord) -> tuple[str, str]:
    return record.manifest.get("start_time", ""), record.id


def _gone(name: str) -> tuple[str, str] | None:
    """What is wrong with a source that is not there, and what makes it."""
    path = Path(name)
    if name.startswith(wandb_runs.PREFIX):
        place = name.removeprefix(wandb_runs.PREFIX)
        return None if wandb_runs.can_be(place) else ("is no folder", "wandb:FOLDER, or wandb:ENTITY/PROJECT")
    there = path.is_dir() or (path.suffix == ".json" and path.is_file())
    return None if there else ("is not there", sweeps.command(path.stem))


def _of_source(name: str) -> tuple[list[RunRecord], list[Skipped]]:
    records: list[RunRecord] = []
    skipped: list[Skipped] = []
    try:
        for place, read in _readings(name):
            try:
                records.append(_record(place, read))
            except SchemaError as error:
                skipped.append(Skipped(place, str(error)))
    except SchemaError as error:
        skipped.append(Skipped(name, str(error)))
    if not records and not skipped:
        command = sweeps.command(Path(name).stem)
        skipped.append(Skipped(name, "has no records" + (f"   -> {command}" if command else "")))
    return records, skipped


def _readings(name: str) -> Iterator[Reading]:
    if name.startswith(wandb_runs.PREFIX):
        yield from wandb_runs.readings(name.removeprefix(wandb_runs.PREFIX))
    elif Path(name).is_dir():
        for path in in_folder(Path(name)):
            yield str(path.parent), lambda path=path: json.loads(path.read_bytes())  # type: ignore[misc]
    else:
        yield from packed.readings(Path(name))


def _record(place: str, read: Callable[[], Any]) -> RunRecord:
    """Raises SchemaError for what is none."""
    try:
        record = RunRecord.from_json(read())
    except SchemaError:
        raise
    except Exception as error:
        raise SchemaError(f"cannot be read: {error}") from error
    record.manifest[ORIGIN] = place
    return record
