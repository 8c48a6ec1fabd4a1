"""Figure 7: how much longer other plans' periods are than MadPipe's, over all devices and links."""

from __future__ import annotations

from dataclasses import dataclass

from analysis.madpipe.sweep_results import PUBLISHED, Schemes, mean


@dataclass(frozen=True)
class Cell:
    """One network with one memory: the geometric mean of period / MadPipe's over instances that both solve, and the
    number of instances that only one of them solves."""

    ratio: float | None
    both: int
    only_madpipe: int
    only_other: int


def cell(
    schemes: Schemes,
    network: str,
    memory_gb: int,
    scheme: str,
    *,
    first_phase: bool = False,
    madpipe: str = PUBLISHED,
) -> Cell:
    """`first_phase`: of the period that the first phase of `scheme` aims at, against MadPipe's schedule. `madpipe` is
    one of the two planners."""
    ours, theirs = schemes.get(madpipe, {}), schemes.get(scheme, {})
    wanted = [one for one in ours if one in theirs and (one[0], one[2]) == (network, memory_gb)]
    both = [one for one in wanted if ours[one].ok and theirs[one].ok]
    ratios = [(theirs[one].first_phase_s if first_phase else theirs[one].period_s) / ours[one].period_s for one in both]
    return Cell(
        mean(ratios) if ratios else None,
        len(both),
        sum(ours[one].ok and not theirs[one].ok for one in wanted),
        sum(theirs[one].ok and not ours[one].ok for one in wanted),
    )
