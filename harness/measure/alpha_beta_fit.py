"""Alpha and beta of the collectives' rings, by least squares from measured ones (AutoDDL, sec. 3.2).

    seconds = steps (k - 1) alpha + steps (k - 1) / k n beta        one row for each timing

steps is 2 for an all_reduce and 1 for the others, k the members, n the bytes: see `harness.sbp.collective_costs`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from harness.sbp.collective_costs import Collectives
from harness.simulator.routes import STEPS

Weights = Literal["plain", "relative"]
ROUNDING = 1e-20
"""Fraction of a sum of squares below which a residual is rounding error."""


@dataclass(frozen=True)
class Timing:
    """A collective of `members` took `seconds`; `bytes` are counted as in `harness.sbp.collective_costs`.

    `spread_s` are the quartiles where `seconds` is a median. Raises ValueError for what no collective can be.
    """

    name: str
    members: int
    bytes: int
    seconds: float
    spread_s: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.name not in STEPS:
            raise ValueError(f"name is {self.name!r}, must be one of {', '.join(STEPS)}")
        for field, least in (("members", 2), ("bytes", 1)):
            if getattr(self, field) < least:
                raise ValueError(f"{field} is {getattr(self, field)}, must be at least {least}")
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise ValueError(f"seconds is {self.seconds}, must be finite and above 0")

    @property
    def messages(self) -> int:
        """Number of messages of one rank: the factor of the latency alpha."""
        return STEPS[self.name] * (self.members - 1)

    @property
    def sent(self) -> float:
        """The bytes that a member sends, which beta counts."""
        return STEPS[self.name] * Collectives.sent(self.bytes, self.members)


@dataclass(frozen=True)
class Fit:
    """Latency of a message in seconds and seconds a byte, neither of them negative.

    `r2` is 1 - (squares of what is left) / (squares of seconds around their mean), of the timings that were fitted.
    """

    weights: Weights
    alpha_s: float
    beta_s_per_byte: float
    r2: float

    def seconds(self, timing: Timing) -> float:
        """Return the seconds that the fit predicts for a collective of this name, size and number of members."""
        return timing.messages * self.alpha_s + timing.sent * self.beta_s_per_byte

    def factor(self, timings: Sequence[Timing]) -> float:
        """Return the geometric mean over these timings of the factor by which the fit is off (at least 1)."""
        return math.exp(float(np.mean([abs(math.log(self.seconds(t) / t.seconds)) for t in timings])))

    def r2_of(self, timings: Sequence[Timing]) -> float:
        """R^2 over these timings, which may be others than those that were fitted."""
        return _r2(np.array([t.seconds for t in timings]), np.array([self.seconds(t) for t in timings]))


def fit(timings: Sequence[Timing], weights: Weights = "plain") -> Fit:
    """Alpha and beta that make the sum of squared errors smallest; exact where the formulas are.

    plain      errors in seconds: large messages decide
    relative   errors in shares of what was measured: all have equal weight

    Where the smallest sum has a negative one, that is 0 and the other one is fitted alone, which is the smallest sum
    without negative ones. Raises ValueError for timings that do not separate alpha from beta.
    """
    sizes = {t.bytes / t.members for t in timings}
    if len(sizes) < 2:
        raise ValueError(
            f"alpha and beta need messages of at least 2 sizes (bytes / members), these {len(timings)} timings have "
            f"{len(sizes)} -> time a small and a large message"
        )
    seconds = np.array([t.seconds for t in timings])
    rows = np.array([[t.messages, t.sent] for t in timings])
    scale = 1 / seconds if weights == "relative" else np.ones_like(seconds)
    alpha, beta = _not_negative(rows * scale[:, None], seconds * scale)
    return Fit(weights, alpha, beta, _r2(seconds, rows @ np.array([alpha, beta])))


def middle(timings: Sequence[Timing]) -> list[Timing]:
    """Return the timings in the middle half of the sizes (in orders of magnitude), or all if there are none."""
    logs = [math.log(t.bytes) for t in timings]
    quarter = (max(logs) - min(logs)) / 4
    found = [t for t, log in zip(timings, logs, strict=True) if min(logs) + quarter <= log <= max(logs) - quarter]
    return found or list(timings)


def better(fits: Sequence[Fit], timings: Sequence[Timing]) -> Fit:
    """The fit that predicts the middle of the sizes best; one without bandwidth only where all are."""
    return min(fits, key=lambda one: (one.beta_s_per_byte == 0, one.factor(middle(timings))))


def _not_negative(rows: Any, values: Any) -> tuple[float, float]:
    """Least squares of two unknowns, neither negative; rows and values are positive."""
    norms = np.linalg.norm(rows, axis=0)
    scaled = rows / norms
    both = np.linalg.lstsq(scaled, values, rcond=None)[0]
    if min(both) < 0:
        alone = scaled.T @ values  # columns have length 1: this is each one's own optimum, and how much it explains
        both = np.zeros(2)
        both[np.argmax(alone)] = max(alone)
    alpha, beta = both / norms
    return float(alpha), float(beta)


def _r2(measured: Any, fitted: Any) -> float:
    """R^2. If all measured values are equal, it is 1 for a perfect fit, else 0."""
    left, spread = (float(np.sum((measured - other) ** 2)) for other in (fitted, np.mean(measured)))
    nothing = ROUNDING * float(np.sum(measured**2))
    if spread <= nothing:
        return 1.0 if left <= nothing else 0.0
    return 1 - left / spread
