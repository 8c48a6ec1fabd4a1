"""The results of `make bench`: the rows of each benchmark, in analysis/results/bench.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness.core import files

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "analysis" / "results" / "bench.json"
BASE = "single"
"""The entry to which all others are compared. Rows have the names of entries under the key "entry"."""
DEVICES = 2
"""Of every entry of the race but for `BASE`."""


def load() -> dict[str, Any]:
    """Return "rows" and "manifest" by benchmark; empty before the first one."""
    results: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    return results


def save(results: dict[str, Any]) -> None:
    files.write_text(RESULTS, json.dumps(results, indent=1) + "\n")
