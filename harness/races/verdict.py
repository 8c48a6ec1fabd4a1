"""What the rounds of a race say: ratios with their intervals, ranks, and how good the predicted order was.

    round          1     2     3    ...
    single       0.52  0.55  0.51            speed of gpipe / single: the step time of single / that of gpipe
    gpipe        0.31  0.33  0.30            its interval: the same of rounds drawn again and again, with replacement

The step time of an entry is the mean of its rounds without the fastest and the slowest tenth. A median would need twice
as many rounds for an interval of the same width, and a mean of all would be moved by a single hiccup.

A round's times belong together, so a round is drawn as a whole (the paired bootstrap; Efron and Tibshirani, An
Introduction to the Bootstrap, 1993): what slows all of them in a round changes no ratio.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

NARROW = 0.03
"""Width of an interval, as a part of its ratio, from which on a ratio is known."""
LEAST_ROUNDS = 7
"""Before that an interval says nothing."""
SAMPLES, LEVEL = 2000, 0.95
TRIMMED = 0.1
"""The share of rounds at each end that has no part in a step time."""

Rounds = Sequence[float] | npt.NDArray[np.float64]
"""Seconds of the measured step in each round."""


@dataclass(frozen=True)
class Ratio:
    """The speed of one entry / that of another, and the 95 % interval of it."""

    value: float
    low: float
    high: float

    @property
    def is_known(self) -> bool:
        return self.high - self.low <= NARROW * self.value

    @property
    def is_one(self) -> bool:
        """Whether the difference may be noise."""
        return self.low <= 1.0 <= self.high

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True)
class Place:
    """The rank of an entry; `resolved` is False where more rounds might part it from another one of its rank."""

    rank: int
    resolved: bool = True

    def __str__(self) -> str:
        return f"{self.rank}{'' if self.resolved else '?'}"


def ratio(times_s: Rounds, reference_s: Rounds, level: float = LEVEL) -> Ratio:
    """The speed of one entry / the reference's, of the same rounds, at least one, with the interval of a `level`."""
    own, other = np.asarray(times_s), np.asarray(reference_s)
    drawn = np.random.default_rng(0).integers(0, len(own), (SAMPLES, len(own)))
    found = _trimmed_mean(other[drawn]) / _trimmed_mean(own[drawn])
    low, high = np.quantile(found, [(1 - level) / 2, (1 + level) / 2])
    return Ratio(step_time_s(other) / step_time_s(own), float(low), float(high))


def step_time_s(rounds_s: Rounds) -> float:
    """The step time of an entry in seconds, of its rounds, at least one."""
    return float(_trimmed_mean(np.asarray(rounds_s)))


def _trimmed_mean(rounds: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The means along the last axis, without the least and the largest tenth; of three values without both ends."""
    count = rounds.shape[-1]
    cut = math.ceil(TRIMMED * count) if count > 2 else 0
    return np.asarray(np.sort(rounds, axis=-1)[..., cut : count - cut].mean(axis=-1))


def is_decided(rounds_s: Mapping[str, Sequence[float]]) -> bool:
    """Whether every ratio to the first entry is known."""
    first, *others = rounds_s.values()
    return len(first) >= LEAST_ROUNDS and all(ratio(own, first).is_known for own in others)


def places(rounds_s: Mapping[str, Sequence[float]]) -> dict[str, Place]:
    """The rank of each entry, by its step time. Those that may differ by noise alone share one.

    0.30  0.31  0.40        ranks 1, 1, 3: the second is compared with the first, the third as well

    Of many entries some would differ by chance, so each pair is compared at a level of its own (Bonferroni). Of fewer
    than `LEAST_ROUNDS` nothing is resolved: the interval of a single round has no width.
    """
    enough = all(len(own) >= LEAST_ROUNDS for own in rounds_s.values())
    level = 1 - (1 - LEVEL) / max(1, math.comb(len(rounds_s), 2))
    ordered = sorted(rounds_s, key=lambda name: step_time_s(rounds_s[name]))
    found: dict[str, Place] = {}
    leader = ordered[0] if ordered else ""
    for number, name in enumerate(ordered, 1):
        if not ratio(rounds_s[name], rounds_s[leader], level).is_one:
            leader = name
        rank = found[leader].rank if leader in found else number
        resolved = leader == name or ratio(rounds_s[name], rounds_s[leader]).is_known
        found[name] = Place(rank, enough and resolved)
    return found


def kendalls_tau(ranks: Sequence[float], predicted: Sequence[float]) -> float | None:
    """Kendall's tau-b between the ranks and the predicted times: 1 for the same order, -1 for the opposite one.

    None where one of them says nothing of an order.
    """
    from scipy.stats import kendalltau

    if len(ranks) < 2:
        return None
    found = float(kendalltau(ranks, predicted).statistic)
    return None if math.isnan(found) else found


def regret(times_s: Mapping[str, float], predicted_s: Mapping[str, float]) -> tuple[str, float] | None:
    """The entry that was predicted to be the fastest, and its time / that of the fastest; None without any."""
    both = [name for name in times_s if name in predicted_s]
    if not both:
        return None
    chosen = min(both, key=lambda name: predicted_s[name])
    return chosen, times_s[chosen] / min(times_s[name] for name in both)
