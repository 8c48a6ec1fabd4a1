"""Whether each claim of paper_claims/madpipe.csv holds for our figures. One function for each.

MadPipe is the paper's own planner (`PUBLISHED`) in all of them; what our exact planner finds is said, too.
PipeDream is in the reading `BASELINE`; what becomes of a claim in the others is said, too.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from analysis.claim_check import Check, Finding, Verdict, check_claims
from analysis.madpipe.fig7 import cell
from analysis.madpipe.sweep_results import (
    ALL_OF_THEM,
    BAND,
    BASELINE,
    CONTIGUOUS,
    EXACT,
    NETWORKS,
    PERCENTS,
    PIPEDREAM,
    PUBLISHED,
    SENTENCE,
    Results,
    Row,
    Schemes,
)
from analysis.match_records import Need
from analysis.paper_data import printed, texts
from analysis.run_artifacts import MissingData

Kind = TypeVar("Kind")
FIG6 = "madpipe_fig6_resnet50"
"""The file of what the paper says of Figure 6."""
RESNET = "ResNet-50"
"""The network of Figure 6."""
LITTLE_GB = 8
TIGHT_GB = range(3, 10)
"""Below 10 GB, as the paper says."""
SPEED_GB = (4, 8, 12, 16)
"""Memory in Figure 8."""
TESTS = {
    "MP-1": ("tests/planners/periodic/test_one_f_one_b_star.py::test_no_periodic_pattern_stores_fewer",),
    "MP-2": ("tests/planners/periodic/test_one_f_one_b_star.py::test_it_repeats_for_ever_and_group_g_stores_g",),
}
"""Tests that prove claims exactly."""
REASONS = {
    "MP-4": "at 8 and 9 GB memory no longer binds for Inception and DenseNet-121 on these profiles; elsewhere the "
    "paper's first phase often aims at a period that its allocation cannot keep, and the best consecutive plan is "
    "shorter. The paper's measured profiles would decide it.",
    "MP-5": "the periods never increase, but in 8 instances the grids round up more than once (t_P for each stage of "
    "the special device, and memory and delays): on grids ten times as fine all are within 0.5 ms. The paper's own "
    "sentence on the bound would decide it: of what we have of its text, only that on the increase is literal.",
}
"""Why a claim may not hold."""
SAME = 1e-9
"""Periods that differ by this part of them are equal."""
LOADS = 100
"""Steps of the grid of t_P from 0 to U(1,L): the only grid whose values are parts of a period."""


def verdicts(results: Results) -> list[Verdict]:
    """A verdict for each claim."""
    return check_claims("madpipe", results, CLAIMS, TESTS, REASONS)


def pipedream_is_slower(results: Results) -> Finding:
    often = printed(FIG6, "pipedream_period_over_madpipe")
    low, high = (printed(FIG6, f"pipedream_period_over_madpipe_worst_{end}") for end in ("low", "high"))

    def judge(scheme: str, madpipe: str) -> tuple[bool, str]:
        pairs = [
            (theirs, ours)
            for theirs, ours in _pairs(results, "fig7", scheme, madpipe)
            if ours.network == RESNET and ours.devices > 2 and ours.memory_gb <= LITTLE_GB and ours.ok and theirs.ok
        ]
        ratios = sorted(theirs.period_s / ours.period_s for theirs, ours in _some(pairs))
        slower = sum(ratio >= 1 + often / 100 for ratio in ratios)
        faster = sum(ratio < 1 - SAME for ratio in ratios)
        summary = (
            f"median {statistics.median(ratios):.2f}, largest {ratios[-1]:.2f}; {slower} of {len(ratios)} instances "
            f"are at least {often:g} % slower, {faster} are faster"
        )
        return slower > len(ratios) / 2 and ratios[-1] >= low, summary

    right, summary = _by_reading(judge)
    said = f"routinely {often:g} % larger, up to {low:g} or {high:g} times"
    return Finding(right, said, f"{RESNET}, more than 2 devices, {LITTLE_GB} GB and less. {summary}")


def by_a_fifth_below_10_gb(results: Results) -> Finding:
    def judge(scheme: str, madpipe: str) -> tuple[bool, str]:
        right, text = _cells_above(results.by_scheme("fig7"), scheme, madpipe)
        if madpipe == EXACT or scheme not in (BASELINE, SENTENCE):
            return right, text
        if not_run := results.missing_points([_need(BAND, _every)]):
            return right, f"{text}, with other activations {not_run}"
        band = {percent: _cells_above(results.with_activations(percent), scheme, madpipe)[1] for percent in PERCENTS}
        others = [f"with {percent} % of the activations {theirs}" for percent, theirs in band.items()]
        return right, ", ".join([text, *others])

    right, summary = _by_reading(judge)
    return Finding(right, f"above {least_ratio():g} for every network", summary)


def _cells_above(schemes: Schemes, scheme: str, madpipe: str) -> tuple[bool, str]:
    """Whether the mean ratio is above the paper's in every cell: a network, and a memory below 10 GB."""
    cells = {
        (network, memory): cell(schemes, network, memory, scheme, madpipe=madpipe)
        for network in NETWORKS.values()
        for memory in TIGHT_GB
    }
    known = {place: one.ratio for place, one in cells.items() if one.ratio is not None}
    low = [place for place, ratio in known.items() if ratio <= least_ratio()]
    least = min(_some([*known]), key=lambda place: known[place])
    text = f"above {least_ratio():g} in {len(known) - len(low)} of {len(known)} cells"
    return not low, f"{text} (least {known[least]:.2f}: {least[0]}, {least[1]} GB)"


def least_ratio() -> float:
    """The paper's: PipeDream's period / MadPipe's, below 10 GB."""
    return printed("madpipe_fig7_ratios", "geomean_period_ratio_pipedream_over_madpipe")


def more_memory_never_hurts(results: Results) -> Finding:
    parts, right = [], True
    for scheme, steps in ((BASELINE, 0), (PUBLISHED, 1), (EXACT, 0)):
        rows = results.by_scheme("fig6")[scheme]
        less = [
            (row, rows[network, devices, memory + 1, bandwidth])
            for (network, devices, memory, bandwidth), row in rows.items()
            if (network, devices, memory + 1, bandwidth) in rows and row.ok
        ]
        longer = [after.first_phase_s - before.first_phase_s for before, after in less]
        fits = [row for row in rows.values() if row.ok]
        above = [row.first_phase_s - row.period_s for row in fits]
        allowed_s = _some(fits)[0].one_device_s * (steps / LOADS + SAME)
        right &= scheme == EXACT or max([*longer, *above]) <= allowed_s
        parts.append(
            f"{scheme}: longer with a GB more in {_more_than(longer, allowed_s)} steps, above the schedule's period in "
            f"{_more_than(above, allowed_s)} instances" + f", by more than {1e3 * allowed_s:.1f} ms" * bool(steps)
        )
    return Finding(right, "never longer, never above", f"first phases, {RESNET}. " + "; ".join(parts))


def _more_than(excesses_s: Sequence[float], allowed_s: float) -> str:
    """0 of 182 (largest 2.0 ms)."""
    return f"{sum(one > allowed_s for one in excesses_s)} of {len(excesses_s)} (largest {1e3 * max(excesses_s):.1f} ms)"


def partitions_are_optimistic(results: Results) -> Finding:
    def judge(scheme: str, madpipe: str) -> tuple[bool, str]:
        pairs = [(theirs, ours) for theirs, ours in _pairs(results, "fig7", scheme, madpipe) if theirs.ok and ours.ok]
        first = [theirs.first_phase_s <= ours.first_phase_s * (1 + SAME) for theirs, ours in _some(pairs)]
        second = [theirs.period_s >= ours.period_s * (1 - SAME) for theirs, ours in pairs]
        tight = [number for number, (_, ours) in enumerate(pairs) if ours.memory_gb in TIGHT_GB]
        text = (
            f"first phase no longer in {sum(first)} of {len(pairs)} ({sum(first[n] for n in tight)} of {len(tight)} "
            f"below 10 GB), schedule no shorter in {sum(second)} ({sum(second[n] for n in tight)})"
        )
        return min(sum(first), sum(second)) > len(pairs) / 2, text

    right, summary = _by_reading(judge)
    return Finding(right, "in most cases", summary)


def scales_where_memory_allows(results: Results) -> Finding:
    def judge(scheme: str, madpipe: str) -> tuple[bool, str]:
        ours, theirs = (results.by_scheme("fig8")[one] for one in (madpipe, scheme))
        _some([row for row in theirs.values() if row.ok])
        parts, right = [], True
        for network in NETWORKS.values():
            tight, roomy = (ours[network, 8, memory, 12].speedup for memory in (4, 16))
            areas = [
                sum(row.speedup for (name, _, _, _), row in rows.items() if name == network) for rows in (ours, theirs)
            ]
            right &= roomy > tight and areas[0] > areas[1]
            parts.append(f"{network} {roomy:.2f} with 16 GB, {tight:.2f} with 4, area {areas[0] / areas[1]:.2f} times")
        return right, ", ".join(parts)

    right, summary = _by_reading(judge, [BASELINE])
    return Finding(right, "more with 12 and 16 GB, more than PipeDream", f"speed-up on 8 devices. {summary}")


def bandwidth_changes_little(results: Results) -> Finding:
    found = {scheme: _gains(results.by_scheme("fig8")[scheme]) for scheme in (PUBLISHED, EXACT)}
    small = {scheme: sum(abs(gain) < 0.2 for gain in gains) for scheme, gains in found.items()}
    parts = [
        f"{scheme}: less than 20 % in {small[scheme]} of {len(gains)} instances, median "
        f"{100 * statistics.median(_some(gains)):.0f} %, from {100 * min(gains):.0f} to {100 * max(gains):.0f} %"
        for scheme, gains in found.items()
    ]
    return Finding(small[PUBLISHED] > len(found[PUBLISHED]) / 2, "little", "; ".join(parts))


def _gains(rows: dict[tuple[str, int, int, int], Row]) -> list[float]:
    """How much more speed-up each instance has on links of 24 GB/s."""
    return [
        rows[network, devices, memory, 24].speedup / row.speedup - 1
        for (network, devices, memory, bandwidth), row in rows.items()
        if bandwidth == 12 and row.ok
    ]


def first_layers_store_most(results: Results) -> Finding:
    parts, right = [], True
    for scheme in (CONTIGUOUS, BASELINE, PUBLISHED):
        rows = [row for row in results.by_scheme("fig7")[scheme].values() if row.ok and not row.several]
        stored = [(max(row.predicted["activations"]), 2 * row.devices - 1) for row in _some(rows)]
        beyond, reached = (sum(flags) for flags in zip(*((n > m, n == m) for n, m in stored), strict=True))
        if scheme != PUBLISHED:  # its integer program may store more than it needs
            right &= not beyond and (reached > 0 or scheme != CONTIGUOUS)
        parts.append(f"{scheme}: 2P - 1 is reached in {reached} of {len(rows)} consecutive plans, exceeded in {beyond}")
    (most,) = texts("madpipe_setup", "first_layer_activations_max")
    return Finding(right, f"up to {most}", "; ".join(parts))


def _by_reading(judge: Callable[[str, str], tuple[bool, str]], readings: Sequence[str] = ()) -> tuple[bool, str]:
    """What `judge` says of PipeDream in the reading that decides, then in the others, then against our exact planner.

    It is given PipeDream's scheme and MadPipe's.
    """
    right, text = judge(BASELINE, PUBLISHED)
    parts = [f"{BASELINE}: {text}"]
    for scheme, madpipe in [*((one, PUBLISHED) for one in readings or PIPEDREAM.values()), (BASELINE, EXACT)]:
        if (scheme, madpipe) != (BASELINE, PUBLISHED):
            name = f"against {madpipe}" if madpipe == EXACT else scheme
            name += " (the paper's sentence)" if scheme == SENTENCE else ""
            try:
                holds, text = judge(scheme, madpipe)
            except MissingData:
                holds, text = False, "no plan fits"
            parts.append(f"{name}: {text}, so that it {'holds' if holds else 'does not hold'}")
    return right, "; ".join(parts)


def _some(found: Sequence[Kind]) -> Sequence[Kind]:
    """Raises MissingData if there are none."""
    if not found:
        raise MissingData("no plan fits in any of its points")
    return found


def _pairs(results: Results, sweep: str, scheme: str, madpipe: str) -> Iterator[tuple[Row, Row]]:
    """A scheme's and MadPipe's row of each instance."""
    rows = results.by_scheme(sweep)
    for instance, row in rows[scheme].items():
        if instance in rows[madpipe]:
            yield row, rows[madpipe][instance]


def _need(sweep: str, of: Callable[[Row], bool]) -> Need[Row]:
    """The points of a sweep that a claim needs; that nothing fits is a result, too."""
    return Need(sweep, keep=of, ok=False)


def _both(sweep: str, of: Callable[[Row], bool], *schemes: str) -> tuple[Need[Row], ...]:
    """Instances for the paper's planner, and the same for other schemes of a sweep."""
    return _need(ALL_OF_THEM, of), _need(sweep, lambda row: row.scheme in schemes and of(row))


def _tight(row: Row) -> bool:
    return row.memory_gb in TIGHT_GB


def _of_fig6(row: Row) -> bool:
    return row.network == RESNET


def _few_gb(row: Row) -> bool:
    return row.network == RESNET and row.devices > 2 and row.memory_gb <= LITTLE_GB


def _of_fig8(row: Row) -> bool:
    return row.memory_gb in SPEED_GB


def _every(row: Row) -> bool:
    return True


CLAIMS: dict[str, Check[Results]] = {
    "MP-3": Check(pipedream_is_slower, _both("fig7", _few_gb, *PIPEDREAM.values(), EXACT)),
    "MP-4": Check(by_a_fifth_below_10_gb, _both("fig7", _tight, *PIPEDREAM.values(), EXACT)),
    "MP-5": Check(more_memory_never_hurts, _both("fig6", _of_fig6, BASELINE, EXACT)),
    "MP-6": Check(partitions_are_optimistic, _both("fig7", _every, *PIPEDREAM.values(), EXACT)),
    "MP-7": Check(scales_where_memory_allows, _both("fig8", _of_fig8, BASELINE, EXACT)),
    "MP-8": Check(bandwidth_changes_little, _both("fig8", _of_fig8, EXACT)),
    "MP-9": Check(first_layers_store_most, _both("fig7", _every, CONTIGUOUS, BASELINE)),
}
