"""The period in which an engine repeats a pattern, from what it did."""

from __future__ import annotations

import statistics
from itertools import pairwise

from harness.trace import Trace


def period_s(trace: Trace) -> float | None:
    """Median time between the starts of the last stage's backward tasks, in the middle half of each step: without the
    filling and draining of a step.

    None where no pattern is repeated: there weights are updated at the end of a step, and not after some micro-batch.
    """
    ops = [span.parsed for span in trace.spans]
    if not any(op.kind == "step" and op.micro_batch is not None for op in ops):
        return None
    last = max(op.stage for op in ops)
    begun: dict[int, list[float]] = {}
    for span, op in zip(trace.spans, ops, strict=True):
        if (op.stage, op.kind) == (last, "B"):
            begun.setdefault(span.step, []).append(span.start_s)
    between = [later - earlier for starts in begun.values() for earlier, later in pairwise(_middle(sorted(starts)))]
    return statistics.median(between) if between else None


def _middle(starts: list[float]) -> list[float]:
    quarter = len(starts) // 4
    return starts[quarter : len(starts) - quarter]
