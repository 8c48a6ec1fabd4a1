"""All results of `make bench` on this machine, in runs/bench.jsonl: a line for each benchmark that ran.

    {"name": "race", "time": "2026-11-25T17:00:00+00:00", "rounds": 9, "rows": [...], "manifest": {...}}

`python -m analysis.compare bench:1 bench:0` compares the last but one of each benchmark with the last. The file is
local: times of several machines say nothing about one another. analysis/results/bench.json has the committed results.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness.core.problem import CannotRun, Problem
from harness.core.record import RunRecord

HISTORY = Path("runs", "bench.jsonl")
PREFIX = "bench:"
MEDIAN_SPREAD = 1.253 / 1.349
"""Standard error of a median, in quartile distances / sqrt(rounds), of a normal distribution."""


def append(name: str, rounds: int, rows: Sequence[Mapping[str, Any]], manifest: Mapping[str, Any]) -> None:
    """Add the result of a benchmark."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    line = json.dumps({"name": name, "time": now, "rounds": rounds, "rows": list(rows), "manifest": manifest})
    HISTORY.parent.mkdir(parents=True, exist_ok=True)
    with HISTORY.open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def load(source: str) -> list[RunRecord]:
    """The entries of bench:N, those of each benchmark's last run but N, as records: a row is a point.

    Raises CannotRun for a source that is none, and where no benchmark has run so often.
    """
    back = source.removeprefix(PREFIX)
    if not back.isdecimal():
        message = "is no result of make bench: bench:0 is the last one, bench:1 the one before"
        raise CannotRun([Problem(source, None, message)], "this comparison")
    runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in HISTORY.read_text(encoding="utf-8").splitlines() if HISTORY.exists() else ():
        entry = json.loads(line)
        runs[entry["name"]].append(entry)
    chosen = [entries[-1 - int(back)] for entries in runs.values() if len(entries) > int(back)]
    if not chosen:
        most = max(map(len, runs.values()), default=0)
        message = f"is not there: {HISTORY} has {most} run{'s' * (most != 1)} of a benchmark at most"
        raise CannotRun([Problem(source, None, message, hint="make bench")], "this comparison")
    return [_record(entry, row) for entry in chosen for row in entry["rows"] if "step" in row]


def _record(entry: Mapping[str, Any], row: Mapping[str, Any]) -> RunRecord:
    named = {"benchmark": entry["name"], **{key: row[key] for key in ("model", "entry") if key in row}}
    memory = row.get("peak memory")
    metrics = {"step_time_s": row["step"], "peak_memory_bytes": None if memory is None else [memory]}
    low, high = row["quartiles"]
    spread = MEDIAN_SPREAD * (high - low) / math.sqrt(entry["rounds"]) / row["step"]
    manifest = {"overrides": [f"{key}={value}" for key, value in named.items()], "start_time": entry["time"]}
    name = "/".join([entry["time"], *map(str, named.values())])
    return RunRecord(name, "ok", metrics=metrics | {"step_spread": spread}, manifest=manifest)
