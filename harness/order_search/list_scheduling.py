"""Orders made by list scheduling: whenever a device is free it runs the first ready task of a priority that fits.

free device -> ready tasks (their inputs are there) -> those that the memory and the cap of micro-batches in flight
allow -> the first one by priority: backward before forward before weights, the longest way to the end first
"""

from __future__ import annotations

import heapq
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from harness.order_search.chain import Chain, Orders, Task

Priority = Callable[[Task], tuple[float, ...]]
NO_WEIGHTS, ALL_AT_ONCE, WHEN_IDLE = "whole", "at once", "when idle"


@dataclass(frozen=True)
class Rule:
    """`cap[j]` is the most micro-batches of stage j in flight; `weights` says when W runs: with its I as a whole pass,
    right after it, or when nothing else can. `noise` shakes the priorities."""

    cap: tuple[int, ...]
    weights: str = WHEN_IDLE
    forward_first: bool = False
    recomputed: frozenset[int] = frozenset()
    noise: float = 0.0
    seed: int = 0


def rules(chain: Chain, recomputed: frozenset[int] = frozenset()) -> Iterator[Rule]:
    """Yield rules from many micro-batches in flight to one: as many in each stage, or fewer towards the last one."""
    n, m = chain.stages, chain.micro_batches
    caps = [tuple(min(m, most) for _ in range(n)) for most in range(1, m + 1)]
    for slope in (1, 2):
        for least in (1, 2, 3):
            caps.append(tuple(min(m, least + slope * (n - 1 - j)) for j in range(n)))
    for cap in dict.fromkeys(caps):
        for weights in (NO_WEIGHTS, ALL_AT_ONCE, WHEN_IDLE):
            for forward_first in (False, True):
                yield Rule(cap, weights, forward_first, recomputed)


def scheduled(chain: Chain, rule: Rule) -> Orders | None:
    """Return the orders that a rule makes; None where it comes to a point at which nothing fits."""
    return _Run(chain, rule).orders()


def one_at_a_time(chain: Chain, recomputed: frozenset[int] = frozenset()) -> Orders:
    """Return the order with the least memory where these stages are recomputed: a micro-batch goes all the way before
    the next one begins."""
    rows: Orders = [[] for _ in range(chain.width)]
    for i in range(chain.micro_batches):
        for j in range(chain.stages):
            rows[chain.devices[j]].append(("F", j, i))
        for j in reversed(range(chain.stages)):
            rows[chain.devices[j]] += [("R", j, i)] * (j in recomputed)
            rows[chain.devices[j]].append(("B", j, i))
    return rows


def least_memory(chain: Chain) -> Orders:
    """Return the order with the least memory of all: one micro-batch at a time, with `least_kept` recomputed."""
    return one_at_a_time(chain, least_kept(chain))


def least_kept(chain: Chain) -> frozenset[int]:
    """Return the stages that are recomputed where memory is least.

    A recomputed stage leaves more to those after it on its device, and needs more itself.
    """
    again: frozenset[int] = frozenset()
    for device in range(chain.width if chain.checkpoint_bytes else 0):
        found = [(0, 0, again)]  # kept by the stages so far, the most at once, what is recomputed
        for j in (j for j in range(chain.stages) if chain.devices[j] == device):
            saved, checkpoint = chain.saved_bytes[j], chain.checkpoint_bytes[j]
            runs = saved + chain.of(chain.working_bytes, j)
            found = [
                *((kept + saved, max(most, kept + runs), one) for kept, most, one in found),
                *((kept + checkpoint, max(most, kept + checkpoint + runs), one | {j}) for kept, most, one in found),
            ]
            found.sort(key=lambda one: one[:2])
            found = [one for n, one in enumerate(found) if all(one[1] < other[1] for other in found[:n])]
        again = min(found, key=lambda one: one[1])[2]
    return again


class _Run:
    """Events of one simulation: tasks become ready when what they wait for has arrived."""

    def __init__(self, chain: Chain, rule: Rule) -> None:
        self.chain, self.rule = chain, rule
        self.random = random.Random(rule.seed)
        self.rows: Orders = [[] for _ in range(chain.width)]
        self.ready: list[list[Task]] = [[] for _ in range(chain.width)]
        self.busy = [False] * chain.width
        self.held = [0] * chain.width
        self.flying: dict[int, int] = defaultdict(int)
        self.missing: dict[Task, int] = {}
        self.events: list[tuple[float, int, Task, bool]] = []
        self.count = 0
        forward, backward = chain.arrivals
        self.back = "B" if rule.weights == NO_WEIGHTS else "I"
        for j in range(chain.stages):
            for i in range(chain.micro_batches):
                self.missing["F", j, i] = len(forward[j])
                self.missing[self.back, j, i] = 1 + len(backward[j])
        for i in range(chain.micro_batches):
            self.ready[chain.devices[0]].append(("F", 0, i))
        self.tails = tails_of(chain)

    def orders(self) -> Orders | None:
        self.start(0.0)
        while self.events:
            now = self.events[0][0]
            while self.events and self.events[0][0] == now:
                _, _, task, ended = heapq.heappop(self.events)
                self.end(task, now) if ended else self.have(task)
            self.start(now)
        each = 2 if self.rule.weights == NO_WEIGHTS else 3
        wanted = chain_tasks(self.chain) * each + self.chain.micro_batches * len(self.rule.recomputed)
        return self.rows if sum(map(len, self.rows)) == wanted else None

    def push(self, at_s: float, task: Task, ended: bool) -> None:
        self.count += 1
        heapq.heappush(self.events, (at_s, self.count, task, ended))

    def have(self, task: Task) -> None:
        """Something that a task waits for has come."""
        self.missing[task] -= 1
        if not self.missing[task]:
            self.ready[self.chain.devices[task[1]]].append(task)

    def start(self, now: float) -> None:
        for device in range(self.chain.width):
            if not self.busy[device] and (task := self.pick(device)):
                self.ready[device].remove(task)
                self.run(device, task, now)

    def pick(self, device: int) -> Task | None:
        fitting = [task for task in self.ready[device] if self.may(device, task)]
        return min(fitting, key=self.priority) if fitting else None

    def may(self, device: int, task: Task) -> bool:
        kind, j, _ = task
        chain, limit = self.chain, self.chain.limit(device)
        if kind == "W":
            return True
        working = chain.of(chain.working_bytes, j)
        if kind != "F":
            again = chain.of(chain.saved_bytes, j) if j in self.rule.recomputed else 0
            return self.held[device] + again + max(working, chain.of(chain.delayed_bytes, j) * (kind == "I")) <= limit
        if self.flying[j] >= self.rule.cap[j]:
            return False
        own = max(chain.of(chain.working_bytes, one) for one in range(chain.stages) if chain.devices[one] == device)
        return self.held[device] + self.kept(j) + own <= limit

    def kept(self, stage: int) -> int:
        """Bytes that a forward pass leaves."""
        chain = self.chain
        return chain.of(chain.checkpoint_bytes if stage in self.rule.recomputed else chain.saved_bytes, stage)

    def priority(self, task: Task) -> tuple[float, ...]:
        kind, j, i = task
        first = {"F": 0 if self.rule.forward_first else 1, "B": 0.5, "I": 0.5, "W": 2}[kind]
        if kind == "W" and self.rule.weights == ALL_AT_ONCE:
            first = 0
        tail = self.tails[kind, j] * (1 + self.rule.noise * self.random.random())
        return (first + self.rule.noise * self.random.random(), i, -tail)

    def run(self, device: int, task: Task, now: float) -> None:
        kind, j, i = task
        chain = self.chain
        if kind == "F":
            self.flying[j] += 1
            self.held[device] += self.kept(j)
        elif kind != "W" and j in self.rule.recomputed:
            self.rows[device].append(("R", j, i))
            self.held[device] += chain.of(chain.saved_bytes, j)
            now += chain.task_s["R", j]
        self.rows[device].append(task)
        self.busy[device] = True
        self.push(now + chain.task_s[kind, j], task, True)

    def end(self, task: Task, now: float) -> None:
        kind, j, i = task
        chain, device = self.chain, self.chain.devices[task[1]]
        self.busy[device] = False
        forward, backward = chain.arrivals
        if kind == "F":
            self.have((self.back, j, i))
            for target, sources in enumerate(forward):
                for source, took in sources:
                    if source == j:
                        self.push(now + took, ("F", target, i), False)
        elif kind in ("B", "I"):
            for source, targets in enumerate(backward):
                for target, took in targets:
                    if target == j:
                        self.push(now + took, (self.back, source, i), False)
        if kind == "I":
            self.held[device] += chain.of(chain.delayed_bytes, j)
            self.ready[device].append(("W", j, i))
        elif kind in ("B", "W"):
            self.flying[j] -= 1
            self.held[device] -= chain.of(chain.saved_bytes, j)
            self.held[device] -= chain.of(chain.checkpoint_bytes, j) if j in self.rule.recomputed else 0
            self.held[device] -= chain.of(chain.delayed_bytes, j) if kind == "W" else 0


def chain_tasks(chain: Chain) -> int:
    """Return the number of passes of one kind."""
    return chain.stages * chain.micro_batches


def tails_of(chain: Chain) -> dict[tuple[str, int], float]:
    """Seconds from the beginning of a task to the end of the step at least, by kind and stage."""
    forward, backward = chain.arrivals
    found: dict[tuple[str, int], float] = {}
    for j in range(chain.stages):
        after = max((found["I", source] + took for source, took in _sources(backward, j)), default=0.0)
        found["W", j] = chain.weight_s[j]
        found["I", j] = chain.input_s[j] + max(after, chain.weight_s[j])
        found["B", j] = chain.input_s[j] + chain.weight_s[j] + after
    for j in reversed(range(chain.stages)):
        after = max((found["F", target] + took for target, took in _sources(forward, j)), default=0.0)
        found["F", j] = chain.forward_s[j] + max(after, found["I", j])
    return found


def _sources(arrivals: list[list[tuple[int, float]]], stage: int) -> list[tuple[int, float]]:
    """Return who waits for a stage."""
    return [(other, took) for other, waits in enumerate(arrivals) for source, took in waits if source == stage]
