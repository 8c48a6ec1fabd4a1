"""Whether each claim of paper_claims/torchgpipe.csv holds for our figures. One function for each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from analysis.claim_check import Check, Finding, Verdict, check_claims
from analysis.match_records import Need, Row
from analysis.run_artifacts import MissingData
from analysis.torchgpipe import table3
from analysis.torchgpipe.quantities import (
    gpipe,
    memory,
    paper,
    parameters,
    small_speed_up,
    speed_up,
    throughput,
    utilization,
)
from analysis.torchgpipe.sweep_results import PIPELINES, ROWS, Results, searched

SAMPLES = 128
NEAR = 0.15
"""Factors of the paper that a claim states are met within this part of them."""
FLOAT_BYTES = 4
ELEMENTS = (11_980_800, 6_082_560)
"""Copied for a sample without and with portals, from the paper's shapes."""
SCHEDULES, GPIPE = "tests/harness/schedule/test_schedule.py", "tests/engines/gpipe/test_gpipe_module.py"
TESTS = {
    "TG-5": (
        f"{SCHEDULES}::test_copied_elements_of_the_unet_ablation",
        "tests/models/test_unet.py::test_copied_elements",
    ),
    "TG-13": (f"{SCHEDULES}::test_number_of_recomputations", f"{GPIPE}::test_the_number_of_recomputed_tasks"),
    "TG-14": (
        f"{SCHEDULES}::test_every_task_is_in_the_cycle_of_its_sum",
        f"{GPIPE}::test_the_order_of_the_clock_and_of_the_backward_pass",
    ),
    "TG-15": (
        "tests/engines/test_contract.py::test_gpipe_trains_like_single",
        f"{GPIPE}::test_deferred_batch_norm_equals_the_unsplit_layer",
    ),
}
"""Claims that tests prove exactly."""
RESERVED = (
    "simulated are the allocator's pools of all streams, without unused parts of blocks and workspaces; and Naive-1 "
    "counts more live bytes than the paper reserves. A snapshot of the allocator on a GPU would decide it."
)
HIDDEN = (
    "copy streams hide nearly all copies of skips on the simulated PCIe, so that portals have little left to spare. "
    "A measured timeline of the paper's machine, where pairs of cards share switches, would decide it."
)
GRID = (
    "8 devices hold more in the simulation: whether a model fits is judged by live bytes, not by what an allocator "
    "reserves, and the sizes tried are a coarse grid. A snapshot of the allocator on a GPU would decide it."
)
SWITCHES = (
    "8 devices are faster in the simulation than on the paper's machine; its PCIe switches and sockets, which eight "
    "cards share and four need not, are not in conf/cluster/p40x8.yaml. Their bandwidths would decide it."
)
REASONS = {"TG-1": HIDDEN, "TG-4": RESERVED, "TG-9": GRID, "TG-10": RESERVED, "TG-12": SWITCHES}
"""Why a claim may not hold."""


def verdicts(results: Results) -> list[Verdict]:
    """A verdict for each claim."""
    return check_claims("torchgpipe", results, CLAIMS, TESTS, REASONS)


def every_component_speeds_up(results: Results) -> Finding:
    speeds = _each(throughput(results, 1, row, "simulated") for row in ROWS[1])
    gains, theirs = (
        [100 * (faster / slower - 1) for slower, faster in pairwise(own)]
        for own in (speeds, _paper(1, ROWS[1], "throughput"))
    )
    return Finding(all(gain > 2 for gain in gains), *(_list(one, "{:+.1f} %") for one in (theirs, gains)))


def all_components_double_the_speed(results: Results) -> Finding:
    (total,) = _each([speed_up(results, 1, "dep-str-ptl", "simulated")])
    return Finding(1.5 <= total <= 2.5, _list(_paper(1, ["dep-str-ptl"], "speed-up"), "{:.3f}"), f"{total:.3f}")


def utilization_grows(results: Results) -> Finding:
    shares = _each(utilization(results, 1, row, "simulated") for row in ROWS[1])
    theirs = _paper(1, ROWS[1], "utilization")
    return Finding(_rises(shares), *(_list(one, "{:.0f} %") for one in (theirs, shares)))


def order_of_memory(results: Results) -> Finding:
    held = _each(memory(results, 1, row, "simulated") for row in ROWS[1])
    none, dependency, streams, portals = held
    right = none > streams > portals > dependency
    return Finding(right, *(f"{_list(one, '{:.1f}')} GiB" for one in (_paper(1, ROWS[1], "memory"), held)))


def portals_spare_the_devices_between(results: Results) -> Finding:
    copied = []
    for row in ("dep-str-x", "dep-str-ptl"):
        sent = results.metric(1, row, "simulated", "bytes_sent")
        copied.append((sent["activations"] + sent.get("skips", 0)) / FLOAT_BYTES / SAMPLES)
    parts = [f"{before:,.0f} -> {after:,.0f} elements a sample" for before, after in (ELEMENTS, copied)]
    return Finding(tuple(copied) == ELEMENTS, *parts)


def no_gain_without_micro_batches(results: Results) -> Finding:
    gains = _each(speed_up(results, 2, f"n={n} m=1", "simulated") for n in (4, 8))
    theirs = _paper(2, ["n=4 m=1", "n=8 m=1"], "speed-up")
    return Finding(all(gain <= 1.05 for gain in gains), f"{_list(theirs)} for n=4, 8", _list(gains))


def micro_batches_and_devices_speed_up(results: Results) -> Finding:
    cells = [(n, m) for n in (2, 4, 8) for m in (1, 4, 32)]
    ours = _each(speed_up(results, 2, f"n={n} m={m}", "simulated") for n, m in cells)
    grid = dict(zip(cells, ours, strict=True))
    lines = {f"n={n}": [grid[n, m] for m in (1, 4, 32)] for n in (2, 4, 8)}
    lines |= {f"m={m}": [grid[n, m] for n in (2, 4, 8)] for m in (4, 32)}
    failed = [name for name, line in lines.items() if not _rises(line)]
    summary = ", ".join(f"{name}: {_list(line)}" for name, line in lines.items())
    summary += f"; not monotone: {', '.join(failed)}" if failed else ""
    small = [one for m in (1, 4, 8) if (one := small_speed_up(results, f"n=2 m={m}"))]
    return Finding(not failed, "", summary, f"in small n=2: {_list(small)}" if len(small) == 3 else "")


def eight_devices_reach_five_times(results: Results) -> Finding:
    rows = [f"n={n} m={m}" for n in (2, 4, 8) for m in (4, 32)]
    ours = _each(speed_up(results, 2, row, "simulated") for row in rows)
    most = ours[-1]
    below = [row for row, own in zip(rows, ours, strict=True) if own <= gpipe(row)]
    compared = f"not above GPipe at {', '.join(below)}" if below else "above GPipe at m=4, 32"
    return Finding(3.5 <= most <= 6.5 and not below, _list(_paper(2, rows[-1:], "speed-up")), f"{most:.2f}; {compared}")


def more_devices_hold_larger_models(results: Results) -> Finding:
    largest, theirs = {row: table3.largest(results, row) for row in PIPELINES}, _paper(3, PIPELINES, "parameters")
    times = f"{theirs[-1] / theirs[0]:.0f} times"
    if too_small := [row for row, candidate in largest.items() if candidate is None]:
        return Finding(False, times, f"no candidate fits on {', '.join(too_small)}")
    ours = _each(parameters(results, 3, row, "simulated") for row in PIPELINES)
    counts = [candidate.parameters for candidate in largest.values() if candidate]
    summary = ", ".join(str(candidate) for candidate in largest.values())
    right = ours == theirs
    ratio, published = counts[-1] / counts[0], theirs[-1] / theirs[0]
    summary += f": {ratio:.1f} times, {100 * (ratio / published - 1):+.0f} %; counts {'exact' if right else 'differ'}"
    return Finding(_rises(counts) and right and abs(ratio / published - 1) <= NEAR, times, summary)


def checkpointing_alone_holds_six_times_more(results: Results) -> Finding:
    naive, pipeline = _each(memory(results, 3, row, "simulated") for row in PIPELINES[:2])
    apart = 100 * (pipeline / naive - 1)
    theirs = _paper(3, PIPELINES[1::-1], "memory")
    summary = f"{pipeline:.1f} and {naive:.1f} GiB, {apart:+.1f} %"
    return Finding(abs(apart) <= 10, f"{theirs[0]:.1f} and {theirs[1]:.1f} GiB", summary)


def recomputation_costs(results: Results) -> Finding:
    (ratio,) = _each([speed_up(results, 4, "Pipeline-1", "simulated")])
    local = speed_up(results, 4, "Pipeline-1", "measured")
    theirs = _list(_paper(4, ["Pipeline-1"], "speed-up"), "{:.3f}")
    return Finding(0.80 <= ratio <= 0.92, theirs, f"{ratio:.3f}", f"in small {local:.3f}" if local else "")


def speed_up_is_sub_linear(results: Results) -> Finding:
    gains = _each(speed_up(results, 4, row, "simulated") for row in PIPELINES[2:])
    theirs = _paper(4, PIPELINES[2:], "speed-up")
    near = all(abs(gain / published - 1) <= NEAR for gain, published in zip(gains, theirs, strict=True))
    parts = [_list(one, "{:.3f}") for one in (theirs, gains)]
    return Finding(near and _sub_linear(gains), f"{parts[0]} on 2, 4, 8 devices", parts[1])


def _sub_linear(gains: Sequence[float]) -> bool:
    return _rises(gains) and all(gain < devices for gain, devices in zip(gains, (2, 4, 8), strict=True))


TABLE_1, TABLE_2, TABLE_4 = ((Need[Row](f"table{table}", "paper"),) for table in (1, 2, 4))
LARGEST = (Need[Row]("table3", "paper", lambda row: not searched(row)),)
CLAIMS: dict[str, Check[Results]] = {
    "TG-1": Check(every_component_speeds_up, TABLE_1),
    "TG-2": Check(all_components_double_the_speed, TABLE_1),
    "TG-3": Check(utilization_grows, TABLE_1),
    "TG-4": Check(order_of_memory, TABLE_1),
    "TG-5": Check(portals_spare_the_devices_between, TABLE_1),
    "TG-6": Check(no_gain_without_micro_batches, TABLE_2),
    "TG-7": Check(micro_batches_and_devices_speed_up, TABLE_2),
    "TG-8": Check(eight_devices_reach_five_times, TABLE_2),
    "TG-9": Check(more_devices_hold_larger_models, (*LARGEST, Need("table3", "paper", searched, ok=False))),
    "TG-10": Check(checkpointing_alone_holds_six_times_more, LARGEST),
    "TG-11": Check(recomputation_costs, TABLE_4),
    "TG-12": Check(speed_up_is_sub_linear, TABLE_4),
}


def _each(figures: Iterable[float | None]) -> list[float]:
    """The figures. Raises MissingData if one is not known."""
    listed = list(figures)
    known = [figure for figure in listed if figure is not None]
    if len(known) < len(listed):
        raise MissingData(f"{len(listed) - len(known)} of {len(listed)} figures are not in the records")
    return known


def _paper(table: int, rows: Iterable[str], quantity: str) -> list[float]:
    """The published figures of rows."""
    return _each(paper(table, row, quantity) for row in rows)


def _rises(figures: Sequence[float]) -> bool:
    return all(before < after for before, after in pairwise(figures))


def _list(figures: Sequence[float], form: str = "{:.2f}") -> str:
    return ", ".join(form.format(figure) for figure in figures)
