"""The result of a calibration, timings and fits, as files."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from harness.core.serialization import Document
from harness.host import devices
from harness.measure.alpha_beta_fit import Fit, Timing, better, fit
from harness.simulator.routes import STEPS

LARGE_BYTES = 10**6
"""Size of messages from which bandwidth dominates."""


@dataclass(frozen=True)
class Timings(Document):
    """`timings.json`: medians over `rounds` rounds, of ranks that spoke through `backend`."""

    backend: str
    rounds: int
    timings: tuple[Timing, ...] = ()


@dataclass(frozen=True)
class Calibration(Document):
    """`calibration.json`: the timings, both fits to all of them, and the plain fit to each collective alone.

    `chosen` is the one of the two fits that predicts the middle of the sizes better; it has a bandwidth.
    """

    backend: str
    rounds: int
    timings: tuple[Timing, ...]
    plain: Fit
    relative: Fit
    chosen: Fit
    alone: dict[str, Fit] = field(default_factory=dict)

    @classmethod
    def of(cls, measured: Timings) -> Calibration:
        """Fitted. Raises ValueError where the timings determine no alpha or no bandwidth."""
        timings = measured.timings
        plain, relative = fit(timings, "plain"), fit(timings, "relative")
        chosen = better((plain, relative), timings)
        if chosen.beta_s_per_byte == 0:
            largest = max(t.bytes for t in timings)
            raise ValueError(
                f"the timings show no bandwidth: up to the largest messages, {largest} bytes, time does not grow "
                "with size -> run again while nothing else runs here, with more rounds: steps=50"
            )
        alone = {name: fit([t for t in timings if t.name == name]) for name in STEPS}
        return cls(measured.backend, measured.rounds, timings, plain, relative, chosen, alone)

    @property
    def large(self) -> tuple[Timing, ...]:
        """The timings of large messages; where there are none, of the largest."""
        least = min(LARGE_BYTES, 0.9 * max(t.bytes for t in self.timings))  # members share bytes, so sizes differ a bit
        return tuple(t for t in self.timings if t.bytes >= least)

    @property
    def fits(self) -> tuple[Fit, Fit]:
        """Return two fits to all collectives: plain least squares, and by relative errors."""
        return self.plain, self.relative

    @property
    def groups(self) -> list[int]:
        """Return the group sizes that were measured."""
        return sorted({t.members for t in self.timings})

    @property
    def devices(self) -> list[str]:
        """The torch device of each rank of the largest group."""
        return list(devices.torch_names("cuda" if self.backend == "nccl" else "cpu", self.groups[-1]))

    def metrics(self) -> dict[str, Any]:
        """Return the metrics for the record: the chosen fit, and R^2 of large messages for each fit and collective."""
        return {
            "alpha_s": self.chosen.alpha_s,
            "bandwidth_gb_s": 1 / self.chosen.beta_s_per_byte / 1e9,
            "weights": self.chosen.weights,
            "r2": {one.weights: one.r2 for one in self.fits},
            "r2_large": {one.weights: one.r2_of(self.large) for one in self.fits}
            | {name: one.r2_of([t for t in self.large if t.name == name]) for name, one in self.alone.items()},
        }
