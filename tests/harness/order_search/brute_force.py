"""All orders of a tiny chain."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from harness.order_search.chain import Chain, Orders, Task, evaluate, fits, peak


def interleavings(groups: list[list[Task]]) -> Iterator[list[Task]]:
    """All orders of tasks in which each group stays in its own order."""
    if not any(groups):
        yield []
        return
    for number, group in enumerate(groups):
        if group:
            rest = [*groups[:number], group[1:], *groups[number + 1 :]]
            for order in interleavings(rest):
                yield [group[0], *order]


def device_orders(chain: Chain, device: int) -> list[list[Task]]:
    """All orders of a device that fit, with whole and split passes; micro-batches begin in the order of their number in
    the first stage."""
    stages = [j for j in range(chain.stages) if chain.devices[j] == device]
    found = []
    places = list(product(stages, range(chain.micro_batches)))
    for split in product((False, True), repeat=len(places)):
        groups = [
            [("F", j, i), ("I", j, i), ("W", j, i)] if halves else [("F", j, i), ("B", j, i)]
            for (j, i), halves in zip(places, split, strict=True)
        ]
        for order in interleavings(groups):
            first = [i for kind, j, i in order if (kind, j) == ("F", 0)]
            if first == sorted(first) and peak(chain, order) <= chain.limit(device):
                found.append(order)
    return found


def best(chain: Chain) -> float:
    """The least step time of all orders that fit."""
    rows = [device_orders(chain, device) for device in range(chain.width)]
    return min((evaluate(chain, list(orders)).step_s for orders in product(*rows)), default=float("inf"))


def valid(chain: Chain, orders: Orders) -> bool:
    """Whether orders end, fit, and have each pass once, whole or in halves."""
    tasks = [task for row in orders for task in row]
    kinds: dict[tuple[int, int], list[str]] = {}
    for kind, j, i in tasks:
        kinds.setdefault((j, i), []).append(kind)
    whole = all(sorted(set(found) - {"R"}) in (["B", "F"], ["F", "I", "W"]) for found in kinds.values())
    once = len(set(tasks)) == len(tasks) and len(kinds) == chain.stages * chain.micro_batches
    at_home = all(chain.devices[task[1]] == device for device, row in enumerate(orders) for task in row)
    return whole and once and at_home and fits(chain, evaluate(chain, orders))
