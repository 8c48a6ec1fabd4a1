"""Merge the spans that several ranks recorded for one message or all-reduce into one, which starts when all ranks were
ready."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from harness.core.trace import Span
from harness.schedule.dependency_graph import DATA, split_part


def joined(spans: Sequence[Span], devices: Sequence[int]) -> list[Span]:
    """Both ends of a message as one span, in its receiver's network queue; `devices[j]` is the device of stage j.

    stage 0 (sender)     |                        stage 1 network   |===1copy0<0===|
    stage 1 (receiver)                  |
    """
    found: dict[str, Span] = {}
    for span in spans:
        op = span.parsed
        if op.peer is not None:
            other = found.get(span.op, span)
            start_s, end_s = min(span.start_s, other.start_s), max(span.end_s, other.end_s)
            span = replace(span, device=devices[op.stage], start_s=start_s, end_s=end_s)
        found[span.op] = span
    return list(found.values())


def together(replicas: Sequence[Sequence[Span]]) -> list[Span]:
    """The spans of the first replica, those of sums without the time in which it waited for others: that is idle time.

    replica 0   |-- waits --|== 0collective:all_reduce@data/chunk0 ==|
    replica 1               |== 0collective:all_reduce@data/chunk0 ==|
    """
    began: dict[tuple[str, int | None], float] = {}
    for spans in replicas:
        for span in spans:
            sum_ = _sum(span)
            if sum_ is not None:
                began[sum_] = max(span.start_s, began.get(sum_, span.start_s))

    def trimmed(span: Span) -> Span:
        sum_ = _sum(span)
        return span if sum_ is None else replace(span, start_s=min(began[sum_], span.end_s))

    return [trimmed(span) for span in replicas[0]]


def _sum(span: Span) -> tuple[str, int | None] | None:
    """Return the key that all members of an all-reduce share: its name, and the stage if it is over replicas."""
    op = span.parsed
    if op.kind != "collective":
        return None
    return op.part, op.stage if split_part(op.part)[1] == DATA else None
