"""An archive of a sweep, SWEEP.jsonl.gz: gzipped JSON lines, each a record with what tables need of its run's files.

Archives of earlier versions, SWEEP.json, are read, too: what all records share is there once,

{"common": {...},       what all records have in common
 "groups": [
  {"common": {...},     what the records of one group have in common
   "records": [
    {...},              what differs
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from analysis import run_artifacts
from harness.core import files
from harness.core.record import RunRecord
from harness.core.serialization import SchemaError, parse

SUFFIX, EARLIER_SUFFIX = ".jsonl.gz", ".json"
LEFT_OUT = (
    "manifest.command",
    "manifest.devices",
    "manifest.simulation.profile",
    "plan.layouts",
    "plan.pattern",
    "plan.predicted",
    "plan.traffic",
    "predicted.fixed_bytes",
    "predicted.memory_limit_bytes",
    "predicted.pattern_memory_bytes",
    "predicted.stored_bytes",
    "predicted.tasks_s",
    "trace",
)
"""Fields that no table reads: overrides give the command, `predicted` is the plan's, patterns and traces are large."""
LEFT_OUT_BY_MODE = {
    "plan": (
        "manifest.simulation.cluster",
        "plan.stages.first",
        "plan.stages.last",
        "predicted.bubble_fraction",
        "predicted.bytes_sent",
        "predicted.peak_memory_bytes",
        "predicted.utilization",
    ),
    "simulate": ("predicted.products",),
}
KEPT = ("plan.layouts", "plan.pattern", "plan.traffic")
"""Fields of runs that were measured that stay: with the profile they are what `analysis.predict_again` needs."""
"""Fields of records of one mode that are left out, too: a sweep has thousands of plans."""
Document = dict[str, Any]
Reading = tuple[str, Callable[[], Any]]
"""The place of a record, and what reads its JSON."""


def is_archive(path: Path) -> bool:
    """Whether there is a file that is named like an archive."""
    return path.name.endswith((SUFFIX, EARLIER_SUFFIX)) and os.path.isfile(path)


def document(record: RunRecord) -> Document:
    """The record as an archive has it: with what tables need of its files, without `LEFT_OUT`, origin and `out`; of a
    measured run its profile, too."""
    measured = record.source == "measured" and record.status == "ok"
    archived = (run_artifacts.with_profile if measured else run_artifacts.whole)(record).to_json()
    manifest = archived["manifest"]
    del manifest[run_artifacts.ORIGIN]
    manifest["overrides"] = [text for text in manifest.get("overrides", []) if not text.startswith("out=")]
    kept = KEPT if measured else ()
    for path in (
        *(path for path in LEFT_OUT if path not in kept),
        *LEFT_OUT_BY_MODE.get(record.config.get("mode", ""), ()),
    ):
        _drop(archived, path.split("."))
    return archived


def as_bytes(documents: Sequence[Document]) -> bytes:
    """The archive of these records, the same bytes for the same records: keys are sorted, and no time is stored."""
    lines = (json.dumps(document, sort_keys=True, separators=(",", ":")) for document in documents)
    return gzip.compress("".join(f"{line}\n" for line in lines).encode(), mtime=0)


def readings(path: Path) -> Iterator[Reading]:
    """The place of each record of an archive, and what reads it. Raises SchemaError for a file that is no archive."""
    try:
        data = files.read_bytes(path)
        lines = gzip.decompress(data).splitlines() if path.name.endswith(SUFFIX) else _earlier_lines(data)
    except (OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, zlib.error) as error:
        name = path.name.partition(".")[0]
        raise SchemaError(f"is no archive of records: {error!r}   -> python -m analysis.pack {name}") from error
    for number, line in enumerate(lines, start=1):
        yield f"{path} record {number}", lambda line=line: parse(line)  # type: ignore[misc]


def _drop(place: Any, path: Sequence[str]) -> None:
    """Remove what is at a path, of each item of a list."""
    if isinstance(place, list):
        for item in place:
            _drop(item, path)
    elif isinstance(place, dict) and len(path) > 1:
        _drop(place.get(path[0]), path[1:])
    elif isinstance(place, dict):
        place.pop(path[0], None)


def _earlier_lines(data: bytes) -> list[bytes]:
    """The lines that an archive of an earlier version has today."""
    archive = parse(data)
    lines = []
    for group in archive["groups"]:
        for rest in group["records"]:
            record = _merged(archive["common"], _merged(group["common"], rest))
            pairs = record["manifest"].get("overrides", {})
            overrides = [key if value is None else f"{key}={value}" for key, value in pairs.items()]
            record["manifest"]["overrides"] = overrides
            lines.append(json.dumps(record).encode())
    return lines


def _merged(common: Mapping[str, Any], rest: Mapping[str, Any]) -> Document:
    """{"a": {"b": 1}}, {"a": {"c": 2}}   ->   {"a": {"b": 1, "c": 2}}"""
    merged = {**common, **rest}
    for key in common:
        if isinstance(common[key], dict):
            merged[key] = _merged(common[key], rest.get(key, {}))
    return merged
