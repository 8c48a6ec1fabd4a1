"""Whether each claim of paper_claims/myelin.csv holds for our figures. One function for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from analysis.claim_check import Check, Finding, Verdict, check_claims
from analysis.match_records import Need
from analysis.myelin import quantities
from analysis.myelin.sweep_results import DEEPSPEED, FRAMEWORKS, GB, LOCAL, MEGATRON, MYELIN, PAPER, SIZES, Results, Row
from analysis.paper_data import printed, texts
from analysis.run_artifacts import MissingData
from harness.core.plan import Mesh

TESTS = {
    "MY-1": ("tests/engines/myelin/test_contract.py",),
    "MY-3": ("tests/engines/myelin/test_optimizer_step_half.py::test_bytes_of_the_model_state",),
    "MY-12": ("tests/engines/myelin/test_trace.py::test_in_flight_never_more_than_the_limit",),
}
"""Tests that prove claims, or a part of them."""
REASONS = {
    "MY-5": "published is what rings have; in the simulation the sums of a node's six stages do "
    "not begin together, which helps the short ones of 24 stages more. And 24 stages lose less in the pipelining "
    "phase: the paper does not say what they wait for in addition to the head, messages and the bubble.",
    "MY-6": "in the simulation a call costs 14 latencies of 10 us in addition to its bytes, so that many calls cost "
    "little; for the paper's k = 1 it would be some 17 ms for each of 125 calls. What one all-reduce over 8 nodes of "
    "Summit takes, and the launch of one optimizer step, would decide it.",
    "MY-8": "the paper tunes every framework, and so does this check. With ZeRO 1 and tensor parallelism in its stages "
    "DeepSpeed's best grid is a little faster here; the paper's own runs of these grids would decide it.",
    "MY-9": "two constants are calibrated on Myelin's own points; the paper does not say what DeepSpeed and "
    "Megatron-LM lose in addition to what is simulated (kernels, stragglers, their own overheads).",
    "MY-10": "DeepSpeed is 8 % faster here than on Summit, since its own overheads (kernels, stragglers) are unknown. "
    "A trace of its step at 100B would decide it.",
}
"""Why a claim may not hold."""
SAME = 1e-9
"""Losses in float64 that differ by this part of them are equal."""
HALF = "fp16"
STEPS_OF_ROUNDING = 100
"""Number of first steps that are compared for a model whose training magnifies rounding: two runs on one device with
other micro-batches differ by more than `SAME` a little later."""
RING = 7.0
"""(2 * 7/8 * phi / 6) / (2 * 1/2 * phi / 24), what rings over 8 and over 2 replicas send."""
SCHEMES = (quantities.WITHOUT, quantities.WITH)


def verdicts(results: Results) -> list[Verdict]:
    """A verdict for each claim."""
    return check_claims("myelin", results, CLAIMS, TESTS, REASONS)


def losses_coincide(results: Results) -> Finding:
    rows = results.good("fig9", LOCAL)
    exact = [row for row in rows if row["precision"] != HALF]
    parts, right = [], True
    for model, own in _by_model(exact).items():
        serial, *again = (row for row in own if row["engine"] == "single")
        grids = [row for row in own if row["engine"] == "myelin"]
        steps = STEPS_OF_ROUNDING if again else None
        apart = max(difference(row, serial, steps) for row in grids)
        right &= apart <= SAME
        parts.append(f"{model} on {_grids(grids)} at most {apart:.1e} of the loss apart{_of_all(grids, again, serial)}")
    half, figures = _in_half_precision([row for row in rows if row["precision"] == HALF])
    steps = len(rows[0].losses)
    return Finding(right and half, measured=f"float64, {steps} steps: {'; '.join(parts)}. {figures}")


def _in_half_precision(rows: Sequence[Row]) -> tuple[bool, str]:
    """Whether grids in float16 are as near to a run on one rank as a second run there, in other micro-batches, twice.

    The second run adds the same gradients in another order: its distance is what rounding makes of the curve.
    """
    serial, *again = (row for row in rows if row.mesh.size == 1)
    grids = [row for row in rows if row.mesh.size > 1]
    apart, rounding = (max(difference(row, serial) for row in of) for of in (grids, again))
    figures = f"float16: on {_grids(grids)} at most {apart:.1e} apart; another serial run, in other micro-batches, "
    return apart <= 2 * rounding, f"{figures}{rounding:.1e}"


def _grids(rows: Sequence[Row]) -> str:
    return f"{len(rows)} grid{'s' * (len(rows) > 1)}"


def _of_all(grids: Sequence[Row], again: Sequence[Row], serial: Row) -> str:
    """Return how far the losses of a model with a second run on one device differ, and over how many steps that is
    judged."""
    if not again:
        return ""
    later, rounding = (max(difference(row, serial) for row in rows) for rows in (grids, again))
    return (
        f" in the first {STEPS_OF_ROUNDING} steps, which count; {later:.1e} in all (its training magnifies rounding: a "
        f"second run on one device, in other micro-batches, is {rounding:.1e} apart)"
    )


def difference(row: Row, serial: Row, steps: int | None = None) -> float:
    """The largest relative difference of two runs' losses, of the first `steps` or of all.

    Raises MissingData if they have different numbers of steps.
    """
    if len(row.losses) != len(serial.losses):
        raise MissingData(f"{row.place} has losses of {len(row.losses)} steps, {serial.place} of {len(serial.losses)}")
    pairs = list(zip(row.losses, serial.losses, strict=True))[:steps]
    return max(abs(a - b) / max(abs(a), abs(b)) for a, b in pairs)


def _by_model(rows: Sequence[Row]) -> dict[str, list[Row]]:
    by_model: dict[str, list[Row]] = {}
    for row in rows:
        by_model.setdefault(gpt_title(row), []).append(row)
    return by_model


def gpt_title(row: Row) -> str:
    half = ", float16" if row["precision"] == HALF else ""
    return f"GPT ({row.config['model']['layers']}, {row.config['model']['hidden']}){half}"


def batch_time_falls_with_stages(results: Results) -> Finding:
    rows = results.good("fig5")
    times = {row.mesh.pipeline: row.phase_s("pipelining") for row in rows}
    falls = all(times[fewer] < times[more] for fewer, more in pairwise(sorted(times)))
    ratio = times[6] / times[24]
    summary = ", ".join(f"{times[stages]:.1f}" for stages in sorted(times))
    summary += f" s on 6, 12, 24, 48 stages (calibrated on 48); t(6) / t(24) = {ratio:.2f}"
    said = 1 - printed(quantities.STAGES, "batch_time_speedup_from_24_to_6") / 100
    plotted = [printed(quantities.IPDPS, "batch_time", case=f"G_inter={stages}") for stages in (6, 24)]
    theirs = f"t(6) / t(24) = {said:.2f}, read off {plotted[0] / plotted[1]:.2f}"
    return Finding(falls and 0.70 <= ratio <= 0.85, theirs, summary)


def state_is_a_fifth(results: Results) -> Finding:
    rows = results.good("fig6")
    exact = all(quantities.state_is_exact(row) for row in rows)
    plain, offloaded = rows[0], rows[-1]
    each = [quantities.state_of_a_parameter(row) for row in (plain, offloaded)]
    summary = (
        f"accounted on every stage: {'' if exact else 'NOT '}exactly so; on {offloaded.mesh.pipeline} stages "
        f"{each[0]:g} and {each[1]:.2f} bytes a parameter in all"
    )
    theirs = "{:g} bytes a parameter, with offloading {:g} and {:g} x bsize".format(*quantities.published_bytes())
    return Finding(exact, theirs, summary)


def memory_falls_four_times(results: Results) -> Finding:
    rows = results.good("fig6")
    before, after = (row.total_bytes / GB for row in rows[:2])
    summary = f"accounted {before:.0f} -> {after:.0f} GB on 48 GPUs, {before / after:.2f} times"
    most, least = (printed(quantities.MEMOPT, "total_memory_usage", scheme=scheme) for scheme in SCHEMES)
    return Finding(3.5 <= before / after <= 4.5, f"{most:.0f} -> {least:.0f} GB, {most / least:.2f} times", summary)


def phases_of_the_optimization(results: Results) -> Finding:
    rows = results.good("fig6")
    before, after = rows[0], rows[-1]
    ring = after.phase_s("data_parallel") / before.phase_s("data_parallel")
    shrinks, total = (1 - after.phase_s("pipelining") / before.phase_s("pipelining"), 1 - after.step_s / before.step_s)
    right = abs(ring / RING - 1) <= 0.03 and 0.10 <= total <= 0.20
    sums, tasks = (
        [printed(quantities.MEMOPT, f"{phase}_phase_time", scheme=scheme) for scheme in SCHEMES]
        for phase in ("data_parallel", "pipelining")
    )
    less = printed(quantities.MEMOPT, "absolute_batch_time_improvement")
    return Finding(
        right,
        f"sums over replicas {sums[1] / sums[0]:.2f} times as long (rings {RING:g}), pipelining "
        f"{100 * (1 - tasks[1] / tasks[0]):.0f} % shorter, the step {less:g} %",
        f"{ring:.2f} times, {100 * shrinks:.0f} %, {100 * total:.1f} %; the micro-batch of 6 stages is inferred from "
        "their published pipelining phase, which is no evidence",
    )


def interleaving_has_an_optimum(results: Results) -> Finding:
    rows = results.good("fig8")
    times = {int(row["engine.k"]): quantities.tail_s(row) for row in rows}
    none = times.pop(0)
    ordered = sorted(times)
    best = min(ordered, key=lambda k: times[k])
    rises = [times[k] for k in ordered[ordered.index(best) :]]
    interior = best not in (ordered[0], ordered[-1]) and times[best] < none
    right = times[1] > none and interior and all(a <= b for a, b in pairwise(rises))
    summary = (
        f"{times[1]:.2f} s with k = 1, {none:.2f} s without overlap; least {times[best]:.2f} s with k = {best}, "
        f"{rises[-1]:.2f} s with k = {ordered[-1]}"
    )
    return Finding(right, f"least with k = {' and '.join(texts(quantities.CHUNKS, 'optimal_k'))}", summary)


def eight_replicas_and_more_than_megatron(results: Results) -> Finding:
    """Check that tuning gives Myelin at least 8 replicas at every size, and four times Megatron-LM's."""
    chosen = _tuned_meshes(results)
    right = [size for size, by_name in chosen.items() if by_name[MYELIN].data >= max(8, 4 * by_name[MEGATRON].data)]
    parts = [
        f"{size} {', '.join(f'{name} {_mesh(mesh)}' for name, mesh in by_name.items())}"
        for size, by_name in chosen.items()
    ]
    theirs = [", ".join(texts("myelin_table2_tuning", "G_data", scheme=name)) for name in (MYELIN, MEGATRON)]
    return Finding(
        len(right) == len(SIZES),
        f"replicas {theirs[0]}; Megatron-LM {theirs[1]}",
        f"at {', '.join(right) or 'no size'}. Tuned, G_intra x G_inter x G_data: {'; '.join(parts)}",
    )


def _tuned_meshes(results: Results) -> dict[str, dict[str, Mesh]]:
    """The tuned mesh of each framework, for sizes where all three were tuned."""
    chosen = {(row.size, row.framework): row.tuned for row in results.good("table2")}
    by_size = {size: {name: chosen[size, name] for name in FRAMEWORKS if (size, name) in chosen} for size in SIZES}
    return {size: by_name for size, by_name in by_size.items() if len(by_name) == len(FRAMEWORKS)}


def _mesh(mesh: Mesh) -> str:
    return f"{mesh.tensor} x {mesh.pipeline} x {mesh.data}"


def by_size(results: Results) -> dict[str, dict[str, Row]]:
    """The rows of Figure 10 by size and framework; none if a point is missing."""
    if results.missing_points(_need("fig10")):
        return {}
    rows: dict[str, dict[str, Row]] = {}
    for row in results.good("fig10"):
        rows.setdefault(row.size, {})[row.framework] = row
    return rows


def in_order_when_tuned(results: Results) -> Finding:
    """Each framework in the configuration that mode=tune finds for it, as the paper tunes each."""
    steps = {(row.size, row.framework): row.step_s for row in results.good("table2")}
    times = {size: [steps[size, name] for name in FRAMEWORKS] for size in SIZES}
    right = all(ours < deepspeed < megatron for ours, deepspeed, megatron in times.values())
    parts = (f"{size} {', '.join(f'{one:.1f}' for one in three)}" for size, three in times.items())
    return Finding(right, " < ".join(FRAMEWORKS), f"seconds a step, tuned here: {'; '.join(parts)}")


def shares_of_peak(results: Results) -> Finding:
    rows = by_size(results)
    theirs, parts, right = [], [], True
    for name in FRAMEWORKS:
        low, high = (
            every(map(float, texts(quantities.WEAK, f"peak_half_precision_{end}", scheme=name)))
            for every, end in ((min, "low"), (max, "high"))
        )
        shares = [quantities.percent_of_peak(rows[size][name]) for size in SIZES]
        right &= min(shares) <= high and max(shares) >= low
        theirs.append(f"{name} {low:.0f} to {high:.0f} %")
        parts.append(f"{name} {min(shares):.1f} to {max(shares):.1f} %")
    return Finding(right, "; ".join(theirs), f"{'; '.join(parts)}; the 12B Myelin point is the calibrated one")


def gains_at_100b(results: Results) -> Finding:
    rows = by_size(results)
    ours, deepspeed, megatron = (quantities.days(rows["100B"][name]) for name in FRAMEWORKS)
    saved = deepspeed - ours
    right = 1.1 <= deepspeed / ours <= 1.35 and 1.8 <= megatron / ours <= 3.0 and 15 <= saved <= 35
    summary = f"{deepspeed / ours:.2f} and {megatron / ours:.2f} times, {saved:.1f} days saved"
    times = [printed(quantities.WEAK, f"speedup_vs_{name}") for name in ("deepspeed", "megatron")]
    fewer = printed(quantities.WEAK, "estimated_training_time_saved_vs_deepspeed", devices=384)
    return Finding(right, f"{times[0]:g} and {times[1]:g} times, {fewer:g} days saved", summary)


def strong_scaling(results: Results) -> Finding:
    rows = results.good("fig11")
    at = {(row.framework, row.mesh.size): quantities.days(row) for row in rows}
    gains = [100 * (1 - at[MYELIN, 384] / at[name, 384]) for name in (DEEPSPEED, MEGATRON)]
    scaled = at[MYELIN, 48] / (8 * at[MYELIN, 384])
    right = at[MYELIN, 384] < at[DEEPSPEED, 384] < at[MEGATRON, 384] and all(5 <= gain <= 25 for gain in gains)
    summary = (
        f"384 GPUs: {gains[0]:.1f} % over DeepSpeed, {gains[1]:.1f} % over Megatron-LM; 8 times the replicas at "
        f"{100 * scaled:.1f} % efficiency"
    )
    theirs = [printed(quantities.STRONG, f"improvement_of_myelin_over_{name}") for name in ("deepspeed", "megatron")]
    return Finding(right and scaled > 0.9, f"{theirs[0]:g} % and {theirs[1]:g} %", summary)


def in_flight_within_the_limit(results: Results) -> Finding:
    parts, right = [], True
    for sweep, scale in (("fig10", "paper"), ("fig9", LOCAL)):
        rows = results.good(sweep, scale, lambda row: row["engine"] == "myelin" and row["mesh.pipeline"] != "1")
        right &= all(row.in_flight <= row.mesh.pipeline for row in rows)
        parts.append(", ".join(f"{row.in_flight} of {row.mesh.pipeline}" for row in rows))
    return Finding(right, "at most G_inter in flight", *parts)


def _need(sweep: str, scale: str = PAPER) -> tuple[Need[Row]]:
    return (Need(sweep, scale),)


CLAIMS: Mapping[str, Check[Results]] = {
    "MY-1": Check(losses_coincide, _need("fig9", LOCAL)),
    "MY-2": Check(batch_time_falls_with_stages, _need("fig5")),
    "MY-3": Check(state_is_a_fifth, _need("fig6")),
    "MY-4": Check(memory_falls_four_times, _need("fig6")),
    "MY-5": Check(phases_of_the_optimization, _need("fig6")),
    "MY-6": Check(interleaving_has_an_optimum, _need("fig8")),
    "MY-7": Check(eight_replicas_and_more_than_megatron, _need("table2")),
    "MY-8": Check(in_order_when_tuned, _need("table2")),
    "MY-9": Check(shares_of_peak, _need("fig10")),
    "MY-10": Check(gains_at_100b, _need("fig10")),
    "MY-11": Check(strong_scaling, _need("fig11")),
    "MY-12": Check(in_flight_within_the_limit, _need("fig10") + _need("fig9", LOCAL)),
}
