"""A timing by hand: stages of layers 0, 1 and 2 on devices 0, 1, 0; messages of a tick, buffers of 10 bytes."""

from __future__ import annotations

from fractions import Fraction

from harness.core.plan import Stage
from planners.periodic.layer_ticks import Chain
from planners.periodic.task_times import Timing, path

CHAIN = Chain(
    forward=(1, 2, 1), backward=(2, 4, 2), state=(100, 200, 300), stored=(5, 7, 11), sent=(0, 1, 1, 0),
    returned=(0, 1, 1, 0), buffers=(0, 10, 20, 0), memory=1000, tick_s=0.5,
)  # fmt: skip
STAGES = (Stage(0, 0, 0), Stage(1, 1, 1), Stage(2, 2, 0))
TIMING = Timing(CHAIN, STAGES, Fraction(8), tuple(map(Fraction, (0, 1, 2, 4, 5, 6, 8, 9, 13, 14))))
"""
tick      |0 1 2 3 4 5 6 7|8 9 0 1 2 3 4 5|          micro-batch 0; the next one does all of it 8 ticks later
device 0  |0F        2F2B |            0B |          0B ends in tick 16: two micro-batches are stored by stage 0
device 1  |    1F         |  1B           |
link      |  >     >     <|          <    |
"""


def test_the_path_of_a_micro_batch() -> None:
    assert [f"{task.stage}{task.kind}" for task in path(CHAIN, STAGES)] == [
        "0F", "1sent", "1F", "2sent", "2F", "2B", "2returned", "1B", "1returned", "0B",
    ]  # fmt: skip
    assert [task.ticks for task in TIMING.tasks] == [1, 1, 2, 1, 1, 2, 1, 4, 1, 2]
    assert {task.resource for task in TIMING.tasks if "F" not in task.kind} == {(0, 1), (1,), (0,)}


def test_neighbours_on_a_device_send_nothing() -> None:
    together = (Stage(0, 0, 0), Stage(1, 1, 0), Stage(2, 2, 1))
    assert [f"{task.stage}{task.kind}" for task in path(CHAIN, together)] == [
        "0F", "1F", "2sent", "2F", "2B", "2returned", "1B", "0B",
    ]  # fmt: skip


def test_what_devices_hold() -> None:
    assert TIMING.activations() == (2, 2, 1)
    assert TIMING.stored() == (5, 7, 11)
    assert TIMING.fixed() == {0: 100 + 10 + 300 + 20, 1: 200 + 10 + 20}
    assert TIMING.memory() == {0: 430 + 2 * 5 + 11, 1: 230 + 2 * 7}


def test_what_ends_is_gone_before_what_begins() -> None:
    """Stage 0 ends one micro-batch when it begins the one after next: with a shorter wait it never stores two."""
    alone = Timing(CHAIN, (Stage(0, 2, 0),), Fraction(12), (Fraction(0), Fraction(4)))
    assert alone.activations() == (1,) and alone.memory() == {0: 600 + 23}


def test_the_pattern_is_in_seconds_and_bytes() -> None:
    pattern = TIMING.pattern()
    placed = {str(one.op): (one.device, one.start_s, one.shift) for one in pattern.ops}
    assert pattern.period_s == 4.0 == TIMING.period_s
    assert placed == {
        "0F0": (0, 0.0, 0), "1copy0<0": (1, 0.5, 0), "1F0": (1, 1.0, 0), "2copy0<1": (0, 2.0, 0), "2F0": (0, 2.5, 0),
        "2B0": (0, 3.0, 0), "1copy0<2": (1, 0.0, 1), "1B0": (1, 0.5, 1), "0copy0<1": (0, 2.5, 1), "0B0": (0, 3.0, 1),
    }  # fmt: skip
    assert {str(one.op): one.op.bytes for one in pattern.ops if one.op.bytes} == {
        "1copy0<0": 5, "2copy0<1": 10, "1copy0<2": 10, "0copy0<1": 5,
    }  # fmt: skip
    assert TIMING.tasks_s()["1B0"] == 2.0
