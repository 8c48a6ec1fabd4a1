from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.pattern import Pattern
from harness.pattern_grid import LEGEND, NAMELESS, SHOWN, boxes, grid
from tests.harness.patterns import Chain, patterns, placed

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


def test_what_goes_over_the_end_of_a_period_goes_on_behind_it() -> None:
    assert grid(OVER, SECONDS, 75).splitlines()[1:4] == [
        "device 0    |..........0F0--.....0B1-------|..........0F0--.....0B1-------|",
        "device 1    |-----...............1F0--1B0--|-----...............1F0--1B0--|",
        "link 0 - 1  |.....1>0 1.....0>1 0..........|.....1>0 1.....0>1 0..........|",
    ]


def test_a_name_stands_behind_the_end_of_a_period_where_there_is_no_room_before() -> None:
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


def test_a_very_short_op_beside_another_one_is_not_shown() -> None:
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


@settings(max_examples=60)
@given(patterns())
def test_with_room_for_all_every_slot_and_every_label_is_there(case: tuple[Chain, Pattern]) -> None:
    chain, pattern = case
    period, seconds, slot = int(pattern.period_s), chain.durations(), 8
    margin = max(map(len, boxes(pattern, seconds)))
    text = grid(pattern, seconds, margin + 5 + SHOWN * slot * period)
    assert NAMELESS not in text
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


@settings(max_examples=60)
@given(patterns(), st.integers(40, 130))
def test_in_any_width_no_label_is_wrong_and_no_name_is_missing(case: tuple[Chain, Pattern], width: int) -> None:
    """What is written where an op begins, or behind the end of a period that it goes over, belongs to it; what is idle
    half a column around is never busy."""
    chain, pattern = case
    seconds = chain.durations()
    text = grid(pattern, seconds, width)
    assert all(len(line) <= width for line in text.splitlines()[:-1])
    drawn, _, lacking = text.removesuffix(LEGEND).partition(NAMELESS)
    told = {name: names.split(", ") for name, _, names in (row.partition(": ") for row in _rows(lacking))}
    lines, rows = drawn.splitlines()[1:], boxes(pattern, seconds)
    for line, (name, row) in zip(lines, rows.items(), strict=True):
        title, *periods, _ = line.split("|")
        assert title.strip() == name
        cells, stand = len(periods[0]), set(told.get(name, ()))
        for number, cell in enumerate(periods):
            for found in re.finditer(r"\d+>\d+( \d+)?(?=[-.|]|$)|\d+[FB]\d*(?=[-.|]|$)|[FB>]", cell):
                column = number * cells + found.start()
                near = [box for box in row if abs(box.start * cells - column) <= 0.5]
                near += [box for box in row if found.start() == 0 and box.start < number < box.end]
                assert any(found.group() in box.labels() for box in near), (line, found)
                stand.add(found.group())
        assert stand >= {next(box.labels()) for box in row}


def _rows(lacking: str) -> list[str]:
    return [row for row in " ".join(lacking.split()).split("; ") if row]
