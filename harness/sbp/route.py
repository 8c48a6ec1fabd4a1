"""What a search finds: the strategies of a chain's products, where tensors lie between them, and the moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from harness.sbp.chain import Matmul
from harness.sbp.costs import Place
from harness.sbp.grid import Strategy


class Step(NamedTuple):
    """A product, its strategy, and where its input and its output lie. A `free` input is there already."""

    item: Matmul
    strategy: Strategy
    enters: Place
    leaves: Place
    free: bool = False
    reduced: bool = True


class Move(NamedTuple):
    """An all-to-all of a tensor of a micro-batch; `past` a branch, at whose end it happens."""

    elements: float
    source: Place
    target: Place
    past: bool = False


Steps = list[Step | Move]


@dataclass(frozen=True)
class Route:
    """All that happens, in order, and the seconds of communication of one training step."""

    steps: tuple[Step | Move, ...]
    seconds: float

    @property
    def strategies(self) -> dict[str, Strategy]:
        return {step.item.name: step.strategy for step in self.steps if isinstance(step, Step)}


class Infeasible(ValueError):
    """No strategy is allowed; says for which product."""
