"""Steps of `engines.myelin.optimizer_step`, and the same steps of torch's optimizer, on given gradients."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engines.myelin.engine import Config
from engines.myelin.optimizer_step import OptimizerStep
from harness.core.op import Op
from harness.interfaces import OptimizerSpec, SessionSpec
from harness.runtime.training_state import make_optimizer, optimizer_state

SHAPES = {
    "embedding": (11, 5),
    "scale": (1,),
    "first.weight": (7, 5),
    "first.bias": (7,),
    "empty": (0, 3),
    "last": (3, 7),
}
ELEMENTS = 55 + 1 + 35 + 7 + 0 + 21
ADAMW = OptimizerSpec("adamw", lr=0.01, weight_decay=0.1)
OPTIMIZERS = (
    OptimizerSpec("sgd", lr=0.1),
    OptimizerSpec("sgd", lr=0.1, momentum=0.9, weight_decay=0.01),
    OptimizerSpec("adam", lr=0.01),
    OptimizerSpec("adam", lr=0.01, weight_decay=0.1),
    ADAMW,
)
Gradients = dict[str, Tensor | None]


def parameters(dtype: str = "float32", frozen: Iterable[str] = ()) -> dict[str, nn.Parameter]:
    torch.manual_seed(1)
    made = {name: torch.randn(shape).to(getattr(torch, dtype)) for name, shape in SHAPES.items()}
    return {name: nn.Parameter(value, requires_grad=name not in frozen) for name, value in made.items()}


def gradients(seed: int, dtype: str = "float32", without: Iterable[str] = ()) -> Gradients:
    """Of whole steps: those of ranks and micro-batches are shares of them."""
    drawn = torch.Generator().manual_seed(seed)
    made = {name: torch.randn(shape, generator=drawn).to(getattr(torch, dtype)) for name, shape in SHAPES.items()}
    return {name: None if name in without else value for name, value in made.items()}


def backward(named: dict[str, nn.Parameter], wanted: Gradients) -> None:
    """A backward pass with these gradients."""
    losses = [(named[name] * value).sum() for name, value in wanted.items() if value is not None]
    torch.autograd.backward([loss for loss in losses if loss.requires_grad])


class Stepper:
    """A rank's updates, and what they noted."""

    def __init__(
        self, named: dict[str, nn.Parameter], optimizer: OptimizerSpec, dtype: str = "float32",
        group: dist.ProcessGroup | None = None, tied: Sequence[str] = (), **config: Any,
    ) -> None:  # fmt: skip
        self.named, self.noted = named, list[tuple[Op, float, float]]()
        spec = SessionSpec(("cpu",), optimizer, dtype, instead=({"precision.dtype": "float32"},))
        self.updates = OptimizerStep(named, tied, spec, Config(**config), 2, group, time.perf_counter, self.note)

    def note(self, op: Op, start: Any, end: Any) -> None:
        self.noted.append((op, start, end))

    @property
    def ops(self) -> list[tuple[str, str, int]]:
        """Notation, queue and bytes."""
        return [(str(op), op.queue, op.bytes) for op, _, _ in self.noted]

    def step(self, *micro_batches: Gradients) -> int:
        self.noted.clear()
        self.updates.begin()
        for one in micro_batches:
            backward(self.named, one)
        return self.updates.finish()


def plain(
    optimizer: OptimizerSpec, steps: Sequence[Sequence[Gradients]], dtype: str = "float32", frozen: Iterable[str] = ()
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights and state after the steps of torch's own optimizer."""
    named = parameters(dtype, frozen)
    own = make_optimizer(named.values(), optimizer)
    for step in steps:
        own.zero_grad(set_to_none=True)
        for one in step:
            backward(named, one)
        own.step()
    return {name: p.detach().clone() for name, p in named.items()}, optimizer_state(named, [own])


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """The same names and, bit for bit, the same tensors in the same dtypes."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        if isinstance(value, dict):
            assert_same(found[name], value)
        else:
            torch.testing.assert_close(
                found[name], value, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}"
            )
