"""Whether each claim of claims/torchgpipe.csv holds for our figures. One function for each; none bends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from analysis.torchgpipe import search
from analysis.torchgpipe.figures import (
    gpipe,
    memory,
    paper,
    parameters,
    small_speed_up,
    speed_up,
    throughput,
    utilization,
)
from analysis.torchgpipe.rows import PIPELINES, ROWS, Results
from analysis.verdict import Found, Verdict, judged

SAMPLES = 128
FLOAT_BYTES = 4
SCHEDULES, GPIPE = "tests/harness/test_schedule.py", "tests/engines/gpipe/test_gpipe.py"
TESTS = {
    "TG-5": (f"{SCHEDULES}::test_copied_elements_of_the_unet_ablation",
             "tests/models/test_unet.py::test_copied_elements"),
    "TG-13": (f"{SCHEDULES}::test_number_of_recomputations", f"{GPIPE}::test_the_number_of_recomputed_tasks"),
    "TG-14": (f"{SCHEDULES}::test_every_task_is_in_the_cycle_of_its_sum",
              f"{GPIPE}::test_the_order_of_the_clock_and_of_the_backward_pass"),
    "TG-15": ("tests/engines/test_contract.py::test_gpipe_trains_like_single",
              f"{GPIPE}::test_deferred_batch_norm_equals_the_unsplit_layer"),
}  # fmt: skip
"""Claims that tests settle exactly."""


def verdicts(results: Results) -> list[Verdict]:
    """A verdict for each claim."""
    return judged("torchgpipe", results, CLAIMS, TESTS)


def every_component_speeds_up(results: Results) -> Found:
    speeds = _each(throughput(results, 1, row, "simulated") for row in ROWS[1])
    if not speeds:
        return None
    gains = [100 * (faster / slower - 1) for slower, faster in pairwise(speeds)]
    return all(gain > 2 for gain in gains), f"simulated {_list(gains, '{:+.1f} %')} (paper +34.7 %, +33.6 %, +6.0 %)"


def all_components_double_the_speed(results: Results) -> Found:
    total = speed_up(results, 1, "dep-str-ptl", "simulated")
    return (1.5 <= total <= 2.5, f"simulated {total:.3f} (paper 1.907)") if total else None


def utilization_grows(results: Results) -> Found:
    shares = _each(utilization(results, 1, row, "simulated") for row in ROWS[1])
    if not shares:
        return None
    return _rises(shares), f"simulated {_list(shares, '{:.0f} %')} (paper 44 %, 59 %, 71 %, 75 %)"


def order_of_memory(results: Results) -> Found:
    held = _each(memory(results, 1, row, "simulated") for row in ROWS[1])
    if not held:
        return None
    none, dependency, streams, portals = held
    return (
        none > streams > portals > dependency,
        f"simulated {_list(held, '{:.1f}')} GiB (paper 52.2, 19.1, 30.0, 23.5)",
    )


def portals_spare_the_devices_between(results: Results) -> Found:
    copied = []
    for row in ("dep-str-x", "dep-str-ptl"):
        sent = results.metric(1, row, "simulated", "bytes_sent")
        if sent is None:
            return None
        copied.append((sent["activations"] + sent.get("skips", 0)) / FLOAT_BYTES / SAMPLES)
    return copied == [11_980_800, 6_082_560], f"simulated {copied[0]:,.0f} -> {copied[1]:,.0f} elements a sample"


def no_gain_without_micro_batches(results: Results) -> Found:
    gains = _each(speed_up(results, 2, f"n={n} m=1", "simulated") for n in (4, 8))
    if not gains:
        return None
    return all(gain <= 1.05 for gain in gains), f"simulated {_list(gains)} for n=4, 8 (paper 1.00, 0.93)"


def micro_batches_and_devices_speed_up(results: Results) -> Found:
    grid = {(n, m): speed_up(results, 2, f"n={n} m={m}", "simulated") for n in (2, 4, 8) for m in (1, 4, 32)}
    known = _each(grid.values())
    if not known:
        return None
    lines = {f"n={n}": [grid[n, m] or 0.0 for m in (1, 4, 32)] for n in (2, 4, 8)}
    lines |= {f"m={m}": [grid[n, m] or 0.0 for n in (2, 4, 8)] for m in (4, 32)}
    failed = [name for name, line in lines.items() if not _rises(line)]
    told = ", ".join(f"{name}: {_list(line)}" for name, line in lines.items())
    small = _each(small_speed_up(results, f"n=2 m={m}") for m in (1, 4, 8))
    told += f", measured in small n=2: {_list(small)}" if small else ""
    return not failed, f"simulated {told}" + (f"; not monotone: {', '.join(failed)}" if failed else "")


def eight_devices_reach_five_times(results: Results) -> Found:
    most = speed_up(results, 2, "n=8 m=32", "simulated")
    rows = [f"n={n} m={m}" for n in (2, 4, 8) for m in (4, 32)]
    ours = _each(speed_up(results, 2, row, "simulated") for row in rows)
    if not most or not ours:
        return None
    below = [row for row, own in zip(rows, ours, strict=True) if own <= (gpipe(row) or 0.0)]
    told = f"simulated {most:.2f} (paper 4.95); " + (
        f"not above GPipe at {', '.join(below)}" if below else "above GPipe at m=4, 32"
    )
    return 3.5 <= most <= 6.5 and not below, told


def more_devices_hold_larger_models(results: Results) -> Found:
    largest = [search.largest(results, row) for row in PIPELINES]
    exact = [(parameters(results, 3, row, "simulated"), paper(3, row, "parameters")) for row in PIPELINES]
    if too_small := [row for row in PIPELINES if search.nothing_fits(results, row)]:
        return False, f"no candidate fits on {', '.join(too_small)}"
    if not all(largest) or not all(ours for ours, _ in exact):
        return None
    counts = [found.parameters for found in largest if found]
    told = ", ".join(str(found) for found in largest)
    right = all(ours == published for ours, published in exact)
    return _rises(counts) and right, f"{told}: {counts[-1] / counts[0]:.0f} times (paper 44); counts " + (
        "exact" if right else "differ")  # fmt: skip


def checkpointing_alone_holds_six_times_more(results: Results) -> Found:
    naive, pipeline = (memory(results, 3, row, "simulated") for row in PIPELINES[:2])
    if not naive or not pipeline:
        return None
    apart = 100 * (pipeline / naive - 1)
    return abs(apart) <= 10, f"simulated {pipeline:.1f} and {naive:.1f} GiB, {apart:+.1f} % (paper 20.5 and 20.3)"


def recomputation_costs(results: Results) -> Found:
    ratio = speed_up(results, 4, "Pipeline-1", "simulated")
    if not ratio:
        return None
    local = speed_up(results, 4, "Pipeline-1", "measured")
    told = f"simulated {ratio:.3f}" + (f", measured in small {local:.3f}" if local else "")
    return 0.80 <= ratio <= 0.92, f"{told} (paper 0.858)"


def speed_up_is_sub_linear(results: Results) -> Found:
    gains = _each(speed_up(results, 4, row, "simulated") for row in PIPELINES[2:])
    if not gains:
        return None
    below = all(gain < devices for gain, devices in zip(gains, (2, 4, 8), strict=True))
    return _rises(gains) and below, f"simulated {_list(gains)} on 2, 4, 8 devices (paper 1.25, 2.35, 3.11)"


CLAIMS: dict[str, Callable[[Results], Found]] = {
    "TG-1": every_component_speeds_up,
    "TG-2": all_components_double_the_speed,
    "TG-3": utilization_grows,
    "TG-4": order_of_memory,
    "TG-5": portals_spare_the_devices_between,
    "TG-6": no_gain_without_micro_batches,
    "TG-7": micro_batches_and_devices_speed_up,
    "TG-8": eight_devices_reach_five_times,
    "TG-9": more_devices_hold_larger_models,
    "TG-10": checkpointing_alone_holds_six_times_more,
    "TG-11": recomputation_costs,
    "TG-12": speed_up_is_sub_linear,
}


def _each(figures: Iterable[float | None]) -> list[float]:
    """The figures, if all are known; else none."""
    listed = list(figures)
    known = [figure for figure in listed if figure is not None]
    return known if len(known) == len(listed) else []


def _rises(figures: Sequence[float]) -> bool:
    return all(before < after for before, after in pairwise(figures))


def _list(figures: Sequence[float], form: str = "{:.2f}") -> str:
    return ", ".join(form.format(figure) for figure in figures)
