"""PipeDream's partitioner: balanced consecutive stages under PipeDream's memory estimate (MadPipe, 5.1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from harness.core.plan import Stage
from planners.periodic.layer_ticks import Chain
from planners.periodic.stage_ranges import NEVER, Spans, Whole

Estimate = Literal["optimizer", "position", "devices", "none"]


def partition(chain: Chain, devices: int, estimate: Estimate) -> tuple[int, tuple[Stage, ...]] | None:
    """Returns the least ticks of the busiest stage or link, and stages that have it; None if none fit the estimate.

    At most `devices` stages. Of equal partitions it has the fewest stages, then the longest first stage, and after it
    the best partition of the rest, chosen in the same way. The bytes that are compared with `chain.memory`, for a stage
    at `position` 0, 1 and so on:

    | estimate  | bytes                                                                                            |
    |-----------|--------------------------------------------------------------------------------------------------|
    | optimizer | (activations + state) x (devices - 1 - position), as in PipeDream's public optimizer             |
    | position  | those of a device (`Chain.held`) that stores as many micro-batches as there are stages from it on |
    | devices   | those of a device that stores as many micro-batches as there are devices                         |
    | none      | nothing                                                                                          |
    """
    best = None
    for count in range(1, min(devices, chain.layers) + 1):
        of_count = _into(chain, count, devices, estimate)
        if of_count is not None and (best is None or of_count[0] < best[0]):
            best = of_count
    return best


def least_memory(chain: Chain, devices: int, estimate: Estimate) -> int:
    """Returns the fewest bytes of a device with which the estimate allows any partition."""
    spans, least = Spans.from_chain(chain), NEVER
    for count in range(1, min(devices, chain.layers) + 1):
        largest = np.full(chain.layers + 1, NEVER, dtype=np.int64)
        largest[-1] = 0
        for position in range(count - 1, -1, -1):
            of_span = np.maximum(_estimated(spans, estimate, position, count, devices), largest[spans.end])
            largest = spans.least(of_span, len(largest))
        least = min(least, int(largest[0]))
    return least


def estimated(chain: Chain, stages: Sequence[Stage], devices: int, estimate: Estimate) -> list[int]:
    """Returns the estimate for each stage of a partition, in bytes."""
    spans, sizes = Spans.from_chain(chain), []
    for position, stage in enumerate(stages):
        span = spans.only((spans.first == stage.first) & (spans.end == stage.last + 1))
        sizes.append(int(_estimated(span, estimate, position, len(stages), devices)[0]))
    return sizes


def _into(chain: Chain, count: int, devices: int, estimate: Estimate) -> tuple[int, tuple[Stage, ...]] | None:
    """Returns the best partition into exactly `count` stages, from the end of the chain."""
    spans = Spans.from_chain(chain)
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
    """Returns the bytes of each span, as the stage at `position` of `count`."""
    if estimate == "optimizer":
        return (spans.state + spans.stored) * (devices - 1 - position)
    if estimate == "none":
        return np.zeros_like(spans.stored)
    return spans.held(count - position if estimate == "position" else devices)
