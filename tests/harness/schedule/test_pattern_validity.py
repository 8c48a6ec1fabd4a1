from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.core.cluster import Duplex
from harness.core.op import Op
from harness.core.pattern import Pattern, Placed
from harness.core.problem import Problem
from harness.schedule import pattern_validity
from harness.schedule.pattern_validity import peak_bytes, replay_pattern
from tests.support.patterns import FAR, FAR_S, TWO, TWO_S, Chain, patterns, placed
from tests.tiers import examples

OVERLAP, OVERFULL = "a longer period, or another start", "a longer period, or other stages on it"
NEAR = replace(TWO, ops=(TWO.ops[0], placed("1copy0<0", 1, 0), *TWO.ops[1:3], placed("0copy0<1", 1, 1), TWO.ops[3]))
NEAR_S = TWO_S | {"1copy0<0": 0.0, "0copy0<1": 0.0}
"""Messages that take no time."""


Fault = tuple[str, str] | tuple[str, str, dict[str, float]]


def fault(problem: Problem) -> Fault:
    """What it is about, what to do, and the numbers of the message, if there are any."""
    return (problem.key, problem.hint, problem.numbers) if problem.numbers else (problem.key, problem.hint)


def found(pattern: Pattern, durations: dict[str, float], duplex: Duplex = "full", limit: int = 10**6) -> list[Fault]:
    return [fault(one) for one in pattern_validity.pattern_errors(pattern, durations, [1] * 5, [0] * 5, limit, duplex)]


def moved(pattern: Pattern, text: str, **change: object) -> Pattern:
    """The pattern with another place of one op."""
    ops = tuple(replace(p, **change) if str(p.op) == text else p for p in pattern.ops)  # type: ignore[arg-type]
    return replace(pattern, ops=ops)


def test_good_patterns_have_no_faults() -> None:
    assert found(NEAR, NEAR_S) == []
    assert found(FAR, FAR_S) == []
    assert found(FAR, FAR_S, "half") == []


def test_it_is_unrolled_for_three_times_the_length_of_the_pipeline() -> None:
    """Two devices and a link: 9 periods of steady state, after the three in which 0B0 has not ended."""
    replay = replay_pattern(FAR, FAR_S)
    assert (replay.periods, replay.steady, replay.micro_batches) == (9, 3, 12)
    last = {str(r.op): (r.start_s, r.end_s) for r in replay.ran if r.op.micro_batch in (0, 11)}
    assert (last["0B0"], last["0F11"]) == ((7, 9), (33, 34))


def test_the_micro_batch_of_a_placed_op_means_nothing() -> None:
    other = replace(NEAR, ops=(placed("0F7", 0, 0), *NEAR.ops[1:]))
    assert found(other, NEAR_S) == []


def test_an_op_longer_than_the_period() -> None:
    too_long = ("1B1 of stage 1", "a longer period", {"took_s": 3.5, "period_s": 3})
    assert too_long in found(NEAR, NEAR_S | {"1B0": 3.5})


def test_an_overlap_over_the_end_of_the_period() -> None:
    """1B0 runs from 2 to 4.5, which is 1.5 of the next period; 1F1 starts at 4."""
    assert found(NEAR, NEAR_S | {"1B0": 2.5})[0] == (("1F1 of stage 1", OVERLAP, {"start_s": 4, "until_s": 4.5}))


def test_a_start_in_a_later_period_is_one_in_this_period() -> None:
    """0F at 7 is 0F at 1 two periods later, in the middle of 0B."""
    far = tuple(replace(p, start_s=p.start_s + 3 * k) for k, p in enumerate(NEAR.ops))
    assert found(replace(NEAR, ops=far), NEAR_S) == []
    late = replace(NEAR, ops=(placed("0F0", 7, 0), *(replace(p, shift=p.shift + 9) for p in NEAR.ops[1:])))
    assert found(late, NEAR_S) == [("0B0 of stage 0", OVERLAP, {"start_s": 31, "until_s": 32})]


def test_what_takes_no_time_does_not_run_inside_of_another_op() -> None:
    assert found(NEAR, NEAR_S | {"0F0": 0.0, "0B0": 1.0}) == []
    assert found(moved(NEAR, "0F0", start_s=2, shift=-1), NEAR_S | {"0F0": 0.0}) == [
        ("0F2 of stage 0", OVERLAP, {"start_s": 5, "until_s": 6})
    ]


def test_a_link_carries_one_message_at_a_time() -> None:
    """Both directions together with half duplex."""
    both = replace(FAR, ops=(*FAR.ops[:4], placed("0copy0<1", 1, 2), placed("0B0", 2, 2)))
    seconds = FAR_S | {"0B0": 1.0}
    assert found(both, seconds) == []
    assert found(both, seconds, "half") == [("1copy2<0 of stage 1", OVERLAP, {"start_s": 7, "until_s": 8})]


def test_an_op_before_what_it_waits_for() -> None:
    early = moved(NEAR, "0B0", shift=0)
    assert found(early, NEAR_S) == [("0B0 of stage 0", "shift 1", {"start_s": 1, "ready_s": 4})] * 2, (
        "the message and the task that makes it"
    )


def test_memory_counts_from_the_start_of_forward_to_the_end_of_backward() -> None:
    """FAR: stage 0 stores a micro-batch for 9 s and begins one every 3 s; stage 1 for 5 - 2 = 3 s, at whose end the
    next one begins: what is freed at an instant is gone before."""
    assert peak_bytes(FAR, FAR_S, [10, 100], [1, 2]) == {0: 31, 1: 102}
    assert pattern_validity.pattern_errors(FAR, FAR_S, [10, 100], [1, 2], {0: 31, 1: 102}, "full") == []
    tight = pattern_validity.pattern_errors(FAR, FAR_S, [10, 1000], [1, 2], {0: 30, 1: 1001}, "full")
    assert [fault(one) for one in tight] == [
        ("device 0", OVERFULL, {"needed_bytes": 31, "available_bytes": 30}),
        ("device 1", OVERFULL, {"needed_bytes": 1002, "available_bytes": 1001}),
    ]


def test_gradients_of_weights_keep_what_is_stored() -> None:
    """Where they are tasks of their own: stage 1 stores until the end of 1W, at 7."""
    halved = replace(NEAR, ops=(*NEAR.ops, placed("1W0", 0, 2)))
    seconds = NEAR_S | {"1B0": 1.0, "1W0": 1.0}
    assert found(halved, seconds) == []
    assert peak_bytes(halved, seconds, [1, 1], [0, 0]) == {0: 2, 1: 2}


def test_what_is_missing_stands_twice_or_has_no_time() -> None:
    assert found(replace(FAR, ops=(*FAR.ops, FAR.ops[0])), {name: 1.0 for name in FAR_S if name != "1B0"}) == [
        ("0F0 of stage 0", "once"),
        ("1B0 of stage 1", "one for each op of the pattern"),
    ]
    assert found(replace(TWO, ops=TWO.ops[:3]), FAR_S) == [
        (f"{op} of stage {op[0]}", "add it") for op in ("0B0", "1copy0<0", "0copy0<1")
    ]
    assert found(NEAR, NEAR_S | {"1B0": -1.0}) == [("1B0 of stage 1", "a finite number of at least 0")]
    gap = Pattern(3, (placed("0F0", 0, 0), placed("0B0", 1, 0), placed("1copy0<2", 1, 0)))
    assert found(gap, {"0F0": 1.0, "0B0": 1.0, "1copy0<2": 1.0}) == [
        ("1F0 of stage 1", "add it"),
        ("1B0 of stage 1", "add it"),
        ("1copy0<2 of stage 1", "another one"),
    ]


def test_a_cut_between_two_devices_needs_its_messages() -> None:
    """Whether or not they have a duration: without them every stage seems to be next to its neighbours."""
    assert found(TWO, TWO_S) == [(f"{op} of stage {op[0]}", "add it") for op in ("1copy0<0", "0copy0<1")]
    alone = replace(TWO, period_s=6, ops=(placed("0F0", 0, 0), placed("1F0", 1, 0, 0), placed("1B0", 2, 0, 0),
                                          placed("0B0", 4, 0)))  # fmt: skip
    assert found(alone, TWO_S) == []


def test_a_stage_is_on_one_device() -> None:
    assert found(moved(NEAR, "1B0", device=0), NEAR_S) == [("1B0 of stage 1", "device 1")]


@pytest.mark.parametrize("start", [float("nan"), float("inf")])
def test_a_start_is_a_number(start: float) -> None:
    with pytest.raises(ValueError, match=r"start_s of 0F0 is .*, must be a finite number"):
        placed("0F0", start, 0)


@settings(max_examples=examples(60))
@given(
    period=st.integers(1, 12),
    tasks=st.lists(st.tuples(st.integers(0, 15), st.integers(1, 4)), min_size=1, max_size=4),
)
def test_overlaps_are_those_of_a_table_of_slots(period: int, tasks: list[tuple[int, int]]) -> None:
    """Brute force: each task takes its slots modulo the period, and no slot may be taken twice."""
    forward = [Placed(Op(j, "F", 0), 0, start, 20 * j) for j, (start, _) in enumerate(tasks)]
    backward = [Placed(Op(j, "B", 0), 0, 0, 20 * (8 - j)) for j in range(len(tasks))]
    seconds = {f"{j}F0": float(length) for j, (_, length) in enumerate(tasks)}
    lines = found(Pattern(period, (*forward, *backward)), seconds | {f"{j}B0": 0.0 for j in range(len(tasks))})
    taken = [slot % period for start, length in tasks for slot in range(start, start + length)]
    assert any("B" not in key for key, *_ in lines) == (len(set(taken)) < len(taken))


def stored_of(chain: Chain) -> list[int]:
    return [3 * j + 2 for j in range(len(chain.devices))]


def by_slots(chain: Chain, pattern: Pattern) -> dict[int, int]:
    """The fullest slot of each device, counted micro-batch by micro-batch in a period far from the beginning."""
    period = int(pattern.period_s)
    at = {str(p.op): int(p.start_s) + p.shift * period for p in pattern.ops}
    found_bytes = {}
    for device in set(chain.devices):
        own = [j for j, home in enumerate(chain.devices) if home == device]
        held = [
            sum(
                stored_of(chain)[j]
                for j in own
                for i in range(-40, 1)
                if at[f"{j}F0"] + i * period <= slot < at[f"{j}B0"] + chain.backward[j] + i * period
            )
            for slot in range(period)
        ]
        found_bytes[device] = max(held)
    return found_bytes


@settings(max_examples=examples(60))
@given(patterns())
def test_valid_patterns_have_no_faults_and_the_memory_of_every_slot(case: tuple[Chain, Pattern]) -> None:
    chain, pattern = case
    most = by_slots(chain, pattern)
    seconds, stored, fixed = chain.durations(), stored_of(chain), dict.fromkeys(most, 7)
    limits = {device: size + 7 for device, size in most.items()}
    assert pattern_validity.pattern_errors(pattern, seconds, stored, fixed, limits, chain.duplex) == []
    assert peak_bytes(pattern, seconds, stored, fixed) == limits
    for device in most:
        tight = limits | {device: limits[device] - 1}
        (full,) = pattern_validity.pattern_errors(pattern, seconds, stored, fixed, tight, chain.duplex)
        assert (full.key, full.numbers["needed_bytes"]) == (f"device {device}", limits[device])


@settings(max_examples=examples(40))
@given(patterns(), st.data())
def test_each_fault_that_is_put_in_is_found(case: tuple[Chain, Pattern], data: st.DataObject) -> None:
    """In times that are no whole numbers, so that roundings are met, too."""
    chain, slots = case
    tick = data.draw(st.sampled_from((1.0, 0.1, 1 / 3)))
    seconds = {name: count * tick for name, count in chain.durations().items()}
    ops = tuple(replace(p, start_s=p.start_s * tick) for p in slots.ops)
    pattern = Pattern(slots.period_s * tick, ops)
    number = data.draw(st.integers(0, len(ops) - 1))
    one, path = ops[number], [str(op) for op, _ in chain.path()]
    assert found(pattern, seconds, chain.duplex) == []

    def without(*changed: Placed) -> Pattern:
        return replace(pattern, ops=(*ops[:number], *changed, *ops[number + 1 :]))

    name = str(one.op)
    missing = found(without(), seconds, chain.duplex)
    assert missing[0] == (f"{name} of stage {one.op.stage}", "add it")
    assert (f"{name} of stage {one.op.stage}", "once") in found(without(one, one), seconds, chain.duplex)
    if number:  # before what it waits for
        lines = found(without(replace(one, shift=one.shift - 3)), seconds, chain.duplex)
        assert any("ready_s" in numbers for _, _, *rest in lines for numbers in rest), path[number - 1]
    same = [p for p in ops if p is not one and chain.place(p.op) == chain.place(one.op)]
    if same:  # onto another op of its device or link, so late that it waits for nothing
        other = data.draw(st.sampled_from(same))
        lines = found(without(replace(one, start_s=other.start_s, shift=one.shift + 99)), seconds, chain.duplex)
        assert any(advised == OVERLAP for _, advised, *_ in lines)
