"""Segments of a stage that are recomputed, and what that makes of a profile."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.core.activation_checkpointing import checkpointed, distance, interpretations, nearest, segments
from harness.core.cluster import Cluster
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import LayerProfile, ModelProfile, Skip, Tied
from harness.core.plan import Plan, Stage
from harness.schedule.builders.single import single
from harness.simulator import simulate
from harness.simulator.memory_timeline import working_bytes

LAYER = LayerProfile(forward_s=1.0, backward_s=2.0, flops=7, output_bytes=10, saved_bytes=100)
SIX = ModelProfile(tuple(replace(LAYER, name=f"l{n}") for n in range(6)), input_bytes=10)
HALVES = Plan.contiguous([3, 3])


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        ("never", [[], []]),
        ("1", [[(0, 0), (1, 1), (2, 2)], [(3, 3), (4, 4)]]),
        ("2", [[(0, 1), (2, 2)], [(3, 4)]]),
        ("3", [[(0, 2)], [(3, 4)]]),
        ("100", [[(0, 2)], [(3, 4)]]),
        ("auto", [[(0, 2)], [(3, 4)]]),
    ],
)
def test_the_last_layer_of_the_model_is_in_no_segment(every: str, expected: list[list[tuple[int, int]]]) -> None:
    assert [segments(stage, every, 6) for stage in HALVES.stages] == expected


def test_a_stage_of_the_last_layer_alone_has_none() -> None:
    assert segments(Stage(5, 5, 1), "1", 6) == []
    assert segments(Stage(0, 0, 0), "auto", 1) == []


@pytest.mark.parametrize(
    ("own", "layers", "expected"),
    [(8, 48, 8), (4, 48, 4), (12, 48, 6), (24, 48, 6), (2, 96, 2), (7, 14, 1), (6, 6, 2), (1, 50, 1)],
)
def test_the_divisor_next_to_the_root(own: int, layers: int, expected: int) -> None:
    """12 of 48 layers: 6 is nearer to 6.93 than 12."""
    found = distance("auto", own, layers)
    assert found == expected
    assert (distance("never", own, layers), distance("5", own, layers)) == (0, 5)


def test_the_smaller_of_two_that_are_as_near() -> None:
    assert nearest(4, 3.0) == 2


@given(st.integers(1, 12), st.integers(1, 8))
def test_both_readings_of_the_formula(each: int, stages: int) -> None:
    """Their minima, found by trying."""
    layers = each * stages
    grid = [step / 200 for step in range(1, 200 * layers + 1)]
    meant, printed = interpretations(layers, stages)
    assert min(stages * (layers / (stages * ac) + 1) + ac for ac in grid) == pytest.approx(meant.kept, rel=1e-3)
    assert min(stages * (layers / (stages * ac) + 1 + ac) for ac in grid) == pytest.approx(printed.kept, rel=1e-3)
    assert (meant.optimum, printed.optimum) == (math.sqrt(layers), math.sqrt(layers / stages))
    assert each % meant.every == each % printed.every == 0
    assert meant.every == distance("auto", each, layers)


def test_the_published_model() -> None:
    """48 layers on 6 stages: every 8 layers as meant, every 2 or 4 as printed (2.83)."""
    assert [reading.every for reading in interpretations(48, 6)] == [8, 2]


def test_never_changes_nothing() -> None:
    assert checkpointed(SIX, HALVES, "never") == SIX


def test_what_becomes_of_the_layers() -> None:
    found = checkpointed(SIX, HALVES, "2").layers
    assert [layer.backward_s for layer in found] == [3, 3, 3, 3, 3, 2]
    assert [layer.forward_s for layer in found] == [1] * 6
    assert [layer.saved_bytes for layer in found] == [10, 0, 10, 10, 0, 100], "inputs of segments"
    assert [layer.working_bytes for layer in found] == [100, 200, 100, 100, 200, 0]
    assert [layer.recomputed_flops for layer in found] == [7, 7, 7, 7, 7, 0]


def test_all_else_of_a_layer_stays() -> None:
    whole = replace(LAYER, name="l1", kernels=3, param_bytes=8, weights=2, tied=(Tied("l1.weight", 8),))
    profile = ModelProfile((replace(LAYER, forward_fixed=0.5), whole, LAYER), input_bytes=10)
    found = checkpointed(profile, Plan.contiguous([3]), "2")
    numbers = {"backward_s": 3.0, "saved_bytes": 0, "working_bytes": 200, "recomputed_flops": 7}
    assert found.layers[1] == replace(whole, **numbers)
    assert profile.layers[1] is whole
    assert (whole.backward_s, whole.saved_bytes) == (2, 100)


def test_what_a_layer_works_with_anyway_comes_on_top() -> None:
    busy = replace(SIX, layers=tuple(replace(layer, working_bytes=7) for layer in SIX.layers))
    assert [layer.working_bytes for layer in checkpointed(busy, HALVES, "2").layers] == [107, 207, 107, 107, 207, 7]


def test_the_last_layer_keeps_its_input_itself() -> None:
    """What a layer kept for the next one, too, is gone until it is computed again."""
    few = replace(SIX, layers=(*SIX.layers[:5], replace(LAYER, saved_bytes=4)))
    assert checkpointed(few, HALVES, "2").layers[5].saved_bytes == 10
    assert checkpointed(few, Plan.contiguous([5, 1]), "2").layers[5].saved_bytes == 4, "a message brings it"


def test_a_segment_keeps_the_skips_of_earlier_segments() -> None:
    skips = (Skip(0, 2, 5, "far"), Skip(0, 1, 3, "near"), Skip(0, 4, 9, "away"))
    found = checkpointed(replace(SIX, skips=skips), HALVES, "2").layers
    assert [layer.saved_bytes for layer in found] == [10, 0, 10 + 5, 10, 0, 100], "a message brings what is far away"


def test_the_peak_of_a_step() -> None:
    """Fullest when it goes back through layer 3: its segment's input, what both its layers save, two gradients."""
    plan = Plan.contiguous([6])

    def peak_bytes(every: str) -> tuple[int, float]:
        profile = checkpointed(SIX, plan, every)
        done = simulate(single(1), plan, profile, Cluster(), MemoryModel())
        return done.peaks[0].bytes - 10 - 10, done.figures["step_time_s"]  # mini-batch, output

    assert peak_bytes("never") == (600 - 10 + 20, 18)
    assert peak_bytes("2") == (10 + 200 + 20, 18 + 5)
    assert working_bytes(checkpointed(SIX, plan, "2"), 0, 5) == 20 + 200 - 100 - 10
