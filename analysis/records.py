"""Records of runs: from folders, from committed archives and from Weights & Biases, through one function.

    load(["runs/gpt_text", "analysis/results/records/madpipe_fig6.jsonl.gz", "wandb:runs/gpt_text", "wandb:me/regatta"])

The `manifest` of a loaded record names its source: "origin" is the folder of its files, the archive, or the W&B run.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from analysis import record_archive, run_artifacts
from analysis.record_archive import Reading
from analysis.run_artifacts import ORIGIN
from harness.config import record_shape
from harness.config.registry import ROOT
from harness.core import files
from harness.core.problem import Problem, refuse
from harness.core.record import RunRecord
from harness.core.run_files import RACE, RECORD
from harness.core.serialization import SchemaError, parse
from harness.run.stored_record import with_true_status
from harness.trackers.wandb import FILES

RESULTS = ("infeasible", "ok")
"""Statuses of runs with a result, the better one last: that nothing fits is a result, too."""
WANDB = "wandb:"
_WANDB_TIMEOUT_S = 30
Key = TypeVar("Key")
Check = Callable[[RunRecord], None]


@dataclass(frozen=True)
class Skipped:
    """A place without a record of today's schema, and why."""

    place: str
    why: str


@dataclass(frozen=True)
class Loaded:
    """The records, the oldest first, how many each source has, and what was skipped."""

    records: tuple[RunRecord, ...]
    counts: dict[str, int]
    skipped: tuple[Skipped, ...]

    def __repr__(self) -> str:
        """Loaded(2 records: 2 from runs/mine; skipped 0)"""
        return f"Loaded({self.messages()[0]}; skipped {len(self.skipped)})"

    def messages(self) -> list[str]:
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
        """Yield the number of records of a source, or of several sources in one folder."""
        groups: dict[str, list[str]] = {}
        for source in filter(self.counts.get, self.counts):
            groups.setdefault(str(Path(source).parent), []).append(source)
        for folder, sources in groups.items():
            place = (sources[0] if len(sources) == 1 else folder).removeprefix(f"{ROOT}/")
            several = f" ({len(sources)} of its files and folders)" if len(sources) > 1 else ""
            yield f"{sum(self.counts[source] for source in sources)} from {place}{several}"


def load(sources: Iterable[Path | str], also: Check = lambda record: None) -> Loaded:
    """The records in folders and right below them, in archives (*.jsonl.gz), and of W&B (wandb:FOLDER,
    wandb:ENTITY/PROJECT).

    A file that is no record is skipped, as is a record with broken fields, one of which `also` raises SchemaError, and
    W&B if it cannot be reached. A run that is in several sources counts in the first one. Raises CannotRun for all
    files and folders that do not exist, at once.
    """
    names = [str(source) for source in sources]
    refuse([problem for name in names if (problem := _missing(name))], "this analysis")
    loaded: list[RunRecord] = []
    counts: dict[str, int] = {}
    skipped: list[Skipped] = []
    for name in names:
        records, skipped_here = _of_source(name, also)
        known = {record.id for record in loaded}
        new = [record for record in records if record.id not in known]
        counts[name] = len(new)
        loaded += new
        skipped += skipped_here
    return Loaded(tuple(sorted(loaded, key=_age)), counts, tuple(skipped))


def newest(records: Iterable[RunRecord], key: Callable[[RunRecord], Key]) -> dict[Key, RunRecord]:
    """Return for each key the newest record that is ok; if none is, the newest with a result, or the newest of all.

    `records` are in order, the oldest first.
    """
    newest_of: dict[Key, RunRecord] = {}
    for record in records:
        of_key = newest_of.get(key(record))
        if of_key is None or _rank(record) >= _rank(of_key):
            newest_of[key(record)] = record
    return newest_of


def point_of(record: RunRecord) -> frozenset[str]:
    """Return the identity of a point: its overrides without the place of its files; a run without any is its own
    point."""
    return key_of(record.manifest.get("overrides", [])) or frozenset([record.id])


def key_of(overrides: Iterable[str]) -> frozenset[str]:
    """`point_of` a point's overrides; its tracker does not count."""
    return frozenset(text for text in overrides if not text.startswith(("out=", "tracker")))


def sweep_command(name: str) -> str:
    """The command that makes the records of a sweep; empty for a name that is no sweep's.

    `name` is SWEEP, or SWEEP-SCALE where sweeps/SWEEP.yaml has scales: a folder in runs/, or an archive.
    """
    sweep, _, scale = name.partition(".")[0].partition("-")
    if not os.path.isfile(ROOT / "sweeps" / f"{sweep}.yaml"):
        return ""
    return f"python run.py -m +sweeps={sweep}" + (f" scale={scale}" if scale else "")


def in_folder(folder: Path) -> list[Path]:
    """The record.json of a run, or those of the runs of a sweep, a race, or several races."""
    races = [race.parent for race in (*folder.glob(f"*/{RACE}"), *folder.glob(f"*/*/{RACE}"))]
    found = [path for place in (folder, *races) for path in place.glob(f"*/{RECORD}")]
    found = [path for path in found if not path.parent.name.startswith(".")]
    return sorted([*folder.glob(RECORD), *found])


def _rank(record: RunRecord) -> int:
    return RESULTS.index(record.status) if record.status in RESULTS else -1


def _age(record: RunRecord) -> tuple[str, str]:
    return record.manifest.get("start_time", ""), record.id


def _missing(name: str) -> Problem | None:
    """The problem with a source that does not exist, and a hint at what makes it."""
    path = Path(name)
    if name.startswith(WANDB):
        place = name.removeprefix(WANDB)
        may_be_project = not (place.startswith(("/", ".", "~")) or place.count("/") > 1)
        exists = os.path.isdir(place) or may_be_project
        hint = "wandb:FOLDER, or wandb:ENTITY/PROJECT"
        return None if exists else Problem(name, None, "is no folder", hint=hint)
    exists = os.path.isdir(path) or record_archive.is_archive(path)
    return None if exists else Problem(name, None, "does not exist", hint=sweep_command(path.name))


def _of_source(name: str, also: Check) -> tuple[list[RunRecord], list[Skipped]]:
    records: list[RunRecord] = []
    skipped: list[Skipped] = []
    try:
        folder = os.path.isdir(name)
        for place, read in _readings(name):
            try:
                record = _record(place, read, also)
                records.append(with_true_status(record, Path(place)) if folder else record)
            except SchemaError as error:
                skipped.append(Skipped(place, str(error)))
    except SchemaError as error:
        skipped.append(Skipped(name, str(error)))
    if not records and not skipped:
        command = sweep_command(Path(name).name)
        skipped.append(Skipped(name, "has no records" + (f"   -> {command}" if command else "")))
    return records, skipped


def _readings(name: str) -> Iterator[Reading]:
    if name.startswith(WANDB):
        place = name.removeprefix(WANDB)
        yield from _wandb_offline(Path(place)) if os.path.isdir(place) else _wandb_online(place)
    elif os.path.isdir(name):
        for path in in_folder(Path(name)):
            yield str(path.parent), lambda path=path: parse(files.read_bytes(path))  # type: ignore[misc]
    else:
        yield from record_archive.readings(Path(name))


def _wandb_offline(folder: Path) -> Iterator[Reading]:
    """The runs in or below a folder that `harness.trackers.wandb` has written."""
    for kept in sorted(folder.rglob("*run-*/files")):
        yield str(kept), lambda path=kept / RECORD: parse(files.read_bytes(path))  # type: ignore[misc]


def _wandb_online(project: str) -> Iterator[Reading]:
    """The runs of ENTITY/PROJECT. Raises SchemaError if W&B cannot be reached."""
    import wandb

    try:
        runs = list(wandb.Api(timeout=_WANDB_TIMEOUT_S).runs(project))
    except Exception as error:
        message = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise SchemaError(f"W&B cannot be reached: {message}   -> wandb login, or a folder: {WANDB}FOLDER") from error
    for run in runs:
        yield WANDB + "/".join(run.path), lambda run=run: _wandb_downloaded(run)  # type: ignore[misc]


def _wandb_downloaded(run: Any) -> Any:
    """A run's record as JSON, with what tables need of its other files."""
    with tempfile.TemporaryDirectory() as folder:
        for file in run.files(names=list(FILES)):  # a simulated run has no steps
            file.download(root=folder, exist_ok=True)
        record = RunRecord.load(Path(folder) / RECORD)
        record.manifest[ORIGIN] = folder
        return run_artifacts.whole(record).to_json()


def _record(place: str, read: Callable[[], Any], also: Check) -> RunRecord:
    """Raises SchemaError for anything else."""
    try:
        record = RunRecord.from_json(read())
        record_shape.check_types(record)
        also(record)
    except SchemaError:
        raise
    except Exception as error:
        raise SchemaError(f"cannot be read: {error}") from error
    record.manifest[ORIGIN] = place
    return record
