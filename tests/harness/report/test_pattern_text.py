"""What the terminal shows of the pattern of a plan."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from harness.core.pattern import Pattern
from harness.core.plan import Mesh, Plan, Stage
from harness.report.pattern_text import LEGEND, SHOWN, UNNAMED, grid, grid_rows, least_s, pattern_text
from tests.support.patterns import TWO, Chain, patterns, placed
from tests.tiers import examples

NEAR = Pattern(6, (placed("0F0", 0, 0), placed("1copy0<0", 1, 0), placed("1F0", 2, 0), placed("1B0", 3, 0),
                   placed("0copy0<1", 5, 0), placed("0B0", 1, 1)))  # fmt: skip
OVER = Pattern(6, (placed("0F0", 2, 0), placed("1copy0<0", 3, 0), placed("1F0", 4, 0), placed("1B0", 5, 0),
                   placed("0copy0<1", 1, 1), placed("0B0", 4, 1)))  # fmt: skip
"""1B goes over the end of a period."""
SECONDS = {"0F0": 1.0, "1copy0<0": 1.0, "1F0": 1.0, "1B0": 2.0, "0copy0<1": 1.0, "0B0": 2.0}


def test_it_looks_like_the_picture() -> None:
    assert grid(NEAR, SECONDS, 75) == (
        "period      |0                             |1                             |\n"
        "device 0    |0F0--0B1-------...............|0F0--0B1-------...............|\n"
        "device 1    |..........1F0--1B0-------.....|..........1F0--1B0-------.....|\n"
        "link 0 - 1  |.....0>1 0...............1>0 0|.....0>1 0...............1>0 0|\n" + LEGEND
    )


def test_what_goes_over_the_end_of_a_period_continues_after_it() -> None:
    assert grid(OVER, SECONDS, 75).splitlines()[1:4] == [
        "device 0    |..........0F0--.....0B1-------|..........0F0--.....0B1-------|",
        "device 1    |-----...............1F0--1B0--|-----...............1F0--1B0--|",
        "link 0 - 1  |.....1>0 1.....0>1 0..........|.....1>0 1.....0>1 0..........|",
    ]


def test_a_name_is_after_the_end_of_a_period_where_there_is_no_room_before() -> None:
    """1B takes the last 0.3 s of a period, and most of the next one."""
    late = replace(OVER, ops=(*OVER.ops[:3], placed("1B0", 5.7, 0), placed("0copy0<1", 2.7, 1), placed("0B0", 4, 1)))
    assert grid(late, SECONDS | {"1B0": 3.0}, 75).splitlines()[2] == (
        "device 1    |1B0----------.......1F0--...--|1B0----------.......1F0--...--|"
    )


def test_short_ops_show_less() -> None:
    assert grid(OVER, SECONDS, 40).splitlines()[1:4] == [
        "device 0    |....0F..0B1-|....0F..0B1-|",
        "device 1    |--......F-1B|--......F-1B|",
        "link 0 - 1  |..>-..>-....|..>-..>-....|",
    ]
    assert grid(OVER, SECONDS, 40).splitlines()[4:-1] == [
        "no room for the names of device 0: 0F0;",
        "device 1: 1B0, 1F0; link 0 - 1: 1>0 1,",
        "0>1 0",
    ]
    short = SECONDS | {"0F0": 0.01, "1copy0<0": 0.0}
    assert grid(OVER, short, 40).splitlines()[1] == "device 0    |....F...0B1-|....F...0B1-|"
    assert grid(OVER, short, 40).splitlines()[3] == "link 0 - 1  |..>-..>.....|..>-..>.....|"


def test_a_very_short_op_next_to_another_one_is_not_shown() -> None:
    full = replace(NEAR, ops=(*NEAR.ops[:5], placed("0B0", 0.01, 1)))
    assert grid(full, SECONDS | {"0F0": 0.01}, 40).splitlines()[1] == "device 0    |0B1-........|0B1-........|"


def test_both_directions_at_once_have_a_row_each() -> None:
    full = Pattern(3, (placed("0F0", 0, 0), placed("1copy0<0", 1, 0), placed("1F0", 2, 0), placed("1B0", 0, 1),
                       placed("0copy0<1", 1, 1), placed("0B0", 2, 1)))  # fmt: skip
    assert grid(full, dict.fromkeys(SECONDS, 1.0), 48).splitlines()[3:5] == [
        "link 0 > 1  |.....0>1 0-.....|.....0>1 0-.....|",
        "link 1 > 0  |.....1>0 1-.....|.....1>0 1-.....|",
    ]


def test_an_op_without_a_duration_is_named() -> None:
    with pytest.raises(KeyError, match="0B0"):
        grid(NEAR, {name: 1.0 for name in SECONDS if name != "0B0"})


@settings(max_examples=examples(60))
@given(patterns())
def test_with_room_for_all_every_slot_and_every_label_is_there(case: tuple[Chain, Pattern]) -> None:
    chain, pattern = case
    period, seconds, slot = int(pattern.period_s), chain.durations(), 8
    margin = max(map(len, grid_rows(pattern, seconds)))
    text = grid(pattern, seconds, margin + 5 + SHOWN * slot * period)
    assert UNNAMED not in text
    lines = text.splitlines()[1:-1]
    rows = {line.split("|")[0].strip(): line.split("|")[1:3] for line in lines}
    expected: dict[str, str] = dict.fromkeys(rows, "." * slot * period * SHOWN)
    for p in pattern.ops:
        length = int(seconds[str(p.op)])
        if p.op.peer is None:
            name, label = f"device {p.device}", f"{p.op.stage}{p.op.kind}{p.shift}"
        else:
            ends = chain.devices[p.op.peer], p.device
            name, label = f"link {min(ends)} - {max(ends)}", f"{p.op.peer}>{p.op.stage} {p.shift}"
            name = name if name in rows else f"link {ends[0]} > {ends[1]}"
        for number in range(-1, SHOWN):
            start = (int(p.start_s) + number * period) * slot
            text = label.ljust(min(length * slot, slot * period), "-") if number >= 0 else "-" * length * slot
            low, high = max(start, 0), min(start + length * slot, len(expected[name]))
            if high > low:
                whole = expected[name]
                expected[name] = whole[:low] + text[low - start : high - start] + whole[high:]
    assert {name: "".join(row) for name, row in rows.items()} == expected


@settings(max_examples=examples(60))
@given(patterns(), st.integers(40, 130))
def test_in_any_width_no_label_is_wrong_and_no_name_is_missing(case: tuple[Chain, Pattern], width: int) -> None:
    """What is written where an op begins, or after the end of a period that it crosses, belongs to it; what is idle
    half a column around is never busy."""
    chain, pattern = case
    seconds = chain.durations()
    text = grid(pattern, seconds, width)
    assert all(len(line) <= width for line in text.splitlines()[:-1])
    drawn, _, rest = text.removesuffix(LEGEND).partition(UNNAMED)
    unnamed = {name: names.split(", ") for name, _, names in (row.partition(": ") for row in _rows(rest))}
    lines = drawn.splitlines()[1:]
    for line, (name, row) in zip(lines, grid_rows(pattern, seconds).items(), strict=True):
        title, *periods, _ = line.split("|")
        assert title.strip() == name
        cells, stand = len(periods[0]), set(unnamed.get(name, ()))
        for number, cell in enumerate(periods):
            for match in re.finditer(r"\d+>\d+( \d+)?(?=[-.|]|$)|\d+[FB]\d*(?=[-.|]|$)|[FB>]", cell):
                column = number * cells + match.start()
                near = [box for box in row if abs(box.start * cells - column) <= 0.5]
                near += [box for box in row if match.start() == 0 and box.start < number < box.end]
                assert any(match.group() in box.labels() for box in near), (line, match)
                stand.add(match.group())
        assert stand >= {next(box.labels()) for box in row}


def _rows(rest: str) -> list[str]:
    return [row for row in " ".join(rest.split()).split("; ") if row]


REPORTED = {
    "period_s": 3.0, "least_s": 2.5, "least_of_any_s": 2.0, "contiguous_s": 3.5, "one_device_s": 6.0,
    "activations": [2, 1],
    "pattern_memory_bytes": [2**30, 2**29], "memory_limit_bytes": 2**31, "finished": True,
    "tasks_s": {"0F0": 1.0, "1F0": 1.0, "1B0": 2.0, "0B0": 2.0},
}  # fmt: skip
PLAN = Plan(Mesh(pipeline=2), (Stage(0, 1, 0), Stage(2, 3, 1)), 4, pattern=TWO, predicted=REPORTED)


def shown(plan: Plan) -> str:
    assert plan.pattern is not None
    out = io.StringIO()
    Console(file=out, width=140).print(pattern_text(plan, plan.pattern))
    return out.getvalue()


def test_period_bounds_and_gaps() -> None:
    lines = [" ".join(line.split()) for line in shown(PLAN).splitlines()]
    assert lines[:5] == [
        "period 3.00 s between one micro-batch and the next; a step has filling and draining, too",
        "speed-up 2.00 over one device with memory enough, without filling",
        "lower bound 2.50 s of whole stages, one device having several: gap 20 %",
        "lower bound 2.00 s of any schedule: gap 50 %",
        "3.50 s the best consecutive stages",
    ]
    assert "0 0 2 1.0 GiB 2.0 GiB" in lines and "1 1 1 512.0 MiB 2.0 GiB" in lines
    assert any(line.startswith("device 0 |0F0") for line in lines)


def test_two_numbers_of_one_device_have_different_names() -> None:
    """The table of stages, above, has the simulated step's."""
    text = shown(PLAN)
    assert "device  stages  stored micro-batches     memory    limit" in text
    assert "memory: while the pattern is repeated, as the planner counts; peak memory, above: in the simu" in text


@pytest.mark.parametrize(
    ("bounds", "least"),
    [({}, 2.5), ({"least_s": 3.2}, 2.0), ({"least_s": None}, 2.0), ({"least_s": None, "least_of_any_s": None}, None)],
)
def test_the_bound_of_a_plan_is_the_longest_one_of_its_kind(bounds: dict[str, float | None], least: float) -> None:
    assert least_s(replace(PLAN, predicted=REPORTED | bounds)) == least


def test_a_bound_of_another_kind_of_plan_is_no_bound() -> None:
    text = shown(replace(PLAN, predicted=REPORTED | {"least_s": 3.2}))
    assert "this plan is of another kind" in text and text.count("lower bound") == 1


def test_a_time_limit_that_was_reached_is_reported() -> None:
    assert "the best when time was up" in shown(replace(PLAN, predicted=REPORTED | {"finished": False}))


def test_planners_that_prove_nothing_show_no_bounds() -> None:
    few = {key: value for key, value in REPORTED.items() if "least" not in key and key != "contiguous_s"}
    assert "bound" not in shown(replace(PLAN, predicted=few))
