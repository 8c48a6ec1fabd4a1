"""The best that there is, by trying all: what planners of small chains are measured against. For tests only."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import combinations
from math import inf

from hypothesis import strategies as st

from harness.core.plan import Stage
from planners.periodic.bounds import lower_bound
from planners.periodic.layer_ticks import Chain
from planners.periodic.milp import solve
from planners.periodic.reassign_devices import join_adjacent
from planners.periodic.retiming import sharing
from planners.periodic.task_times import Timing
from tests.planners.periodic.contiguous_cases import with_shared


@st.composite
def chains(draw: st.DrawFn, layers: int, longest: int = 3, messages: int = 1) -> Chain:
    """Chains of so many layers with few ticks and bytes, so that much fits exactly or just does not."""

    def numbers(low: int, high: int, count: int = layers) -> tuple[int, ...]:
        return tuple(draw(st.lists(st.integers(low, high), min_size=count, max_size=count)))

    some = Chain(
        forward=numbers(1, longest),
        backward=numbers(1, longest),
        state=numbers(0, 2),
        stored=numbers(0, 4),
        sent=(0, *numbers(0, messages, layers - 1), 0),
        returned=(0, *numbers(0, messages, layers - 1), 0),
        buffers=(0, *numbers(0, 1, layers - 1), 0),
        memory=draw(st.integers(2 * layers, 7 * layers)),
        duplex=draw(st.sampled_from(("half", "full"))),
    )
    return with_shared(draw, some)


def check(timing: Timing) -> None:
    """That a timing is what it must be, from the definitions alone."""
    tasks, starts, period = timing.tasks, timing.starts, timing.period
    assert len(tasks) == len(starts)
    for here, task in enumerate(tasks[:-1]):
        assert starts[here + 1] >= starts[here] + task.ticks
    for places in sharing(tasks):
        for one, two in combinations(places, 2):
            assert _apart(starts[one], tasks[one].ticks, starts[two], tasks[two].ticks, period), (one, two)
        assert sum(tasks[place].ticks for place in places) <= period
    assert max(timing.memory().values()) <= timing.chain.memory


def allocations(layers: int, devices: int) -> Iterator[tuple[Stage, ...]]:
    """All ways to put layers on at most so many equal devices; every layer is a stage of its own."""

    def rest(chosen: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(chosen) == layers:
            yield chosen
            return
        for device in range(min(max(chosen, default=-1) + 2, devices)):
            yield from rest((*chosen, device))

    for where in rest(()):
        yield tuple(Stage(layer, layer, device) for layer, device in enumerate(where))


def optimum(chain: Chain, devices: int, whole: bool = False) -> Timing | None:
    """The valid timing with the smallest period of all: any layer on any device, each layer a task of its own.

    With `whole` adjacent layers on a device run as one block. None if nothing fits. Each allocation is solved by the
    planner's own program, which `tests.planners.periodic.brute_force_period` is the judge of.
    """
    bounded: list[tuple[Fraction, int, tuple[Stage, ...]]] = []
    for layers in allocations(chain.layers, devices):
        stages = tuple(join_adjacent(layers)) if whole else layers
        least = lower_bound(chain, stages)
        if least is not None:
            bounded.append((least, len(bounded), stages))
    best: Timing | None = None
    for least, _, stages in sorted(bounded):
        if best is not None and least >= best.period:
            break
        found = solve(chain, stages, inf, None if best is None else best.period).timing
        best = found or best
    return best


Ticks = int | Fraction


def _apart(start: Ticks, size: int, other: Ticks, taken: int, length: Ticks) -> bool:
    """Whether two tasks, repeated every `length`, never overlap."""
    return ((start - other) % length >= taken and (other - start) % length >= size) or (
        (start - other) % length == 0 and min(size, taken) == 0
    )
