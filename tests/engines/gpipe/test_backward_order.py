"""The order of backward tasks and recomputations: that of the installed torchgpipe, with and without its fork and join.

torchgpipe's own ablation replaces `torchgpipe.pipeline.depend` by nothing; a recomputation is still joined to the
output of its task. Autograd on one queue (all devices are the CPU) gives one order of all tasks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torchgpipe.pipeline
from torch import Tensor, nn
from torch.autograd import Function
from torchgpipe import GPipe as TorchGPipe

from engines.gpipe.gpipe_module import GPipe
from harness.core.op import Op
from harness.nn.skip import Skippable
from harness.schedule.builders.gpipe import RECOMPUTE, gpipe
from harness.schedule.transfers import StageSkip, transfers
from tests.support.gpipe_drivers import run_tensors

Orders = dict[int, list[Op]]  # of each stage
RAN: list[Op] = []  # of the module, and not of the layers: stages may not share what a pass changes


class Noted(Function):
    """Identity that notes which micro-batch, the number in its first element, goes backward through a stage."""

    @staticmethod
    def forward(ctx: Any, stage: int, x: Tensor, weight: Tensor) -> Tensor:
        ctx.op = Op(stage, "B", int(x.flatten()[0]))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, Tensor]:  # type: ignore[override]
        RAN.append(ctx.op)
        return None, gradient, gradient.sum().reshape(())


class Noting(Skippable):
    """A stage that notes its forward tasks (the second one of a micro-batch is a recomputation) and backward tasks."""

    def __init__(self, stage: int, stashes: tuple[str, ...] = (), pops: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.stage, self.stashes, self.pops = stage, stashes, pops
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        op = Op(self.stage, "F", int(x.flatten()[0]))
        RAN.append(Op(self.stage, "R", op.micro_batch) if op in RAN else op)
        for name in self.pops:
            x = x + 0 * self.pop(name)
        x = Noted.apply(self.stage, x, self.weight)
        for name in self.stashes:
            self.stash(name, x * 1)
        return x


def numbers(m: int) -> Tensor:
    """Micro-batches of one sample, each with its own number."""
    return torch.arange(m, dtype=torch.float32).reshape(m, 1)


def backward_of(output: Tensor) -> list[Op]:
    """Runs the backward pass; the recomputations and backward tasks in order."""
    output.sum().backward()
    ran = of_backward(RAN)
    RAN.clear()
    return ran


def of_backward(ran: Sequence[Op]) -> list[Op]:
    return [op for op in ran if op.kind in ("B", "R")]


def of_torchgpipe(stages: int, m: int, mode: str) -> list[Op]:
    """In a process that has made autograd nodes before, as from the second step on.

    Its worker threads, which number their nodes from 0, are new in each pass; this thread's numbers go on.
    """
    for _ in range(1000):
        torch.ones((), requires_grad=True).clone()
    layers = nn.Sequential(*stage_layers(stages))
    pipe = TorchGPipe(layers, [1] * stages, devices=["cpu"] * stages, chunks=m, checkpoint=mode)
    return backward_of(pipe(numbers(m)))


def stage_layers(stages: int) -> list[Noting]:
    return [Noting(j) for j in range(stages)]


def of_engine(driver: str, layers: Sequence[Noting], m: int, mode: str, dependency: bool) -> list[Op]:
    n = len(layers)
    pipe = GPipe(nn.Sequential(*layers), [1] * n, ["cpu"] * n, m, mode, dependency=dependency)
    return backward_of(
        pipe(numbers(m)) if driver == "queues" else run_tensors(pipe, numbers(m), m, mode, dependency)[1]
    )


def of_schedule(stages: int, m: int, mode: str, dependency: bool, skips: Sequence[StageSkip] = ()) -> Orders:
    chain = transfers([0] * (stages - 1), skips, portals=True)
    schedule = gpipe(m, range(stages), chain, mode, dependency)
    return {queue.device: of_backward(queue.ops) for queue in schedule.queues if queue.name == "compute"}


def by_stage(ops: list[Op], stages: int) -> Orders:
    return {j: [op for op in ops if op.stage == j] for j in range(stages)}


CASES = list(itertools.product((2, 3, 4), range(2, 9), RECOMPUTE))


@pytest.mark.parametrize("dependency", [True, False])
@pytest.mark.parametrize(("stages", "m", "mode"), CASES)
def test_the_order_is_torchgpipes(
    stages: int, m: int, mode: str, dependency: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not dependency:
        monkeypatch.setattr(torchgpipe.pipeline, "depend", lambda *_: None)
    theirs = by_stage(of_torchgpipe(stages, m, mode), stages)
    assert of_schedule(stages, m, mode, dependency) == theirs
    for driver in ("queues", "tensors"):
        assert by_stage(of_engine(driver, stage_layers(stages), m, mode, dependency), stages) == theirs, driver


@pytest.mark.usefixtures("computation")
def test_the_order_over_all_stages_is_torchgpipes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one queue; that of the graph for CUDA devices, which the schedule's order follows, is the same."""
    monkeypatch.setattr(torchgpipe.pipeline, "depend", lambda *_: None)
    for stages, m, mode in CASES:
        assert of_engine("tensors", stage_layers(stages), m, mode, False) == of_torchgpipe(stages, m, mode), (
            stages,
            m,
            mode,
        )


def test_without_fork_and_join_the_last_stage_recomputes_all_first() -> None:
    found = of_schedule(2, 4, "except_last", False)
    assert " ".join(map(str, found[1])) == "1R2 1R1 1R0 1B3 1B2 1B1 1B0"
    assert " ".join(map(str, found[0])) == "0R2 0B3 0R1 0B2 0R0 0B1 0B0"


@pytest.mark.parametrize("dependency", [True, False])
@pytest.mark.parametrize("mode", RECOMPUTE)
@pytest.mark.parametrize("skips", [[(0, 2)], [(0, 3), (1, 3)], [(0, 1), (1, 3), (0, 2)]], ids=str)
def test_with_skips_both_graphs_keep_the_order_of_the_schedule(
    skips: list[tuple[int, int]], mode: str, dependency: bool
) -> None:
    names = {pair: f"from{pair[0]}to{pair[1]}" for pair in skips}
    layers = [
        Noting(
            j,
            tuple(name for (source, _), name in names.items() if source == j),
            tuple(name for (_, target), name in names.items() if target == j),
        )
        for j in range(4)
    ]
    theirs = of_schedule(4, 5, mode, dependency, [StageSkip(*pair, name) for pair, name in names.items()])
    for driver in ("queues", "tensors"):
        assert by_stage(of_engine(driver, layers, 5, mode, dependency), 4) == theirs, driver
