from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.core.plan import Stage
from planners.periodic.layer_ticks import Chain
from planners.periodic.one_f_one_b_star import delay_after, group_of, groups, smallest_period, timing
from planners.periodic.task_times import Task, Timing, path
from tests.planners.periodic.contiguous_cases import chain, chains, into, partitions
from tests.tiers import examples

PLENTY = 8


@pytest.mark.parametrize(
    ("delay", "load", "expected"),
    [
        (0, 0, 0),
        (0, 10, 10),  # fits exactly
        (4, 6, 10),
        (4, 7, 17),  # 10 + 7
        (10, 1, 11),  # group 1 is full
        (10, 0, 10),  # what takes no time fits always
        (11, 9, 20),
        (11, 10, 30),
    ],
)
def test_a_load_is_added_where_it_fits_into_a_group(delay: int, load: int, expected: int) -> None:
    assert delay_after(delay, load, 10) == expected


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 12), st.data())
def test_adding_is_monotone(delay: int, other: int, period: int, data: st.DataObject) -> None:
    load, longer = data.draw(st.integers(0, period)), data.draw(st.integers(period, 15))
    small, large = sorted((delay, other))
    assert delay_after(small, load, period) <= delay_after(large, load, period)
    assert delay_after(small, load, period) >= small + load
    smaller_load = data.draw(st.integers(0, load))
    assert delay_after(small, smaller_load, period) <= delay_after(small, load, period)
    assert group_of(delay_after(small, load, longer), longer) <= group_of(delay_after(small, load, period), period)


def test_the_drawing_of_the_docstring() -> None:
    """
    tick  0  1  2  3  4  5  6  7  8  9
    a     F           |           B        group 2
    b        F        |        B           group 2
    c           F     |  B                 group 1
    d              F  B                    group 1
    """
    four = chain([(1, 1)] * 4)
    found = timing(four, into([1, 1, 1, 1]), 5)
    starts = {(task.stage, task.kind): int(start) for task, start in zip(found.tasks, found.starts, strict=True)}
    assert [starts[stage, "F"] for stage in range(4)] == [0, 1, 2, 3]
    assert [starts[stage, "B"] for stage in range(4)] == [8, 7, 5, 4]
    assert groups(four, into([1, 1, 1, 1]), 5) == found.activations() == (2, 2, 1, 1)


def test_a_message_and_its_gradient_are_an_item_between_stages() -> None:
    """Loads 2, message 3 + 3, 2: all in one group with 10, the message alone with 6 to 7, one with each stage at 8."""
    two = chain([(1, 1), (1, 1)], [3])
    found = {period: groups(two, into([1, 1]), period) for period in range(6, 11)}
    assert found == {6: (3, 1), 7: (3, 1), 8: (2, 1), 9: (2, 1), 10: (1, 1)}
    with pytest.raises(ValueError, match="the period is 5 ticks, a device or link is busy for 6 of them"):
        timing(two, into([1, 1]), 5)


def test_a_full_duplex_link_carries_both_at_once() -> None:
    """The delay of stage 0 is 2 + 6 + 2, and must end in the group in which it begins: 4 periods of 3 ticks."""
    two = chain([(1, 1), (1, 1)], [3], duplex="full")
    assert groups(two, into([1, 1]), 3) == (4, 1)  # 2 + 6 = 8 is in group 3, to 9: the 2 of stage 0 follow at 9
    assert groups(two, into([1, 1]), 5) == (2, 1)
    with pytest.raises(ValueError, match="the period is 2 ticks, a device or link is busy for 3 of them"):
        timing(two, into([1, 1]), 2)


def test_the_smallest_period_grows_as_memory_shrinks() -> None:
    """Stage 0 may store 3, 2 or 1 micro-batches."""
    expected = {4: 6, 3: 6, 2: 8, 1: 10}
    found = {memory: smallest_period(chain([(1, 1), (1, 1)], [3], memory), into([1, 1])) for memory in expected}
    assert found == expected
    assert smallest_period(chain([(1, 1), (1, 1)], [3], 0), into([1, 1])) is None


@given(chains(), st.data())
def test_groups_are_those_of_the_paper(some: Chain, data: st.DataObject) -> None:
    stages = data.draw(st.sampled_from([*partitions(some.layers, PLENTY)]))
    if some.duplex == "half":
        period = data.draw(st.integers(_busiest(some, stages), 60))
        assert groups(some, stages, period) == _by_the_book(some, stages, period)


@given(chains(), st.data())
@settings(max_examples=examples(150))
def test_no_shorter_period_fits(some: Chain, data: st.DataObject) -> None:
    """All periods are tried, and in half duplex those that are sums of consecutive items are enough."""
    stages = data.draw(st.sampled_from([*partitions(some.layers, PLENTY)]))
    least = _busiest(some, stages)
    total = some.loads[-1] + sum(some.crossing)
    fitting = [period for period in range(least, max(least, total) + 1) if _fits(some, stages, period)]
    assert smallest_period(some, stages) == (fitting[0] if fitting else None)
    assert fitting == [*range(fitting[0], max(least, total) + 1)] if fitting else True
    if some.duplex == "half" and fitting:
        items = _items(some, stages)
        sums = {sum(items[a : b + 1]) for a in range(len(items)) for b in range(a, len(items))}
        assert fitting[0] in sums | {1}


@given(chains(most=3, shortest=1, longest=2, messages=1), st.data())
@settings(max_examples=examples(60), deadline=None)
def test_no_periodic_pattern_stores_fewer(some: Chain, data: st.DataObject) -> None:
    """MP-1, Prop. 1 of MadPipe: every pattern of whole ticks is tried."""
    stages = data.draw(st.sampled_from([*partitions(some.layers, PLENTY)]))
    tasks = sum(task.ticks > 0 for task in path(some, stages))
    least = _busiest(some, stages)
    most = max(period for period in range(least, least + 6) if period == least or period**tasks <= 50_000)
    period = data.draw(st.integers(least, most))
    stored = groups(some, stages, period)
    patterns = [*_patterns(path(some, stages), period)]
    assert stored in patterns
    for other in patterns:
        assert all(g <= more for g, more in zip(stored, other, strict=True))


@given(chains(), st.data())
def test_it_repeats_for_ever_and_group_g_stores_g(some: Chain, data: st.DataObject) -> None:
    """MP-2, Sec. 4.1 of MadPipe."""
    stages = data.draw(st.sampled_from([*partitions(some.layers, PLENTY)]))
    period = data.draw(st.integers(_busiest(some, stages), 60))
    found = timing(some, stages, period)
    assert found.activations() == groups(some, stages, period) == _replayed(found)
    assert max(found.activations()) <= 2 * len(stages) - 1 or some.duplex == "full"
    held = [some.held(s.first, s.last, g) for s, g in zip(stages, found.activations(), strict=True)]
    if _items(some, stages)[-1]:  # a last stage that takes no time keeps nothing, but counts as one that does
        assert found.memory() == dict(enumerate(held))


def _busiest(some: Chain, stages: Sequence[Stage]) -> int:
    loads = [sum(some.forward[s.first : s.last + 1]) + sum(some.backward[s.first : s.last + 1]) for s in stages]
    return max(1, *loads, *(some.busy(s.first) for s in stages))


def _items(some: Chain, stages: Sequence[Stage]) -> list[int]:
    """Ticks of stage, message, stage, ..."""
    found = []
    for s in stages:
        found += [some.sent[s.first] + some.returned[s.first]] if s.first else []
        found.append(sum(some.forward[s.first : s.last + 1]) + sum(some.backward[s.first : s.last + 1]))
    return found


def _by_the_book(some: Chain, stages: Sequence[Stage], period: int) -> tuple[int, ...]:
    """From the end: a group takes items as long as their sum is at most the period."""
    group, taken, found = 1, 0, []
    for item in reversed(_items(some, stages)):
        group, taken = (group, taken + item) if taken + item <= period else (group + 1, item)
        found.append(group)
    return tuple(found[::-2])


def _fits(some: Chain, stages: Sequence[Stage], period: int) -> bool:
    stored = groups(some, stages, period)
    return all(some.held(s.first, s.last, g) <= some.memory for s, g in zip(stages, stored, strict=True))


def _patterns(tasks: Sequence[Task], period: int) -> Iterator[tuple[int, ...]]:
    """The stored micro-batches of every stage in every pattern: each task starts 0 .. period - 1 ticks after the one
    before it has ended, where its resource is free in all its ticks, modulo the period."""
    taken: set[tuple[tuple[int, ...], int]] = set()

    def placed(starts: tuple[int, ...], ready: int) -> Iterator[tuple[int, ...]]:
        if len(starts) == len(tasks):
            yield _stored(tasks, starts, period)
            return
        task = tasks[len(starts)]
        for start in range(ready, ready + (period if starts and task.ticks else 1)):
            ticks = {(task.resource, tick % period) for tick in range(start, start + task.ticks)}
            if ticks & taken:
                continue
            taken.update(ticks)
            yield from placed((*starts, start), start + task.ticks)
            taken.difference_update(ticks)

    yield from placed((), 0)


def _stored(tasks: Sequence[Task], starts: Sequence[int], period: int) -> tuple[int, ...]:
    begun = {task.stage: start for task, start in zip(tasks, starts, strict=True) if task.kind == "F"}
    ended = {task.stage: start + task.ticks for task, start in zip(tasks, starts, strict=True) if task.kind == "B"}
    return tuple(-(-(ended[stage] - begun[stage]) // period) for stage in sorted(begun))


def _replayed(found: Timing) -> tuple[int, ...]:
    """Unrolled, tick by tick: every task waits for the one before it, no two share a resource. Returns the peaks."""
    stages = len(found.stages)
    used: set[tuple[tuple[int, ...], int]] = set()
    kept: list[list[tuple[int, int]]] = [[] for _ in range(stages)]
    for micro_batch in range(3 * (2 * stages - 1)):
        ready = 0
        for task, first in zip(found.tasks, found.starts, strict=True):
            start = int(first + micro_batch * found.period)
            assert start >= ready or task is found.tasks[0]
            ready = start + task.ticks
            ticks = {(task.resource, tick) for tick in range(start, ready)}
            assert not ticks & used
            used |= ticks
            if task.kind == "F":
                kept[task.stage].append((start, 0))
            elif task.kind == "B":
                kept[task.stage][-1] = (kept[task.stage][-1][0], ready)
    return tuple(max(1, *(sum(a <= at < b for a, b in times) for at, _ in times)) for times in kept)
