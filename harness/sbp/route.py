"""A route, the result of a search: strategies of a chain's matmuls, layouts of tensors between them, and moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from harness.sbp.device_grid import Strategy, Summa
from harness.sbp.matmul_chain import Matmul
from harness.sbp.strategy_costs import Place


class Step(NamedTuple):
    """A matmul, its strategy, and the layouts of its input and its output. A `free` input needs no communication."""

    item: Matmul
    strategy: Strategy | Summa
    enters: Place
    leaves: Place
    free: bool = False
    reduced: bool = True


class Move(NamedTuple):
    """An all-to-all of a tensor of a micro-batch; with `past`, of the tensor that bypasses a branch, at its end."""

    elements: float
    source: Place
    target: Place
    past: bool = False


Steps = list[Step | Move]


@dataclass(frozen=True)
class Route:
    """All steps, in order, and the seconds of communication of one training step."""

    steps: tuple[Step | Move, ...]
    seconds: float

    @property
    def strategies(self) -> dict[str, Strategy | Summa]:
        return {step.item.name: step.strategy for step in self.steps if isinstance(step, Step)}


class Infeasible(ValueError):
    """No strategy is allowed; `matmuls` are the names of those that allow none together, where that is known."""

    def __init__(self, message: str, *matmuls: str) -> None:
        super().__init__(message)
        self.matmuls = matmuls
