"""Whether each claim of paper_claims/madpipe.csv holds for our figures. One function for each."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from analysis.claim_check import Check, Finding, Verdict, check_claims
from analysis.madpipe.fig7 import cell
from analysis.madpipe.sweep_results import CONTIGUOUS, MADPIPE, NETWORKS, PIPEDREAM, Results, Row
from analysis.match_records import Need
from analysis.paper_data import printed, texts
from analysis.run_artifacts import MissingData

Kind = TypeVar("Kind")
BASELINE = PIPEDREAM["optimizer"]
FIG6 = "madpipe_fig6_resnet50"
"""The file of what the paper says of Figure 6."""
LITTLE_GB = 8
TIGHT_GB = range(3, 10)
"""Below 10 GB, as the paper says."""
TESTS = {
    "MP-1": ("tests/planners/periodic/test_one_f_one_b_star.py::test_no_periodic_pattern_stores_fewer",),
    "MP-2": ("tests/planners/periodic/test_one_f_one_b_star.py::test_it_repeats_for_ever_and_group_g_stores_g",),
}
"""Tests that prove claims exactly."""
REASONS = {
    "MP-4": "at 9 GB memory no longer binds for the smaller networks on these profiles, and with 3 GB next to nothing "
    "but one plan fits ResNet-101.",
    "MP-5": "the first phase knows plans in which one device has several stages; the few below it have several such.",
    "MP-6": "our first phase is exact, and shares layers unevenly over devices: where memory does not bind it is below "
    "PipeDream's consecutive partition; the paper's has grids that round up.",
    "MP-9": "consecutive stages reach it and never exceed it; plans with several stages on a device have more of them.",
}
"""Why a claim may not hold."""
SAME = 1e-9
"""Periods that differ by this part of them are equal."""


def verdicts(results: Results) -> list[Verdict]:
    """A verdict for each claim."""
    return check_claims("madpipe", results, CLAIMS, TESTS, REASONS)


def pipedream_is_slower(results: Results) -> Finding:
    pairs = [
        (theirs, ours)
        for theirs, ours in _pairs(results, "fig6", BASELINE)
        if ours.devices > 2 and ours.memory_gb <= LITTLE_GB and ours.ok and theirs.ok
    ]
    ratios = sorted(theirs.period_s / ours.period_s for theirs, ours in _some(pairs))
    middle = statistics.median(ratios)
    often = printed(FIG6, "pipedream_period_over_madpipe")
    slower = sum(ratio >= 1 + often / 100 for ratio in ratios)
    summary = (
        f"ResNet-50, more than 2 devices, 8 GB and less: median {middle:.2f}, largest {ratios[-1]:.2f}; {slower} of "
        f"{len(ratios)} instances are at least {often:g} % slower"
    )
    low, high = (printed(FIG6, f"pipedream_period_over_madpipe_worst_{end}") for end in ("low", "high"))
    theirs = f"routinely {often:g} % larger, up to {low:g} or {high:g} times"
    return Finding(middle > 1 and ratios[-1] >= 1.5, theirs, summary)


def by_a_fifth_below_10_gb(results: Results) -> Finding:
    parts, right = [], True
    for scheme in PIPEDREAM.values():
        cells = {
            (network, memory): cell(results, network, memory, scheme)
            for network in NETWORKS.values()
            for memory in TIGHT_GB
        }
        known = {place: one.ratio for place, one in cells.items() if one.ratio is not None}
        low = [place for place, ratio in known.items() if ratio <= least_ratio()]
        least = min(_some([*known]), key=lambda place: known[place])
        right &= not low or scheme != BASELINE
        above = f"above {least_ratio():g} in {len(known) - len(low)} of {len(known)} cells"
        parts.append(f"{scheme}: {above}, least {known[least]:.2f} ({least[0]}, {least[1]} GB)")
    return Finding(right, f"above {least_ratio():g} for every network", "; ".join(parts))


def least_ratio() -> float:
    """The paper's: PipeDream's period / MadPipe's, below 10 GB."""
    return printed("madpipe_fig7_ratios", "geomean_period_ratio_pipedream_over_madpipe")


def more_memory_never_hurts(results: Results) -> Finding:
    parts, right = [], True
    for scheme in (BASELINE, MADPIPE):
        rows = results.by_scheme("fig6")[scheme]
        less = [
            (row, rows[network, devices, memory + 1, bandwidth])
            for (network, devices, memory, bandwidth), row in rows.items()
            if (network, devices, memory + 1, bandwidth) in rows and row.ok
        ]
        longer = sum(after.first_phase_s > before.first_phase_s * (1 + SAME) for before, after in less)
        above = [row for row in rows.values() if row.ok and row.first_phase_s > row.period_s * (1 + SAME)]
        beyond = sum(row.several > 1 for row in above)
        right &= not longer and not above
        parts.append(
            f"{scheme}: longer with a GB more in {longer} of {len(less)} steps, above the schedule's period in "
            f"{len(above)}" + (f", of which {beyond} have several devices with several stages" if above else "")
        )
    return Finding(right, "never longer, never above", "first phases. " + "; ".join(parts))


def partitions_are_optimistic(results: Results) -> Finding:
    parts, right = [], False
    for scheme in PIPEDREAM.values():
        pairs = [(theirs, ours) for theirs, ours in _pairs(results, "fig7", scheme) if theirs.ok and ours.ok]
        first = sum(theirs.first_phase_s <= ours.first_phase_s * (1 + SAME) for theirs, ours in pairs)
        second = sum(theirs.period_s >= ours.period_s * (1 - SAME) for theirs, ours in pairs)
        if scheme == BASELINE:
            right = min(first, second) > len(pairs) / 2
        parts.append(f"{scheme}: first phase no longer in {first} of {len(pairs)}, schedule no shorter in {second}")
    return Finding(right, "in most cases", "; ".join(parts))


def scales_where_memory_allows(results: Results) -> Finding:
    ours, theirs = (results.by_scheme("fig8")[scheme] for scheme in (MADPIPE, BASELINE))
    parts, right = [], True
    for network in NETWORKS.values():
        tight, roomy = (ours[network, 8, memory, 12].speedup for memory in (4, 16))
        areas = [
            sum(row.speedup for (name, _, _, _), row in rows.items() if name == network) for rows in (ours, theirs)
        ]
        right &= roomy > tight and areas[0] > areas[1]
        parts.append(f"{network} {roomy:.2f} with 16 GB, {tight:.2f} with 4; area {areas[0] / areas[1]:.2f} times")
    return Finding(right, "more with 12 and 16 GB, more than PipeDream", "speed-up on 8 devices: " + "; ".join(parts))


def bandwidth_changes_little(results: Results) -> Finding:
    rows = results.by_scheme("fig8")[MADPIPE]
    gains = [
        rows[network, devices, memory, 24].speedup / row.speedup - 1
        for (network, devices, memory, bandwidth), row in rows.items()
        if bandwidth == 12 and row.ok
    ]
    small, middle = sum(abs(gain) < 0.2 for gain in gains), statistics.median(_some(gains))
    summary = (
        f"less than 20 % in {small} of {len(gains)} instances; median {100 * middle:.0f} %, largest "
        f"{100 * max(gains):.0f} %"
    )
    return Finding(small > len(gains) / 2, "little", summary)


def first_layers_store_most(results: Results) -> Finding:
    parts, right = [], True
    for scheme in (CONTIGUOUS, MADPIPE):
        rows = [row for row in results.by_scheme("fig7")[scheme].values() if row.ok]
        stored = [(max(row.predicted["activations"]), 2 * row.devices - 1) for row in rows]
        beyond, reached = (sum(flags) for flags in zip(*((n > m, n == m) for n, m in stored), strict=True))
        right &= reached > 0 and not beyond
        parts.append(f"{scheme}: 2P - 1 is reached in {reached} of {len(rows)} plans, exceeded in {beyond}")
    (most,) = texts("madpipe_setup", "first_layer_activations_max")
    return Finding(right, f"up to {most}", "; ".join(parts))


def _some(found: Sequence[Kind]) -> Sequence[Kind]:
    """Raises MissingData if there are none."""
    if not found:
        raise MissingData("no plan fits in any of its points")
    return found


def _pairs(results: Results, sweep: str, scheme: str) -> Iterator[tuple[Row, Row]]:
    """A scheme's and MadPipe's row of each instance."""
    rows = results.by_scheme(sweep)
    for instance, row in rows[scheme].items():
        yield row, rows[MADPIPE][instance]


def _of(*schemes: str) -> Callable[[Row], bool]:
    return lambda row: row.scheme in schemes


def _need(sweep: str, of: Callable[[Row], bool]) -> tuple[Need[Row]]:
    """The points of a sweep that a claim needs; that nothing fits is a result, too."""
    return (Need(sweep, keep=of, ok=False),)


CLAIMS: dict[str, Check[Results]] = {
    "MP-3": Check(
        pipedream_is_slower,
        _need("fig6", lambda row: row.scheme in (BASELINE, MADPIPE) and row.devices > 2 and row.memory_gb <= LITTLE_GB),
    ),
    "MP-4": Check(
        by_a_fifth_below_10_gb, _need("fig7", lambda row: row.scheme != CONTIGUOUS and row.memory_gb in TIGHT_GB)
    ),
    "MP-5": Check(more_memory_never_hurts, _need("fig6", _of(BASELINE, MADPIPE))),
    "MP-6": Check(partitions_are_optimistic, _need("fig7", _of(*PIPEDREAM.values(), MADPIPE))),
    "MP-7": Check(scales_where_memory_allows, _need("fig8", _of(BASELINE, MADPIPE))),
    "MP-8": Check(bandwidth_changes_little, _need("fig8", _of(MADPIPE))),
    "MP-9": Check(first_layers_store_most, _need("fig7", _of(CONTIGUOUS, MADPIPE))),
}
