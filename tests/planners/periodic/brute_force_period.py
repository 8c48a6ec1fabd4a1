"""The smallest period of an allocation, from the definitions alone: all orders are tried. For tests of tiny cases.

Of the planners' code nothing is used but the types `Chain` and `Stage`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations

from harness.core.plan import Stage
from planners.periodic.layer_ticks import Chain

Edge = tuple[int, int, int, int]
"""(i, j, d, k): task j starts at least d ticks less k periods after task i."""


@dataclass(frozen=True)
class Step:
    """One task of a micro-batch; `place` is its device, or the link that it crosses."""

    ticks: int
    place: tuple[int, ...]


def shortest(chain: Chain, stages: Sequence[Stage]) -> Fraction | None:
    """None if no period is long enough for the devices' memory."""
    return _Orders(chain, stages).best()


class _Orders:
    """Between tasks i < j of one place lie, in the same micro-batch, k whole periods and a rest: each k is tried.

    Waits are shorter than a period: whatever follows a longer one may all come a period earlier.
    """

    def __init__(self, chain: Chain, stages: Sequence[Stage]) -> None:
        self.chain, self.stages = chain, stages
        self.steps, self.begins, self.ends = _steps(chain, stages)
        places = sorted({step.place for step in self.steps}, key=lambda place: (len(place), place))
        of_place = [[n for n, step in enumerate(self.steps) if step.place == place] for place in places]
        self.load = max(1, *(sum(self.steps[n].ticks for n in own) for own in of_place))
        self.total = max(1, sum(step.ticks for step in self.steps))
        self.pairs: list[tuple[int, int]] = []
        self.known: dict[int, int] = {}  # how many pairs say what a device stores
        for (device, *link), own in zip(places, of_place, strict=True):
            self.pairs += sorted(combinations(own, 2), key=lambda pair: pair[1] - pair[0], reverse=True)
            if not link:
                self.known[len(self.pairs)] = device
        self.found: Fraction | None = None

    def best(self) -> Fraction | None:
        edges = [(n, n + 1, step.ticks, 0) for n, step in enumerate(self.steps[:-1])]
        edges += [(n + 1, n, -step.ticks, 1) for n, step in enumerate(self.steps[:-1])]
        self._choose(edges, 0)
        return self.found

    def _choose(self, edges: list[Edge], number: int) -> None:
        timed = _least(len(self.steps), edges, self.load)
        if timed is None or (number in self.known and not self._fits(self.known[number], *timed)):
            return
        if number == len(self.pairs):
            self.found = timed[0]
            return
        i, j = self.pairs[number]
        options = []
        for k in range(min(j - i + self.total // self.load + 1, self._most(i, j))):
            more = [*edges, (i, j, self.steps[i].ticks, -k), (j, i, self.steps[j].ticks, k + 1)]
            timed = _least(len(self.steps), more, self.load)
            if timed is not None:
                options.append((timed[0], k, more))
        for period, _, more in sorted(options):
            if self.found is None or period < self.found:
                self._choose(more, number + 1)

    def _most(self, i: int, j: int) -> int:
        """Of a stage's two tasks: so many micro-batches it can store, if its device has nothing else."""
        if i not in self.begins or j != self.ends[self.begins.index(i)]:
            return self.total * len(self.steps)
        stage = self.stages[self.begins.index(i)]
        size = sum(self.chain.stored[stage.first : stage.last + 1])
        room = self.chain.memory - _fixed(self.chain, self.stages, stage.device)
        return max(0, room // size) if size else self.total * len(self.steps)

    def _fits(self, device: int, period: Fraction, starts: Sequence[Fraction]) -> bool:
        """Whether a device has room whenever a forward task has started."""
        own = [n for n, stage in enumerate(self.stages) if stage.device == device]
        room = self.chain.memory - _fixed(self.chain, self.stages, device)
        for moment in (starts[self.begins[n]] for n in own):
            held = 0
            for n in own:
                begun = (moment - starts[self.begins[n]]) // period
                ended = (moment - starts[self.ends[n]] - self.steps[self.ends[n]].ticks) // period
                stage = self.stages[n]
                held += (begun - ended) * sum(self.chain.stored[stage.first : stage.last + 1])
            if held > room:
                return False
        return True


def _steps(chain: Chain, stages: Sequence[Stage]) -> tuple[list[Step], list[int], list[int]]:
    """The tasks in order, and which of them are forward and backward tasks of each stage."""
    there: list[Step] = []
    back: list[Step] = []
    begins = []
    for number, stage in enumerate(stages):
        if number and (before := stages[number - 1].device) != stage.device:
            ways = ((before, stage.device), (stage.device, before))
            if chain.duplex == "half":
                ways = (min(ways), min(ways))
            there.append(Step(chain.sent[stage.first], ways[0]))
            back.append(Step(chain.returned[stage.first], ways[1]))
        begins.append(len(there))
        layers = slice(stage.first, stage.last + 1)
        there.append(Step(sum(chain.forward[layers]), (stage.device,)))
        back.append(Step(sum(chain.backward[layers]), (stage.device,)))
    last = 2 * len(there) - 1
    return [*there, *reversed(back)], begins, [last - begin for begin in begins]


def _fixed(chain: Chain, stages: Sequence[Stage], device: int) -> int:
    """State, what is shared once, and buffers on both sides of each cut."""
    of_layer = [stage.device for stage in stages for _ in range(stage.first, stage.last + 1)]
    own = [layer for layer, where in enumerate(of_layer) if where == device]
    cuts = [b for b in range(1, len(of_layer)) if of_layer[b - 1] != of_layer[b] and device in of_layer[b - 1 : b + 1]]
    twice = sum(one.bytes * max(0, len({*one.layers} & {*own}) - 1) for one in chain.shared)
    return sum(chain.state[layer] for layer in own) - twice + sum(chain.buffers[b] for b in cuts)


def _least(count: int, edges: Sequence[Edge], load: int) -> tuple[Fraction, list[Fraction]] | None:
    """The smallest period from `load` on that the edges allow, and earliest starts; None if they allow none."""
    period = Fraction(load)
    while True:
        top, bottom = period.numerator, period.denominator
        weights = [(i, j, bottom * d - top * k) for i, j, d, k in edges]
        starts, through = [0] * count, [-1] * count
        last = -1
        for _ in range(count + 1):
            last = -1
            for number, (i, j, weight) in enumerate(weights):
                if starts[i] + weight > starts[j]:
                    starts[j], through[j], last = starts[i] + weight, number, j
            if last < 0:
                return period, [Fraction(start, bottom) for start in starts]
        for _ in range(count):
            last = edges[through[last]][0]
        cycle, here = [through[last]], edges[through[last]][0]
        while here != last:
            cycle.append(through[here])
            here = edges[through[here]][0]
        periods = sum(edges[number][3] for number in cycle)
        if periods <= 0:
            return None
        period = Fraction(sum(edges[number][2] for number in cycle), periods)
