"""What tables need of the files beside a record. Where these are not at hand, as in a pack, the metrics have it.

losses       of each step, warm-up included
in_flight    the most micro-batches that any stage has begun and not ended at once
parameters   of the whole model, each counted once
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.memory import DTYPE_BYTES
from harness.profile import ModelProfile
from harness.record import RunRecord
from harness.trace import Trace

ORIGIN = "origin"
"""The entry of a loaded record's manifest that says where it is from: for a run's folder, where its files lie."""


def losses(record: RunRecord) -> list[float]:
    return list(_value(record, "losses"))


def in_flight(record: RunRecord) -> int:
    return int(_value(record, "in_flight"))


def parameters(record: RunRecord) -> int:
    return int(_value(record, "parameters"))


def whole(record: RunRecord) -> RunRecord:
    """The record with those of the values among its metrics whose files are there, and whole."""
    folder, found = Path(record.manifest[ORIGIN]), {}
    for name, (file, read) in _VALUES.items():
        with suppress(OSError, EOFError, ValueError):  # not there, or cut off
            found[name] = read(folder / file)
    return replace(record, metrics=record.metrics | found)


def of_steps(path: Path) -> tuple[float, ...]:
    """The losses in a run's metrics.jsonl. Raises ValueError where there are none."""
    try:
        found = tuple(float(json.loads(line)["loss"]) for line in path.read_text(encoding="utf-8").splitlines())
    except FileNotFoundError:
        raise ValueError(f"{path}   is not there   -> a run with mode=run") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}   cannot be read: {error}   -> run it again") from error
    if not found:
        raise ValueError(f"{path}   has 0 steps: its run ended before the first one   -> run it again")
    return found


def _value(record: RunRecord, name: str) -> Any:
    if name in record.metrics:
        return record.metrics[name]
    file, read = _VALUES[name]
    return read(Path(record.manifest[ORIGIN]) / file)


def _in_flight(path: Path) -> int:
    trace = Trace.load(path)
    return max((trace.in_flight(device) for device in {span.device for span in trace.spans}), default=0)


def _parameters(path: Path) -> int:
    profile = ModelProfile.load(path)
    return profile.parameter_bytes_of(range(len(profile.layers))) // DTYPE_BYTES[profile.dtype]


_VALUES: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "losses": ("metrics.jsonl", of_steps),
    "in_flight": ("trace.json.gz", _in_flight),
    "parameters": ("profile.json", _parameters),
}
"""The file that each is in, and how it is read."""
