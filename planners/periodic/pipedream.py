"""PipeDream's partitioner: balanced consecutive stages under an estimate of memory that is its own (MadPipe, 5.1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from harness.plan import Stage
from planners.periodic.chain import Chain
from planners.periodic.spans import NEVER, Spans, Whole

Estimate = Literal["optimizer", "position", "devices", "none"]


def partition(chain: Chain, devices: int, estimate: Estimate) -> tuple[int, tuple[Stage, ...]] | None:
    """The least possible ticks of the busiest stage or link, and stages that have it; None if none fit the estimate.

    At most `devices` stages. Of equal partitions it has the fewest stages, then the longest first stage, and behind it
    the best partition of the rest, chosen likewise. What is held to `chain.memory`, of a stage at `position` 0, 1 and
    so on:

    | estimate  | bytes                                                                                            |
    |-----------|--------------------------------------------------------------------------------------------------|
    | optimizer | (activations + state) x (devices - 1 - position), as in PipeDream's public optimizer             |
    | position  | those of a device (`Chain.held`) that stores as many micro-batches as there are stages from it on |
    | devices   | those of a device that stores as many micro-batches as there are devices                         |
    | none      | nothing                                                                                          |
    """
    found = None
    for count in range(1, min(devices, chain.layers) + 1):
        of_count = _into(chain, count, devices, estimate)
        if of_count is not None and (found is None or of_count[0] < found[0]):
            found = of_count
    return found


def least_memory(chain: Chain, devices: int, estimate: Estimate) -> int:
    """The fewest bytes of a device with which the estimate allows any partition."""
    spans, found = Spans.of(chain), NEVER
    for count in range(1, min(devices, chain.layers) + 1):
        largest = np.full(chain.layers + 1, NEVER, dtype=np.int64)
        largest[-1] = 0
        for position in range(count - 1, -1, -1):
            of_span = np.maximum(_estimated(spans, estimate, position, count, devices), largest[spans.end])
            largest = spans.least(of_span, len(largest))
        found = min(found, int(largest[0]))
    return found


def estimated(chain: Chain, stages: Sequence[Stage], devices: int, estimate: Estimate) -> list[int]:
    """What the estimate has for each stage of a partition, in bytes."""
    spans, found = Spans.of(chain), []
    for position, stage in enumerate(stages):
        own = spans.only((spans.first == stage.first) & (spans.end == stage.last + 1))
        found.append(int(_estimated(own, estimate, position, len(stages), devices)[0]))
    return found


def _into(chain: Chain, count: int, devices: int, estimate: Estimate) -> tuple[int, tuple[Stage, ...]] | None:
    """The best partition into exactly `count` stages, from the end of the chain."""
    spans = Spans.of(chain)
    busy = np.array([chain.busy(boundary) for boundary in range(chain.layers + 1)], dtype=np.int64)
    busiest = np.full(chain.layers + 1, NEVER, dtype=np.int64)
    busiest[-1] = 0
    steps = []
    for position in range(count - 1, -1, -1):
        ticks = np.maximum(spans.load, np.maximum(busiest, busy)[spans.end])
        ticks[_estimated(spans, estimate, position, count, devices) > chain.memory] = NEVER
        steps.append(ticks)
        busiest = spans.least(ticks, len(busiest))
    return (int(busiest[0]), spans.partition(steps)) if busiest[0] < NEVER else None


def _estimated(spans: Spans, estimate: Estimate, position: int, count: int, devices: int) -> Whole:
    """Bytes of each span, as the stage at `position` of `count`."""
    if estimate == "optimizer":
        return (spans.state + spans.stored) * (devices - 1 - position)
    if estimate == "none":
        return np.zeros_like(spans.stored)
    return spans.held(count - position if estimate == "position" else devices)
