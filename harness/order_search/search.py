"""The search: list scheduling, an integer program where the case is small, local search, and a bound.

published orders --.
list scheduling ---+--> the best that fits --> integer program --> local search --> orders, bound, gap
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

from harness.core.problem import Problem, ProblemError
from harness.core.units import size
from harness.order_search import integer_program
from harness.order_search.bounds import lower_bound
from harness.order_search.chain import Chain, Orders, evaluate, fits, peak
from harness.order_search.list_scheduling import least_kept, least_memory, one_at_a_time, rules, scheduled
from harness.order_search.local_search import improved

TRIES = 12_000
"""Tries of the local search from each of the best orders, in a chain of up to `USUAL` tasks."""
USUAL = 100
STARTS = 3
SECONDS = 10.0
FEW = 4
"""Stages up to which each set of them is tried for recomputation."""
ONE_BY_ONE = "one micro-batch at a time"
START = "an earlier search"
"""What is said to have found an order that takes the least memory, or the one that a search begins with."""
CLOSE = 1e-5
"""A relative gap that counts as none: rows of the integer program hold to 1e-6 each, and several of them add up."""


@dataclass(frozen=True)
class Found:
    """Orders with their step time; no order takes less than `bound_s`. `method` says what found them, `family` is the
    best published order with its time, where one fits."""

    orders: Orders
    step_s: float
    bound_s: float
    method: str
    family: str | None = None
    family_s: float = float("inf")

    @property
    def gap(self) -> float:
        """The part of the step time by which it may be too long."""
        return max(0.0, 1 - self.bound_s / self.step_s) if self.step_s else 0.0

    @property
    def proven(self) -> bool:
        """Whether no order is faster."""
        return self.gap <= CLOSE


def search(
    chain: Chain,
    families: Mapping[str, Orders] | None = None,
    seconds: float = SECONDS,
    start: Orders | None = None,
) -> Found:
    """Search for the order with the least step time within the limits; never worse than the best of `families` that
    fits, nor than `start` where it fits.

    It takes `seconds` at most, mostly less: the number of tries is given, so the result is the same on any machine that
    is not much slower than most. Raises ProblemError where not even one micro-batch at a time fits.
    """
    until_s = time.monotonic() + seconds
    bound_s = lower_bound(chain)
    known = {name: evaluate(chain, orders) for name, orders in (families or {}).items()}
    fitting = {name: one.step_s for name, one in known.items() if fits(chain, one)}
    family = min(fitting, key=fitting.__getitem__, default=None)
    starts = [(step_s, f"the published {name}", (families or {})[name]) for name, step_s in fitting.items()]
    if start and fits(chain, one := evaluate(chain, start)):
        starts.append((one.step_s, START, start))
    starts += _made(chain, until_s)
    if not starts:
        raise ProblemError(_too_much(chain))
    starts.sort(key=lambda one: one[0])
    step_s = starts[0][0]
    if step_s > bound_s * (1 + CLOSE) and not chain.checkpoint_bytes:
        proven_s, solution = integer_program.solved(chain, step_s, max(0.5, (until_s - time.monotonic()) / 2))
        if solution and (one := evaluate(chain, solution)).step_s < step_s and fits(chain, one):
            starts.insert(0, (one.step_s, "integer program", solution))
        bound_s = max(bound_s, min(proven_s, starts[0][0]))
    step_s, method, orders = starts[0]
    tries = max(500, TRIES * USUAL // max(USUAL, 3 * chain.stages * chain.micro_batches))
    for number, (_, _, start) in enumerate(starts[:STARTS]):
        if step_s <= bound_s * (1 + CLOSE):
            break
        halfway = time.monotonic() + (until_s - time.monotonic()) * 0.4
        better_s, better = improved(chain, start, tries, number, bound_s, halfway)
        if better_s < step_s:
            step_s, method, orders = better_s, "local search", better
    best_s = fitting[family] if family else float("inf")
    return Found(orders, step_s, bound_s, method, family, best_s)


def _made(chain: Chain, until_s: float) -> list[tuple[float, str, Orders]]:
    """Return orders of list scheduling that fit, and the one with the least memory."""
    found = []
    for again in _recomputations(chain):
        for rule in rules(chain, again):
            if time.monotonic() > until_s:
                break
            orders = scheduled(chain, rule)
            if orders and fits(chain, one := evaluate(chain, orders)):
                found.append((one.step_s, "list scheduling", orders))
        least = one_at_a_time(chain, again)
        if fits(chain, one := evaluate(chain, least)):
            found.append((one.step_s, ONE_BY_ONE, least))
    return found


def _recomputations(chain: Chain) -> list[frozenset[int]]:
    """Return sets of stages to recompute: none, each, all, those of least memory; where the chain has checkpoints."""
    if not chain.checkpoint_bytes:
        return [frozenset()]
    stages = range(chain.stages)
    if chain.stages <= FEW:
        return [frozenset(one) for count in range(chain.stages + 1) for one in combinations(stages, count)]
    return [frozenset(), *(frozenset([j]) for j in stages), frozenset(stages), least_kept(chain)]


def _too_much(chain: Chain) -> Problem:
    """Say which device has not enough memory for one micro-batch at a time."""
    needed = [peak(chain, row) for row in least_memory(chain)]
    device = max(range(len(needed)), key=lambda d: needed[d] - chain.limit(d))
    left = size(max(0, int(chain.limit(device))))
    message = f"has {left} left for activations, one micro-batch at a time needs {size(needed[device])}"
    return Problem(f"device {device}", None, message, hint="more devices, smaller micro-batches")
