"""Local search: simulated annealing over the orders of the devices.

    move    a task to another place of its device:     F0 F1 I0 W0 F2  -->  F0 F1 F2 I0 W0
    split   a whole backward pass, or join its halves:  B0 <-> I0 W0
    again   recompute a stage's micro-batch, or keep it: F0 .. B0 <-> F0 .. R0 B0      where the chain has checkpoints

What deadlocks or exceeds a limit is not taken. The budget is a number of tries, so that the result is the same
anywhere.
"""

from __future__ import annotations

import math
import random
import time

from harness.order_search.chain import Chain, Orders, Task, peak, times

FAR = 6
"""Places by which a task moves at most."""
HOT, COLD = 0.02, 0.0005
"""Temperatures of the first and of the last try, as parts of the step time."""


def improved(
    chain: Chain, orders: Orders, tries: int, seed: int, goal_s: float, until_s: float
) -> tuple[float, Orders]:
    """Return the best step time and its orders; `orders` must fit. It ends early at `goal_s`, or when the clock says
    `until_s` (`time.monotonic`)."""
    draw = random.Random(seed)
    now, _ = times(chain, orders)
    current, best, best_s = [list(order) for order in orders], orders, now
    for number in range(tries):
        if best_s <= goal_s * (1 + 1e-12) or (number % 64 == 0 and time.monotonic() > until_s):
            break
        device = draw.randrange(len(current))
        changed = _changed(chain, current[device], draw)
        if changed is None or peak(chain, changed) > chain.limit(device):
            continue
        candidate = [*current[:device], changed, *current[device + 1 :]]
        step_s, _ = times(chain, candidate)
        heat = best_s * HOT * (COLD / HOT) ** (number / tries)
        if step_s <= now or draw.random() < math.exp((now - step_s) / heat):
            current, now = candidate, step_s
            if step_s < best_s:
                best, best_s = candidate, step_s
    return best_s, best


def _changed(chain: Chain, order: list[Task], draw: random.Random) -> list[Task] | None:
    """Return a neighbor of a device's order, None where the draw makes none."""
    kind = draw.random()
    if kind < 0.8 or len(order) < 2:
        return _moved(order, draw)
    if kind < 0.95 or not chain.checkpoint_bytes:
        return _split_or_joined(order, draw)
    return _recomputed_or_kept(order, draw)


def _moved(order: list[Task], draw: random.Random) -> list[Task] | None:
    place = draw.randrange(len(order))
    kind, j, i = order[place]
    if kind == "R":
        return None
    own = [order[place]]
    first = place
    if kind in ("B", "I") and place and order[place - 1] == ("R", j, i):  # it stays right before
        first, own = place - 1, order[place - 1 : place + 1]
    rest = order[:first] + order[place + 1 :]
    to = min(max(0, first + draw.randint(-FAR, FAR)), len(rest))
    if to == first or (0 < to < len(rest) and rest[to - 1][0] == "R"):
        return None
    return rest[:to] + own + rest[to:]


def _split_or_joined(order: list[Task], draw: random.Random) -> list[Task] | None:
    backward = [place for place, task in enumerate(order) if task[0] in ("B", "I")]
    if not backward:
        return None
    place = draw.choice(backward)
    kind, j, i = order[place]
    if kind == "B":
        return [*order[:place], ("I", j, i), ("W", j, i), *order[place + 1 :]]
    rest = [task for task in order if task != ("W", j, i)]
    rest[rest.index(("I", j, i))] = ("B", j, i)
    return rest


def _recomputed_or_kept(order: list[Task], draw: random.Random) -> list[Task] | None:
    backward = [place for place, task in enumerate(order) if task[0] in ("B", "I")]
    if not backward:
        return None
    place = draw.choice(backward)
    _, j, i = order[place]
    if place and order[place - 1] == ("R", j, i):
        return order[: place - 1] + order[place:]
    return [*order[:place], ("R", j, i), *order[place:]]
