"""Interleaved rounds of benchmark entries: A B C A B C ..., so that a drift of the machine's speed affects all."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass


@dataclass(frozen=True)
class Times:
    """Seconds of each round of one entry."""

    rounds_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.rounds_s)

    @property
    def spread_s(self) -> tuple[float, float]:
        """The quartiles."""
        first, _, third = statistics.quantiles(self.rounds_s, n=4, method="inclusive")
        return first, third


def run_interleaved(entries: Mapping[str, Callable[[], float]], rounds: int, warmup: int = 1) -> dict[str, Times]:
    """Call each entry in turn, `warmup` + `rounds` times; an entry returns the seconds that it took."""
    times: dict[str, list[float]] = {name: [] for name in entries}
    for number in range(warmup + rounds):
        for name, run in entries.items():
            took_s = run()
            if number >= warmup:
                times[name].append(took_s)
    return {name: Times(tuple(taken)) for name, taken in times.items()}


def at_once(runs: Sequence[Callable[[], float]]) -> float:
    """Seconds of one if all run at the same time: the best that the cores can reach."""
    with ThreadPoolExecutor(len(runs)) as pool:
        taken = list(pool.map(lambda run: run(), runs))
    return statistics.mean(taken) / len(runs)


def speedup(times: Mapping[str, Times], name: str, base: str) -> float:
    """Return the speed of `name` relative to `base`: the median over rounds of the ratios."""
    pairs = zip(times[base].rounds_s, times[name].rounds_s, strict=True)
    return statistics.median(theirs / mine for theirs, mine in pairs)
