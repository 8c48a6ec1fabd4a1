"""Lower bounds of the period of an allocation, and the memory that its devices have for activations."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate

from harness.core.plan import Stage
from planners.periodic.layer_ticks import Chain
from planners.periodic.retiming import sharing
from planners.periodic.task_times import Timing, path, task_positions


def sequential(chain: Chain, stages: Sequence[Stage]) -> Timing:
    """Returns the timing in which a micro-batch begins when the previous one has ended; it stores one at a time."""
    tasks = path(chain, stages)
    ends = tuple(Fraction(end) for end in accumulate((task.ticks for task in tasks), initial=0))
    return Timing(chain, tuple(stages), max(ends[-1], Fraction(1)), ends[:-1])


def stored(chain: Chain, stage: Stage) -> int:
    """Returns the bytes that a stage stores of each micro-batch."""
    return chain.kept(stage.first, stage.last)


def activation_memory(chain: Chain, stages: Sequence[Stage]) -> dict[int, int]:
    """Returns the bytes that each device has for stored activations; below 0 if not even the rest fits."""
    free = {}
    for device, held in sequential(chain, stages).memory().items():
        free[device] = chain.memory - held + sum(stored(chain, stage) for stage in stages if stage.device == device)
    return free


def most_activations(chain: Chain, stages: Sequence[Stage], free: dict[int, int]) -> dict[int, int]:
    """Returns for each stage that stores something the most micro-batches that it can store when one begins.

    When a stage begins with a micro-batch, each earlier stage of the same device still has that one.
    """
    limits = {}
    for number, stage in enumerate(stages):
        size = stored(chain, stage)
        earlier = sum(stored(chain, other) for other in stages[:number] if other.device == stage.device)
        if size:
            limits[number] = (free[stage.device] - earlier) // size
    return limits


def lower_bound(chain: Chain, stages: Sequence[Stage]) -> Fraction | None:
    """Returns a lower bound of the period; None if some device has no memory for one micro-batch.

    A resource is busy for its tasks once in each period. A stage stores a micro-batch at least as long as the path from
    its forward to its backward task takes: that is as many periods as it stores micro-batches. Over a period a device
    stores, on average, what its stages store times the number of periods for which they store it.
    """
    free = activation_memory(chain, stages)
    limits = most_activations(chain, stages, free)
    if any(limit < 1 for limit in limits.values()) or any(size < 0 for size in free.values()):
        return None
    tasks = path(chain, stages)
    before = list(accumulate((task.ticks for task in tasks), initial=0))
    places = task_positions(tasks)
    kept = {number: before[places[number, "B"] + 1] - before[places[number, "F"]] for number in range(len(stages))}
    bounds = [Fraction(sum(tasks[place].ticks for place in positions)) for positions in sharing(tasks)]
    bounds += [Fraction(kept[number], limit) for number, limit in limits.items()]
    for device, size in free.items():
        area = sum(kept[n] * stored(chain, stage) for n, stage in enumerate(stages) if stage.device == device)
        if area:
            bounds.append(Fraction(area, size))
    return max(bounds)
