"""The least period that groups, loads and memory allow where one device may have any number of stages, exactly.

MadPipe (section 4.2) searches on grids; this search is exact. A stage is all consecutive layers that a device has. One
special device may hold several stages, normal devices hold one each. An allocation is possible with a period T if

    load      no device has more than T ticks of tasks, no cut more than T ticks of messages on one link;
    group     from the end of the network on, V is the delay after a stage with load U, C the message before it:
              V' = (V (+) U) (+) C, and the stage is of group g = max(1, ceil((V (+) U) / T));
    memory    a normal device holds state, buffers and g times what its stage stores of a micro-batch. The special one
              holds state, buffers and g - 1 times what each stage stores, and once more what all its stages of one
              group store, of the group where that is most.

The paper has no "once more": with that its special device is too optimistic, even with a single stage.

**No valid pattern of such an allocation has a shorter period.** Take one, with period T, and follow it from the end.

1. A stage of F + B = U ticks waits x ticks between its two tasks, at least V, the time of the stages after it. The
device
   repeats its tasks each period, so B is between two forward tasks: (n - 1) T <= x <= n T - U for some n. Let g be the
   group of V, V > (g - 1) T. If V + U <= g T, then x + U is at least V + U; if not, x <= g T - U is less than V, so n
   is above g, and x + U is at least g T + U. That is V (+) U. It is the same with C on a half duplex link; in full
   duplex a message and its gradient do not meet, and x + C is at least V + C. All grow with V, so that every delay is
   at least as above, stage by stage. Other stages on the same device only take more of its time.
2. From the start of F to the end of B are D ticks. So a stage stores ceil(D / T) micro-batches whenever an F starts,
   at least g, and floor(D / T) or more at any time, at least g - 1. A normal device holds what is said above at each F.
   The special one does when an F of the last of its stages of a group g starts: that stage stores g micro-batches, and
   each earlier stage has these, too, since it began them before and has not ended them. With a period as long as all
   work this is exact: all groups are 1.
3. A device and a link run one task at a time: loads are at most T.

All this gets easier as T grows (`planners.periodic.one_f_one_b_star.delay_after`): T can be halved. In half duplex,
loads and groups change only where a sum of items is T, so that whole ticks are exact; in full duplex T is rounded up to
a tick.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from harness.core.plan import Stage
from planners.periodic.label_search import Run, Search
from planners.periodic.layer_ticks import Chain
from planners.periodic.one_f_one_b_star import delay_after, delay_after_message, group_of

FINE = 128
"""The first step above a period that is too short is 1 / FINE of it; each further one is three times as long."""


@dataclass(frozen=True)
class Bound:
    """`period` ticks are enough for the allocation `stages`, and fewer for no allocation."""

    period: int
    stages: tuple[Stage, ...]


def fixed_point(chain: Chain, devices: int, upper: int | None = None) -> Bound | None:
    """Returns the least period of any allocation on at most `devices`, one of them special; None if none fits.

    Devices are numbered from the front of the network. `upper` is a period that is enough, such as that of the best
    contiguous plan: it does not change the result, but saves time.
    """
    search = Search(chain, devices)
    most = max(1, chain.loads[-1] + sum(chain.crossing))
    enough = most if upper is None else min(max(1, upper), most)
    short = _short(search, enough)
    step = max(1, short // FINE)
    runs = None
    while runs is None:
        period = min(short + step, enough if short < enough else most)
        runs = search.at(period).allocation()
        if runs is None:
            if period >= most:
                return None
            short, step = period, 3 * step
    return _least(search, short, runs)


def _short(search: Search, enough: int) -> int:
    """Returns a period that the lower bound proves too short, nearly as long as possible."""
    chain = search.chain
    short = max(1, -(-chain.loads[-1] // (search.normals + 1)), *chain.work) - 1
    while enough - short > max(1, short // FINE):
        period = (short + enough) // 2
        if search.at(period).cannot_fit():
            short = period
        else:
            enough = period
    return short


def _least(search: Search, short: int, runs: list[Run]) -> Bound:
    """Returns the least period above `short`, given the stages of an allocation that has some period.

    short |----- too short -----|- ? -|---- enough for runs --->  one less is tried first, then ever less
    """
    part = 1
    enough = _least_period_of(search, runs)
    while enough - short > 1:
        period = enough - 1 if part % 2 else (short + enough) // 2
        part += 1
        shorter = search.at(period).allocation()
        if shorter is None:
            short = period
        else:
            runs = shorter
            enough = _least_period_of(search, runs)
    return Bound(enough, stages_from_runs(runs))


def _least_period_of(search: Search, runs: Sequence[Run]) -> int:
    """Returns the least period with which these stages are possible."""
    chain = search.chain
    periods = range(1, max(1, chain.loads[-1] + sum(chain.crossing)))
    return 1 + bisect_left(periods, True, key=lambda period: possible(chain, runs, period))


def possible(chain: Chain, runs: Sequence[Run], period: int) -> bool:
    """Returns whether load, groups and memory allow these stages with this period."""
    if any(chain.busy(first) > period for first, _, _ in runs[1:]):
        return False
    delay = load = size = 0
    of_group: Counter[int] = Counter()
    special_layers = []
    for first, last, special in reversed(runs):
        load_of_stage = chain.loads[last + 1] - chain.loads[first]
        stored = chain.kept(first, last)
        if load_of_stage > period:
            return False
        delay = delay_after(delay, load_of_stage, period)
        group = group_of(delay, period)
        layers = range(first, last + 1)
        if special:
            load, size = load + load_of_stage, size + chain.held(first, last, group - 1) + chain.counted_twice([layers])
            of_group[group] += stored
            special_layers.append(layers)
        elif chain.held(first, last, group) > chain.memory:
            return False
        if first:
            delay = delay_after_message(chain.duplex, delay, chain.crossing[first], period)
    size += max(of_group.values(), default=0) - chain.counted_twice(special_layers)
    return load <= period and size <= chain.memory


def stages_from_runs(runs: Sequence[Run]) -> tuple[Stage, ...]:
    """Returns the stages, devices numbered from the front; the special device by its first stage."""
    stages: list[Stage] = []
    special = None
    free = count()
    for first, last, is_special in runs:
        if not is_special or special is None:
            device = next(free)
        if is_special:
            special = device = device if special is None else special
        stages.append(Stage(first, last, device))
    return tuple(stages)
