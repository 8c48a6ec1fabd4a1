"""Lower bounds of the step time: no order of tasks takes less."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from functools import cached_property

from harness.order_search.chain import Chain

Job = tuple[float, float, float]
"""Release time, seconds, and seconds from its end to the end of the step."""


def lower_bound(chain: Chain) -> float:
    """Return the best of these bounds.

    * A device: its tasks, each between the earliest time at which it can begin and the way from it to the end, exact
      where tasks may be interrupted (Jackson's preemptive schedule of one machine). The k-th forward pass of a stage
      waits for k + 1 of them in each stage before, and all work of the other m - k micro-batches follows in each stage
      after it.
    * Memory: a limit lets a number of micro-batches into a stage at once. Each stays from F until its gradient has come
      back; as many as do not fit at once follow one another.
    """
    paths = Paths(chain)
    machines = [_machine(sorted(paths.jobs(device))) for device in range(chain.width)]
    return max([*machines, *_memory(chain, paths)])


class Paths:
    """The longest ways between tasks of one micro-batch: heads to a task's start, tails from its end."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.last = chain.stages - 1

    @cached_property
    def forward(self) -> list[list[float]]:
        """[s][j]: from the end of F(s) to the start of F(j), j > s."""
        chain, arrivals = self.chain, self.chain.arrivals[0]
        found = [[0.0] * chain.stages for _ in range(chain.stages)]
        for s in range(chain.stages):
            for j in range(s + 1, chain.stages):
                ways = [
                    took + (found[s][k] + chain.forward_s[k] if k > s else 0.0) for k, took in arrivals[j] if k >= s
                ]
                found[s][j] = max(ways)
        return found

    @cached_property
    def backward(self) -> list[list[float]]:
        """[s][j]: from the end of I(s) to the start of I(j), j < s."""
        chain, arrivals = self.chain, self.chain.arrivals[1]
        found = [[0.0] * chain.stages for _ in range(chain.stages)]
        for s in range(chain.stages):
            for j in reversed(range(s)):
                ways = [took + (found[s][k] + chain.input_s[k] if k < s else 0.0) for k, took in arrivals[j] if k <= s]
                found[s][j] = max(ways)
        return found

    def turn(self, s: int, j: int) -> float:
        """From the end of F(s) to the start of I(j)."""
        chain, last = self.chain, self.last
        there = self.forward[s][last] + chain.forward_s[last] if s < last else 0.0
        return there + (chain.input_s[last] + self.backward[last][j] if j < last else 0.0)

    def head(self, s: int) -> float:
        """Seconds before F(s) can begin."""
        return self.chain.forward_s[0] + self.forward[0][s] if s else 0.0

    def jobs(self, device: int) -> Iterator[Job]:
        """Yield the tasks of a device, those of a kind and stage in the order of time."""
        chain, m = self.chain, self.chain.micro_batches
        for j in (j for j in range(chain.stages) if chain.devices[j] == device):
            for k in range(m):
                released = self.released(j, k)
                yield self.arrives(j, k), chain.forward_s[j], self.after_forward(j, m - k)
                yield released, chain.input_s[j], max(chain.weight_s[j], self.after_input(j, m - k))
                yield released + chain.input_s[j], chain.weight_s[j], 0.0

    def arrives(self, j: int, k: int) -> float:
        """When the k-th forward pass of stage j can begin."""
        ways = (self.head(s) + (k + 1) * self.chain.forward_s[s] + self.forward[s][j] for s in range(j))
        return max(ways, default=0.0)

    def released(self, j: int, k: int) -> float:
        """When the k-th I of stage j can begin."""
        chain = self.chain
        each = chain.forward_s
        ways = [self.head(s) + (k + 1) * each[s] + self.turn(s, j) for s in range(chain.stages)]
        for s in range(j + 1, chain.stages):
            ways.append(self.head(s) + (k + 1) * (each[s] + chain.input_s[s]) + self.backward[s][j])
        return max(ways)

    def after_forward(self, j: int, left: int) -> float:
        """From the end of a forward pass of stage j to the end of the step, with so many micro-batches left."""
        chain = self.chain
        ways = [self.turn(j, s) + left * (chain.input_s[s] + chain.weight_s[s]) for s in range(j)]
        ways += [self.turn(j, j) + chain.input_s[j] + max(chain.weight_s[j], self.after_input(j, 1))]
        for s in range(j + 1, chain.stages):
            each = chain.forward_s[s] + chain.input_s[s] + chain.weight_s[s]
            ways.append(self.forward[j][s] + left * each)
        return max(ways)

    def after_input(self, j: int, left: int) -> float:
        """From the end of an I of stage j to the end of the step, in the stages before it."""
        chain = self.chain
        ways = (self.backward[j][s] + left * (chain.input_s[s] + chain.weight_s[s]) for s in range(j))
        return max(ways, default=0.0)


def _machine(jobs: list[Job]) -> float:
    """Jackson's preemptive schedule: of the released tasks the one with the longest tail runs."""
    now, latest, place = 0.0, 0.0, 0
    released: list[tuple[float, float]] = []
    while place < len(jobs) or released:
        if not released:
            now = max(now, jobs[place][0])
        while place < len(jobs) and jobs[place][0] <= now:
            heapq.heappush(released, (-jobs[place][2], jobs[place][1]))
            place += 1
        tail, left = heapq.heappop(released)
        until = jobs[place][0] if place < len(jobs) else math.inf
        if now + left > until:
            heapq.heappush(released, (tail, left - (until - now)))
            now = until
        else:
            now += left
            latest = max(latest, now - tail)
    return latest


def _memory(chain: Chain, paths: Paths) -> Iterator[float]:
    """Yield the bound of each stage whose device has a limit. Of the micro-batches that fit at once each has a place;
    one place has at least ceil(m / places) of them, one after the other."""
    for j in range(chain.stages):
        limit, saved = chain.limit(chain.devices[j]), chain.of(chain.saved_bytes, j)
        if math.isinf(limit) or not saved or chain.checkpoint_bytes:
            continue
        places = max(1, int(limit // saved))
        in_turn = math.ceil(chain.micro_batches / places)
        until_input = chain.forward_s[j] + paths.turn(j, j) + chain.input_s[j]
        last = until_input + max(chain.weight_s[j], paths.after_input(j, 1))
        yield paths.head(j) + (in_turn - 1) * (until_input + chain.weight_s[j]) + last
