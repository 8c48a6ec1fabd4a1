"""Communication costs of a strategy in one step, and the layouts of its input and output (AutoDDL, section 4.3).

A layout is a degree: the digits of the grid that split rows, all others split columns. A matmul takes its input from a
layout by an all-gather over p1, which may undo splits of rows (c of them) and of columns, and leaves a layout by a
reduce-scatter over p2, into rows (a of them) and columns:

    rows in = p0 + c,  c within p1          rows out = p0 + a,  a within p2

`paper` puts all of p1 and p2 on one side, and pays an all-to-all over all devices wherever neighbours' layouts or sides
differ; `mixed` takes the best split, and pays an all-to-all over the digits that change sides.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from harness.sbp import summa
from harness.sbp.collective_costs import Collectives
from harness.sbp.device_grid import Degree, Grid, Strategy, Summa, below, plus
from harness.sbp.matmul_chain import Attention, Matmul, OneWay

Paths = Literal["mixed", "paper"]
Splits = Literal["even", "power_of_two", "any"]
INFINITE = float("inf")
LARGE = 2.0**60
"""Bytes."""
EXCHANGED = 3
"""Copies of a buffer during a collective: as it was computed, sorted by receiving rank, and as received from others."""


class Place(NamedTuple):
    """The layout of a tensor between matmuls: the digits that split its rows, and for `paper` the side that p1 or p2
    splits."""

    rows: Degree
    side: str = ""


@dataclass(frozen=True)
class Rules:
    """Which strategies are allowed.

    `max_replicas` is the largest p0, the paper's limit of memory. `padded` features need not divide; samples and heads
    must. With `whole_convolutions` these are split by samples alone. While a matmul's backward pass exchanges
    gradients, it may need `exchange_bytes` at most.
    """

    paths: Paths = "mixed"
    splits: Splits = "even"
    max_replicas: int | None = None
    padded: bool = False
    whole_convolutions: bool = False
    exchange_bytes: float = INFINITE


@dataclass(frozen=True)
class Costs:
    """Seconds of communication of one step of `micro_batches`, forward and backward.

    `state` are the bytes that a device keeps for each byte of its shard of a weight (weight, gradient, optimizer), of
    which `trained_state` only where that is trained. With recomputation no matmul `keeps` its input.
    """

    collectives: Collectives
    element_bytes: int
    micro_batches: int
    rules: Rules
    state: float = 1.0
    keeps: bool = True
    trained_state: float = 0.0

    @property
    def grid(self) -> Grid:
        return self.collectives.grid

    @cached_property
    def places(self) -> list[Place]:
        """All places, in one order that vectors and matrices follow."""
        if self.rules.paths == "mixed":
            return [Place(rows) for rows in self.grid.degrees]
        return [Place(rows, side) for rows in self.grid.degrees for side in ("rows", "columns")]

    # -- what one matmul costs -----------------------------------------------------------------------------------

    def entering(self, item: Matmul, strategy: Strategy) -> float:
        """Returns seconds of the all-gather of a matmul's input, and the reduce-scatter of that input's gradient."""
        size = item.input_elements * self.element_bytes / self._size(plus(strategy.p0, strategy.p2))
        all_gather_s = self.collectives.seconds("all_gather", strategy.p1, size)
        back_s = 0.0 if item.cut else self.collectives.seconds("reduce_scatter", strategy.p1, size)
        return self.micro_batches * (all_gather_s + back_s)

    def leaving(self, item: Matmul, strategy: Strategy) -> float:
        """Returns seconds of the reduce-scatter of a matmul's output, and the all-gather of that output's gradient."""
        size = item.output_elements * self.element_bytes / self._size(plus(strategy.p0, strategy.p1))
        seconds = (
            self.collectives.seconds(name, strategy.p2, size * share)
            for share in item.shares
            for name in (("reduce_scatter",) if item.cut and item.frozen else ("reduce_scatter", "all_gather"))
        )
        return self.micro_batches * sum(seconds)

    def weights(self, item: Matmul, strategy: Strategy) -> float:
        """Returns seconds of the all-reduce of the weight's gradient, once in a step; none of a frozen weight."""
        if item.frozen:
            return 0.0
        size = item.weight_bytes / self._size(plus(strategy.p1, strategy.p2))
        return sum(self.collectives.seconds("all_reduce", strategy.p0, size * share) for share in item.shares)

    def matmul_seconds(self, item: Matmul, strategy: Strategy, free: bool) -> float:
        """Returns the seconds of all of these. A `free` input costs nothing, as that of a look-up."""
        entering = 0.0 if free or item.look_up else self.entering(item, strategy)
        return entering + self.leaving(item, strategy) + self.weights(item, strategy)

    def held(self, item: Matmul, strategy: Strategy | Summa) -> float:
        """Returns the bytes on a device: the state of the weight's shard, and the input that waits for the backward
        pass."""
        if isinstance(strategy, Summa):
            inputs = weights = self.grid.all
        else:
            inputs, weights = plus(strategy.p0, strategy.p2), plus(strategy.p1, strategy.p2)
        size, kept = self._size, self.keeps and not item.look_up
        waiting = item.input_elements * self.element_bytes / size(inputs) if kept else 0.0
        return self.state_of(item) * item.weight_bytes / size(weights) + waiting

    def state_bytes(self, items: Collection[Matmul]) -> float:
        """Returns the bytes that are kept of the weights of these matmuls, on all devices together."""
        frozen = sum(item.weight_bytes for item in items if item.frozen)
        return self.state * sum(item.weight_bytes for item in items) - self.trained_state * frozen

    def state_of(self, item: Matmul) -> float:
        """Returns the bytes that are kept for each byte of a matmul's weight."""
        return self.state - self.trained_state if item.frozen else self.state

    def exchange_bytes(self, item: Matmul, strategy: Strategy) -> float:
        """Returns the bytes of a matmul's exchanges of gradients (`exchange_bytes` below)."""
        return exchange_bytes(item, self.grid, strategy, self.element_bytes)

    def moved(self, source: Place, target: Place) -> Degree:
        """Returns the digits over which an all-to-all moves a tensor from one place to another."""
        if self.rules.paths == "paper":
            return self.grid.none if source == target else self.grid.all
        return tuple(abs(a - b) for a, b in zip(source.rows, target.rows, strict=True))

    @cached_property
    def _moves(self) -> np.ndarray:
        """(2, places, places): seconds of latency, and for each byte of the whole tensor, of a move and its
        gradient's."""
        n = len(self.places)
        seconds = np.zeros((2, n, n))
        for i, source in enumerate(self.places):
            for j, target in enumerate(self.places):
                degree = self.moved(source, target)
                alone = self.collectives.seconds("all_to_all", degree, 0.0)
                large = self.collectives.seconds(
                    "all_to_all", degree, LARGE
                )  # large, so that rounding of the latency does not matter
                byte = (large - alone) / LARGE / self._size(self.grid.all)
                seconds[:, i, j] = 2 * self.micro_batches * np.array((alone, byte))
        return seconds

    def moving(self, elements: float) -> np.ndarray:
        """Returns (places, places): seconds to move a tensor of a micro-batch, and its gradient, if it has one."""
        alone, byte = self._moves
        result: np.ndarray = alone + byte * elements * self.element_bytes
        return result / 2 if isinstance(elements, OneWay) else result

    # -- places of its input and output -----------------------------------------------------------------------------

    def strategies(self, item: Matmul) -> list[Strategy]:
        return [strategy for strategy in self.grid.strategies if self.allows(item, strategy)]

    def allows(self, item: Matmul, strategy: Strategy) -> bool:
        """Returns whether a matmul can have this strategy: what it splits divides, p0 and exchanges are within their
        limits."""
        p0, p1, p2 = map(self._size, strategy)
        rules = self.rules
        if (item.whole or (item.conv and rules.whole_convolutions)) and p0 < self._size(self.grid.all):
            return False
        if rules.max_replicas is not None and p0 > rules.max_replicas:
            return False
        if self.exchange_bytes(item, strategy) > rules.exchange_bytes:
            return False
        if rules.splits == "power_of_two" and (p1 & (p1 - 1) or p2 & (p2 - 1)):
            return False
        uneven = 0 if rules.padded else item.divided % p1 or item.inputs % p2
        return rules.splits == "any" or not (item.samples % p0 or uneven)

    def can_be_placed(self, place: Place, samples: int, columns: int, always: bool = False) -> bool:
        """Returns whether rows and columns divide; attention's samples and heads must, `always`."""
        rows = self._size(place.rows)
        if self.rules.splits == "any" and not always:
            return True
        padded = self.rules.padded and not always
        return samples % rows == 0 and (padded or columns % (self._size(self.grid.all) // rows) == 0)

    def comes_from(self, item: Matmul, strategy: Strategy) -> list[tuple[Place, Degree]]:
        """Returns places from which an all-gather alone brings its input, with the digits of rows that it gathers."""
        places = []
        for undone in self._sides(strategy.p1):
            rows = plus(strategy.p0, undone[0])
            if item.look_up or self.can_be_placed(Place(rows), item.samples, item.inputs):
                places.append((Place(rows, undone[1]), undone[0]))
        return places

    def goes_to(self, item: Matmul, strategy: Strategy) -> list[tuple[Place, Degree]]:
        """Returns places to which a reduce-scatter alone brings its output, with the digits of rows that it splits."""
        places = []
        for split in self._sides(strategy.p2):
            rows = plus(strategy.p0, split[0])
            if self.can_be_placed(Place(rows), item.samples, item.divided):
                places.append((Place(rows, split[1]), split[0]))
        return places

    def _sides(self, degree: Degree) -> list[tuple[Degree, str]]:
        if self.rules.paths == "mixed":
            return [(taken, "") for taken in below(degree)]
        return [(self.grid.none, "rows"), (degree, "columns")]

    def attended(self, item: Attention) -> np.ndarray:
        """Returns (places, places): 0 from each place to itself where heads and samples are whole, else infinite."""
        n = len(self.places)
        seconds = np.full((n, n), INFINITE)
        for i, place in enumerate(self.places):
            if self.can_be_placed(place, item.samples, item.heads, always=True):
                seconds[i, i] = 0.0
        return seconds

    def _size(self, degree: Degree) -> int:
        return self.grid.size(degree)


def returns(undone: Degree, split: Degree) -> bool:
    """Returns whether a matmul's blocks stay in one order of the digits: rows gain digits or lose them, not both.

    Only then a tensor can return to its layout, as the input of a residual branch must.
    """
    return not any(a and b for a, b in zip(undone, split, strict=True))


def exchange_bytes(item: Matmul, grid: Grid, strategy: Strategy | Summa, width: int) -> float:
    """Returns the bytes of a matmul's backward pass beyond the even shares of the gradients of its output and its
    input.

    gradient of y --all_gather over p2--> of partial sums of y --> partial sums of that of x --reduce_scatter over p1-->
    """
    if isinstance(strategy, Summa):
        return summa.working_bytes(item, grid, strategy, width)
    devices = grid.size(grid.all)
    x, y = 0 if item.look_up else item.input_elements * width, item.output_elements * width
    p0, p1, p2 = (grid.size(degree) for degree in (strategy.p0, strategy.p1, strategy.p2))
    gathered_input, gathered_output = x / (p0 * p2), y / (p0 * p1)
    moments = [
        y / devices + (EXCHANGED * gathered_output if p2 > 1 else 0),
        gathered_output + gathered_input,
        x / devices + ((EXCHANGED - 1) * gathered_input if p1 > 1 else 0),  # the gathered input is freed by then
    ]
    return max(moments) - (x + y) / devices
