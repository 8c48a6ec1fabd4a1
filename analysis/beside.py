"""What tables need of the files beside a record. Where these are not at hand, as in a pack, the metrics have it.

Where neither has it, reading it raises Lacking.

losses       of each step, warm-up included
in_flight    the most micro-batches that any stage has begun and not ended at once
parameters   of the whole model, each counted once
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from harness.memory import DTYPE_BYTES
from harness.profile import ModelProfile
from harness.record import RunRecord
from harness.trace import Trace

Kind = TypeVar("Kind")
Figure = TypeVar("Figure")
ORIGIN = "origin"
"""The entry of a loaded record's manifest that says where it is from: for a run's folder, where its files lie."""
UNREADABLE = (OSError, EOFError, ValueError, LookupError, TypeError, zlib.error)
"""What reading a file raises that is not there, cut off, or something else."""


class Lacking(ValueError):
    """What a record, or a file beside it, should have and has not, and what to do."""


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
        with suppress(*UNREADABLE):
            found[name] = read(folder / file)
    return replace(record, metrics=record.metrics | found)


def optional(read: Callable[[Kind], Figure], one: Kind) -> Figure | None:
    """What `read` has found of a record, or a row with one; None where that is lacking."""
    with suppress(Lacking):
        return read(one)
    return None


def lacking(every: Iterable[Kind], *reads: Callable[[Kind], Any]) -> list[str]:
    """A line that counts and names what cannot be read of these records, or rows; none where all can."""
    found = []
    for one, read in ((one, read) for one in every for read in reads):
        try:
            read(one)
        except Lacking as error:
            found.append(" ".join(str(error).split()))
    return [f"Empty for want of {len(found)} file{'s' * (len(found) > 1)}: {'; '.join(found)}."] if found else []


def of_steps(path: Path) -> tuple[float, ...]:
    """The losses in a run's metrics.jsonl. Raises Lacking where there are none."""
    try:
        found = tuple(float(json.loads(line)["loss"]) for line in path.read_text(encoding="utf-8").splitlines())
    except FileNotFoundError:
        raise Lacking(f"{path}   is not there   -> a run with mode=run") from None
    except (ValueError, KeyError, TypeError) as error:
        raise Lacking(f"{path}   cannot be read: {error}   -> run it again") from error
    if not found:
        raise Lacking(f"{path}   has 0 steps: its run ended before the first one   -> run it again")
    return found


def _value(record: RunRecord, name: str) -> Any:
    if name in record.metrics:
        return record.metrics[name]
    file, read = _VALUES[name]
    path = Path(record.manifest[ORIGIN]) / file
    try:
        return read(path)
    except Lacking:
        raise
    except UNREADABLE as error:
        why = "is not there" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        raise Lacking(f"{path}   {why}   -> run it again") from error


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
