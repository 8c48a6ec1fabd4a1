"""Random chains of uneven stages, drawn by number: their times, messages, bytes and limits."""

from __future__ import annotations

import random

from harness.order_search.chain import Chain, Message, peak
from harness.order_search.list_scheduling import one_at_a_time

COUNT = 50
SHARES = (0, 0.1, 0.3, 0.6, None)
"""A limit's place between the least possible one and that of GPipe; None: no limit."""


def drawn(seed: int, stages: tuple[int, ...] = (2, 3, 4), micro_batches: tuple[int, int] = (4, 8)) -> Chain:
    """Return a chain with a stage on each device."""
    draw = random.Random(seed)
    n, m = draw.choice(stages), draw.randint(*micro_batches)
    forward_s, input_s, weight_s = (tuple(float(draw.randint(1, 9)) for _ in range(n)) for _ in range(3))
    messages = tuple(Message(j, j + 1, draw.randint(0, 4)) for j in range(n - 1))
    saved = tuple(draw.randint(2, 10) for _ in range(n))
    delayed, working = tuple(draw.randint(0, s // 2) for s in saved), tuple(draw.randint(0, 4) for _ in range(n))
    share = draw.choice(SHARES)

    def chain(limits: tuple[int | None, ...]) -> Chain:
        devices = tuple(range(n))
        return Chain(devices, m, forward_s, input_s, weight_s, messages, saved, delayed, working, (), limits)

    if share is None:
        return chain(())
    free = chain(())
    least = [peak(free, row) for row in one_at_a_time(free)]
    most = [peak(free, [*(("F", j, i) for i in range(m)), *(("B", j, i) for i in range(m))]) for j in range(n)]
    return chain(tuple(int(low + (high - low) * share) for low, high in zip(least, most, strict=True)))
