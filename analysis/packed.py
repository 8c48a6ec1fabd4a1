"""The text of a pack: a sweep's records as one small JSON document, from which tables can be made.

{"common": {...},       what all records have in common
 "left_out": [...],     what they have no more
 "groups": [
  {"common": {...},     what those of one status, engine, planner and model have in common
   "records": [
    {...},              what differs (`analysis.folded`)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from analysis import beside
from analysis.folded import Document, fold, unfold
from harness.record import RunRecord
from harness.serial import SchemaError

LEFT_OUT = (
    "manifest.command", "manifest.devices", "manifest.simulation.profile", "plan.layouts", "plan.pattern",
    "plan.predicted", "plan.traffic", "predicted.fixed_bytes", "predicted.memory_limit_bytes",
    "predicted.pattern_memory_bytes", "predicted.stored_bytes", "predicted.tasks_s", "trace",
)  # fmt: skip
"""What no table reads: overrides tell the command, `predicted` is the plan's, patterns and traces are large."""
LEFT_OUT_BY_MODE = {
    "plan": (
        "manifest.simulation.cluster", "plan.stages.first", "plan.stages.last", "predicted.bubble_fraction",
        "predicted.bytes_sent", "predicted.peak_memory_bytes", "predicted.utilization",
    ),
    "simulate": ("predicted.products",),
}  # fmt: skip
"""What moreover is left out with a mode: of plans a sweep has thousands."""


def document(record: RunRecord) -> Document:
    """The record as a pack has it: with what tables need of its files, without `LEFT_OUT` and its origin.

    Overrides are {key: value}, null for ~key.
    """
    found = beside.whole(record).to_json()
    del found["manifest"][beside.ORIGIN]
    pairs = [text.partition("=") for text in found["manifest"].get("overrides", []) if not text.startswith("out=")]
    found["manifest"]["overrides"] = {key: value if equals else None for key, equals, value in pairs}
    for path in (*LEFT_OUT, *LEFT_OUT_BY_MODE.get(record.config.get("mode", ""), ())):
        _drop(found, path.split("."))
    return found


def as_text(documents: Sequence[Document]) -> str:
    """JSON with sorted keys: `common` indented, a line for each record and for what a group shares."""
    common, rests = fold(documents)
    groups: dict[str, list[Document]] = {}
    for document, rest in zip(documents, rests, strict=True):
        groups.setdefault(_kind(document), []).append(rest)
    left_out = {"left_out": LEFT_OUT, "left_out_by_mode": LEFT_OUT_BY_MODE}
    head = json.dumps({"common": common, **left_out}, indent=1, sort_keys=True).removesuffix("\n}")
    told = ",\n  ".join(_group(groups[kind]) for kind in sorted(groups))
    return f'{head},\n "groups": [\n  {told}\n ]\n}}\n'


def readings(path: Path) -> Iterator[tuple[str, Callable[[], Document]]]:
    """Where each record of a pack is, and what reads it. Raises SchemaError for a file that is no pack."""
    try:
        pack = json.loads(path.read_bytes())
        common = pack["common"]
        groups = [(group["common"], group["records"]) for group in pack["groups"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SchemaError(f"is no pack: {error!r}   -> python -m analysis.pack {path.stem}") from error
    rests = ((shared, rest) for shared, records in groups for rest in records)
    for number, (shared, rest) in enumerate(rests, start=1):
        yield f"{path} record {number}", lambda parts=(common, shared, rest): _unpacked(*parts)  # type: ignore[misc]


def _unpacked(common: Document, shared: Document, rest: Document) -> Document:
    found = unfold(common, unfold(shared, rest))
    pairs = found["manifest"].get("overrides", {})
    found["manifest"]["overrides"] = [key if value is None else f"{key}={value}" for key, value in pairs.items()]
    return found


def _kind(document: Document) -> str:
    """What tells a group."""
    config = document["config"]
    names = [(config.get(group) or {}).get("name") for group in ("engine", "model")]
    return str((document["status"], *names, config.get("planner"), config.get("profile")))


def _drop(place: Any, path: Sequence[str]) -> None:
    """Remove what is at a path, of each item of a list."""
    if isinstance(place, list):
        for item in place:
            _drop(item, path)
    elif isinstance(place, dict) and len(path) > 1:
        _drop(place.get(path[0]), path[1:])
    elif isinstance(place, dict):
        place.pop(path[0], None)


def _group(rests: Sequence[Document]) -> str:
    shared, own = fold(rests)
    lines = ",\n    ".join(map(_line, own))
    return f'{{"common":{_line(shared)},\n   "records":[\n    {lines}]}}'


def _line(document: Document) -> str:
    return json.dumps(document, sort_keys=True, separators=(",", ":"))
