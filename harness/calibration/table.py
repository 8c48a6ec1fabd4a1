"""A calibration as it is told on the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from harness.calibration.cluster_file import speed
from harness.calibration.result import Calibration
from harness.display import seconds, size
from harness.sbp.fit import Fit, Timing, middle

TIMED = ("collective", "ranks", "bytes", "measured", "quartiles", "plain fit", "", "relative fit", "")
FITTED = ("least squares", "alpha", "1 / beta", "R^2", "R^2, large messages", "off, middle sizes")


def timed(found: Calibration) -> Table:
    """The smallest, a middle and the largest message of each collective and group, against both fits.

    Behind a fit's time stands how far it is off.
    """
    table = _table(TIMED)
    for name in found.alone:
        for members in found.groups:
            group = sorted((t for t in found.timings if (t.name, t.members) == (name, members)), key=lambda t: t.bytes)
            for timing in dict.fromkeys((group[0], group[len(group) // 2], group[-1])):
                table.add_row(*map(Text, _timed_row(found, timing)))
    return table


def fitted(found: Calibration) -> Table:
    """Alpha, bandwidth and R^2: of both fits to all collectives, and of each collective fitted alone."""
    table = _table(FITTED)
    for fit in found.fits:
        table.add_row(*map(Text, _fitted_row(f"{fit.weights}, all together", fit, found.timings, found.large)))
    for name, fit in found.alone.items():
        own, large = ([t for t in timings if t.name == name] for timings in (found.timings, found.large))
        table.add_row(*map(Text, _fitted_row(f"plain, {name} alone", fit, own, large)))
    return table


def _timed_row(found: Calibration, timing: Timing) -> Iterator[str]:
    low, high = timing.spread_s or (timing.seconds, timing.seconds)
    yield from (timing.name, str(timing.members), size(timing.bytes), seconds(timing.seconds))
    yield f"{seconds(low)} to {seconds(high)}"
    for fit in found.fits:
        yield seconds(fit.seconds(timing))
        yield f"{fit.seconds(timing) / timing.seconds - 1:+.0%}"


def _fitted_row(what: str, fit: Fit, timings: Sequence[Timing], large: Sequence[Timing]) -> Iterator[str]:
    yield from (what, seconds(fit.alpha_s), speed(fit), f"{fit.r2:.3f}", f"{fit.r2_of(large):.3f}")
    yield f"{fit.factor(middle(timings)):.2f} times"


def _table(titles: Sequence[str]) -> Table:
    """Texts to the left, numbers to the right."""
    table = Table(box=None, pad_edge=False)
    for title in titles:
        table.add_column(title, justify="left" if title == titles[0] else "right")
    return table
