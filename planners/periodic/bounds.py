"""What no schedule of an allocation can beat, and the memory that its devices have for activations."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate

from harness.plan import Stage
from planners.periodic.chain import Chain
from planners.periodic.retiming import sharing
from planners.periodic.timing import Timing, ends_of, path


def one_by_one(chain: Chain, stages: Sequence[Stage]) -> Timing:
    """A micro-batch begins when the one before it is through: valid wherever there is memory for one."""
    tasks = path(chain, stages)
    ends = tuple(Fraction(end) for end in accumulate((task.ticks for task in tasks), initial=0))
    return Timing(chain, tuple(stages), max(ends[-1], Fraction(1)), ends[:-1])


def stored(chain: Chain, stage: Stage) -> int:
    """Bytes that a stage stores of each micro-batch."""
    return chain.kept(stage.first, stage.last)


def rooms(chain: Chain, stages: Sequence[Stage]) -> dict[int, int]:
    """Bytes that each device has for stored activations; below 0 if not even the rest fits."""
    found = {}
    for device, held in one_by_one(chain, stages).memory().items():
        found[device] = chain.memory - held + sum(stored(chain, stage) for stage in stages if stage.device == device)
    return found


def most(chain: Chain, stages: Sequence[Stage], room: dict[int, int]) -> dict[int, int]:
    """For each stage that stores something, how many micro-batches it can store at most when one begins.

    When a stage begins with a micro-batch, each earlier stage of the same device still has that one.
    """
    found = {}
    for number, stage in enumerate(stages):
        own = stored(chain, stage)
        earlier = sum(stored(chain, other) for other in stages[:number] if other.device == stage.device)
        if own:
            found[number] = (room[stage.device] - earlier) // own
    return found


def lower_bound(chain: Chain, stages: Sequence[Stage]) -> Fraction | None:
    """No period is below this; None if no device has room for one micro-batch.

    A resource is busy for its tasks once in each period. A stage has what it stores of a micro-batch for as long as the
    path from its forward to its backward task takes, at least: as many periods as it stores micro-batches; and over a
    period a device stores, on average, what its stages store times how many periods they have it.
    """
    room = rooms(chain, stages)
    limits = most(chain, stages, room)
    if any(limit < 1 for limit in limits.values()) or any(size < 0 for size in room.values()):
        return None
    tasks = path(chain, stages)
    before = list(accumulate((task.ticks for task in tasks), initial=0))
    places = ends_of(tasks)
    kept = {number: before[places[number, "B"] + 1] - before[places[number, "F"]] for number in range(len(stages))}
    found = [Fraction(sum(tasks[place].ticks for place in own)) for own in sharing(tasks)]
    found += [Fraction(kept[number], limit) for number, limit in limits.items()]
    for device, size in room.items():
        area = sum(kept[n] * stored(chain, stage) for n, stage in enumerate(stages) if stage.device == device)
        if area:
            found.append(Fraction(area, size))
    return max(found)
