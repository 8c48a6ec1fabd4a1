"""Notes below the closing table of a measured run: what made its figures what they are, and what to change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from omegaconf import OmegaConf

from harness.config import registry
from harness.core.problem import CannotRun
from harness.core.record import RunRecord
from harness.core.units import number
from harness.report import comparison

ROSE = 1.2
"""The last loss over the first one, from which on it is noted."""
FEW = 8
"""Measured steps from which on the last loss says more than that batches differ."""
SLOWER = 1.5
"""What computing took over what was predicted, from which on a lock that threads share is the likely reason."""
LOCKED = 0.1
"""The share that two threads lose to Python's lock with the model's layers alone, from which on it is the reason."""
SAME_STEPS = ("gpipe", "torchgpipe")
"""Engines whose updates are those of engine=pipeline."""
METERED = 2
"""Warm-up steps from which on memory is metered: in the first step optimizers have no state yet."""


def notes(record: RunRecord) -> list[str]:
    """A line for each, those that matter most first; none for a run that was not measured or did not end well."""
    if record.source != "measured" or record.status != "ok":
        return []
    busy = comparison.busy_machine([record])
    found = [busy] if busy else [*filter(None, [comparison.disturbed_machine([record])]), *shared_lock(record)]
    return [f"note: {text}" for text in (*found, *_rising_loss(record), *_no_memory(record))]


def shared_lock(record: RunRecord) -> Iterator[str]:
    """The note on a run whose devices wait for each other's Python.

    Devices of CPUs that are threads of one Python take turns in starting operations. Predictions have what layers
    lose by that, and not what the engine's own Python does."""
    parts, planned = record.metrics.get("parts_s") or {}, record.predicted.get("parts_s") or {}
    computing_s, predicted_s = parts.get("computing"), planned.get("computing")
    quickest_s, simulation = record.metrics.get("quickest_computing_s"), record.manifest.get("simulation") or {}
    if not quickest_s or (simulation.get("lock_share") or 0.0) >= LOCKED:
        measured_s, when = computing_s, ""
    else:  # what else a step took may be that of a slow moment
        measured_s, when = quickest_s, ", even in its quickest steps"
    if not measured_s or not predicted_s or measured_s < SLOWER * predicted_s or not _devices_are_threads(record):
        return
    if not comparison.is_predicted_here(record):
        return  # the prediction may be what is wrong
    instead = (
        "engine=pipeline, whose devices are processes, or " if record.config["engine"]["name"] in SAME_STEPS else ""
    )
    yield (
        f"computing took {measured_s / predicted_s:.1f} times as long as predicted{when}: on CPUs the devices of this "
        "engine are threads of one Python, of which one at a time can start an operation, and layers of short ones "
        "wait for it"
        f"   -> {instead}larger layers"
    )


def _devices_are_threads(record: RunRecord) -> bool:
    kinds, engine = set(record.manifest.get("devices") or ()), record.config.get("engine") or {}
    used = {stage.get("device") for stage in (record.plan or {}).get("stages", ())}
    if len(used) < 2 or kinds != {"cpu"} or ("engine", engine.get("name")) not in registry.schemas():
        return False
    with suppress(CannotRun):  # of a version with other keys
        return not registry.build("engine", OmegaConf.create(engine)).capabilities.multi_process
    return False


def _rising_loss(record: RunRecord) -> Iterator[str]:
    first, last = comparison.losses(record)
    steps = record.metrics.get("measured_steps") or 0
    if first is not None and last is not None and steps >= FEW and last > ROSE * max(first, comparison.TINY_LOSS):
        rate = (record.config.get("optimizer") or {}).get("lr")
        advice = f"   -> optimizer.lr={rate / 10:g}" if rate else ""
        yield f"the loss rose, from {number(first)} to {number(last)}{advice}"


def _no_memory(record: RunRecord) -> Iterator[str]:
    warmup = record.config.get("warmup")
    if not record.metrics.get("peak_memory_bytes") and warmup is not None and warmup < METERED:
        yield f"no peak memory: it is metered in the last of {METERED} or more warm-up steps   -> warmup={METERED}"
