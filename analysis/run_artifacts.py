"""Values that tables read from the files of a run. If these are not available, as in an archive, the metrics have them.

If neither has it, reading it raises MissingData.

losses       of each step, warm-up included
in_flight    the most micro-batches that any stage has started and not ended at once
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

from harness.core import files
from harness.core.memory_model import DTYPE_BYTES
from harness.core.model_profile import ModelProfile
from harness.core.problem import Problem, ProblemError
from harness.core.record import RunRecord
from harness.core.run_files import PROFILE
from harness.core.serialization import parse
from harness.core.trace import Trace

Kind = TypeVar("Kind")
Figure = TypeVar("Figure")
ORIGIN = "origin"
"""The entry of a loaded record's manifest that says where it is from: for a run, the folder of its files."""
UNREADABLE = (OSError, EOFError, ValueError, LookupError, TypeError, zlib.error)
"""Exceptions of reading a file that does not exist, is truncated, or has another format."""


class MissingData(ValueError):
    """A record, or a file of its run, lacks a value; the message says what to do."""


class MissingFile(ProblemError, MissingData):
    """A file of a run that lacks a value, with what to do."""


def losses(record: RunRecord) -> list[float]:
    return list(_value(record, "losses"))


def in_flight(record: RunRecord) -> int:
    return int(_value(record, "in_flight"))


def parameters(record: RunRecord) -> int:
    return int(_value(record, "parameters"))


def whole(record: RunRecord) -> RunRecord:
    """The record with those values in its metrics whose files exist and are whole."""
    folder, values = Path(record.manifest[ORIGIN]), {}
    for name, (file, read) in _VALUES.items():
        with suppress(*UNREADABLE):
            values[name] = read(folder / file)
    return replace(record, metrics=record.metrics | values)


def with_profile(record: RunRecord) -> RunRecord:
    """`whole`, with the profile of the model, from which today's simulator predicts the run again."""
    found = whole(record)
    with suppress(*UNREADABLE):
        profile = parse(files.read_bytes(Path(record.manifest[ORIGIN]) / PROFILE))
        return replace(found, metrics=found.metrics | {"profile": profile})
    return found


def optional(read: Callable[[Kind], Figure], one: Kind) -> Figure | None:
    """Return the result of `read` for a record, or for a row with one; None if the data is missing."""
    with suppress(MissingData):
        return read(one)
    return None


def missing_files(every: Iterable[Kind], *reads: Callable[[Kind], Any]) -> list[str]:
    """A line that counts and names what cannot be read of these records, or rows; none if all can be read."""
    reasons = []
    for one, read in ((one, read) for one in every for read in reads):
        try:
            read(one)
        except MissingData as error:
            reasons.append(" ".join(str(error).split()))
    count = len(reasons)
    return [f"Cells are empty for {count} unreadable file{'s' * (count > 1)}: {'; '.join(reasons)}."] if reasons else []


def step_losses(path: Path) -> tuple[float, ...]:
    """The losses in a run's metrics.jsonl. Raises MissingData if there are none."""
    try:
        losses = tuple(float(json.loads(line)["loss"]) for line in files.read_bytes(path).splitlines())
    except FileNotFoundError:
        raise MissingFile(Problem(str(path), None, "does not exist", hint="a run with mode=run")) from None
    except (ValueError, KeyError, TypeError) as error:
        raise MissingFile(Problem(str(path), None, f"cannot be read: {error}", hint="run it again")) from error
    if not losses:
        message = "has 0 steps: its run ended before the first one"
        raise MissingFile(Problem(str(path), None, message, hint="run it again"))
    return losses


def _value(record: RunRecord, name: str) -> Any:
    if name in record.metrics:
        return record.metrics[name]
    file, read = _VALUES[name]
    path = Path(record.manifest[ORIGIN]) / file
    try:
        return read(path)
    except MissingData:
        raise
    except UNREADABLE as error:
        why = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        raise MissingFile(Problem(str(path), None, why, hint="run it again")) from error


def _in_flight(path: Path) -> int:
    trace = Trace.load(path)
    return max((trace.in_flight(device) for device in {span.device for span in trace.spans}), default=0)


def _parameters(path: Path) -> int:
    profile = ModelProfile.load(path)
    return profile.parameter_bytes_of(range(len(profile.layers))) // DTYPE_BYTES[profile.dtype]


_VALUES: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "losses": ("metrics.jsonl", step_losses),
    "in_flight": ("trace.json.gz", _in_flight),
    "parameters": ("profile.json", _parameters),
}
"""The file that each is in, and how it is read."""
