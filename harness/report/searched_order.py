"""A line on the order of tasks that a search has found: where its stages are, and how far from the best it may be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

EXACT = 0.0005
"""The gap below which no order is faster, as far as 0.1 % shows."""


def line(predicted: Mapping[str, Any], devices: Sequence[int]) -> str:
    """ "searched (v), at most 3.1 % above the least possible"; "" where nothing was searched.

    `predicted` are the figures of a plan, `devices` those of its stages in order. The gap is that of the pipeline's
    tasks, by a lower bound for any order of these stages (`harness.order_search.bounds`).
    """
    gap, by = predicted.get("search_gap"), predicted.get("searched_by")
    if gap is None:
        return ""
    found = f"searched ({placement(devices)}{f', {by}' if by else ''})"
    if gap <= EXACT:
        return f"{found}, no order of these stages is faster"
    return f"{found}, at most {100 * gap / (1 - gap):.1f} % above the least possible" if gap < 1 else found


def placement(devices: Sequence[int]) -> str:
    """Where the stages are, as engine.placement says it: one on each device, in a v, or in a loop."""
    width = len({*devices})
    if len(devices) == width:
        return "one"
    there = list(range(width))
    return "v" if list(devices) == [*there, *reversed(there)] else "loop"
