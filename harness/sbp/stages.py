"""A chain as the search within a limit goes through it, and what is at least still to come from each of its places.

    ... o--part--o--[E--part x n--o--part x n--F]--back x (n - 1)--F--part--o ...

Of blocks that are repeated one is gone through, each part of it counted as often as there are blocks; then, as often as
one follows another, what it takes to bring the stream from where a block is left to where it was entered. Where it was
is chosen beforehand: it is `entered`, one place after the other; without such blocks it is of no importance.
"""

from __future__ import annotations

import numpy as np

from harness.sbp.costs import INFINITE
from harness.sbp.edges import Edges
from harness.sbp.optimum import Search, Section, block
from harness.sbp.repeated import Repeated, entering
from harness.sbp.route import Steps


class Stages:
    """`sections`, each with the `times` it is counted; those of the repeated blocks are `begin` to `end`."""

    def __init__(self, search: Search) -> None:
        self.search, self.run, self.begin, self.end = search, Repeated((), 1), 0, 0
        self.sections: list[Section] = []
        self.times: list[int] = []
        for section in search.sections():
            if isinstance(section.part, Repeated):
                self.run, self.begin = section.part, len(self.sections)
                self._add(block(section.part, section), section.part.times)
                self.end = len(self.sections)
            else:
                self._add([section], 1)
        self.places = np.arange(len(search.costs.places))

    def _add(self, sections: list[Section], times: int) -> None:
        self.sections += sections
        self.times += [times] * len(sections)

    @property
    def entrances(self) -> list[int]:
        """All places to enter the repeated blocks in; one if there are none."""
        return list(range(len(self.places) if self.end else 1))

    def back(self, entered: int) -> Edges:
        """What it takes between the blocks, all of it."""
        elements, search = entering(self.run), self.search
        seconds = (self.run.times - 1) * search.costs.moving(elements)[:, entered]
        steps = search.moved
        return Edges(self.places, self.places, seconds, 0 * seconds, lambda k: steps(elements, k, entered))

    def unrolled(self, steps: list[Steps]) -> Steps:
        """What happens in all blocks, from what happens in one and behind it."""
        if self.end:
            inside = [step for part in steps[self.begin : self.end] for step in part]
            steps = [*steps[: self.begin], self.run.steps(inside, steps[self.end]), *steps[self.end + 1 :]]
        return [step for part in steps for step in part]


class Ahead:
    """The least that is still to come to each of the `ends` (places, ends), of `scale` x seconds + `price` x bytes."""

    def __init__(self, stages: Stages, ends: np.ndarray, price: float, scale: float, unit: float) -> None:
        search = stages.search.priced(price, scale)
        self.stages, self.scale, self.unit, self.ends = stages, scale, unit, ends
        self.ways = [search.way(section).seconds * n for section, n in zip(stages.sections, stages.times, strict=True)]
        self._known: dict[int, list[np.ndarray]] = {}

    def before(self, entered: int) -> list[np.ndarray]:
        """(places, ends) before each stage and behind the last one."""
        if entered not in self._known:
            self._known[entered] = self._found(entered)
        return self._known[entered]

    def _found(self, entered: int) -> list[np.ndarray]:
        stages = self.stages
        found = [np.where(np.isfinite(self.ends), self.scale * np.nan_to_num(self.ends, posinf=0.0), INFINITE)]
        for number in reversed(range(len(self.ways))):
            if number + 1 == stages.end:
                found.append(found[-1] + self.scale * stages.back(entered).seconds[:, None])
            found.append((self.ways[number][:, :, None] + found[-1][None, :, :]).min(1))
            if stages.end and number == stages.begin:
                found[-1][stages.places != entered] = INFINITE
        return [least / self.unit for least in reversed(found)]

    def around(self, begun: np.ndarray) -> list[np.ndarray]:
        """(places, places) for each section: the least that all others take. (places, ends) is before the first one."""
        stages = self.stages
        found = [np.full(way.shape, INFINITE) for way in self.ways]
        for entered in stages.entrances:
            at, ahead = begun, iter(self.before(entered)[1:])
            for number, way in enumerate(self.ways):
                if stages.end and number == stages.begin:
                    at = np.where(stages.places[:, None] == entered, at, INFINITE)
                np.minimum(found[number], (at[:, None, :] + next(ahead)[None, :, :]).min(2), out=found[number])
                at = (at[:, None, :] + way[:, :, None] / self.unit).min(0)
                if number + 1 == stages.end:
                    at = at + self.scale * stages.back(entered).seconds[:, None] / self.unit
                    next(ahead)
        return found
