"""Training that diverges is reported with the step, the rank, the stage and the largest gradient norm."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from harness.core.problem import Problem
from harness.interfaces import StepMetrics
from harness.launch import forked_ranks
from harness.runtime.gradient_norms import norms_of
from harness.worker.divergence import Diverged, DivergenceCheck


class Session:
    """One with two parameters, in two stages."""

    def __init__(self, **gradients: Tensor) -> None:
        self.gradients = gradients

    def gradient_norms(self) -> dict[str, float]:
        return norms_of(self.gradients)

    def stage_of(self, name: str) -> int:
        return "ab".index(name)


def check(session: Session) -> DivergenceCheck:
    return DivergenceCheck(session)  # type: ignore[arg-type]


def test_a_loss_comes_with_the_largest_norm_of_the_step_before() -> None:
    session = Session(a=torch.tensor([3.0, 4.0]), b=torch.tensor([1.0]))
    one = check(session)
    one.after_step(6, StepMetrics(1.0, 1.0))
    session.gradients = {"a": torch.tensor([math.nan])}
    with pytest.raises(Diverged, match=r"the loss is nan at step 7.* norm of step 6 is 5 \(a, rank 0, stage 0\)"):
        one.after_step(7, StepMetrics(math.nan, 1.0))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_gradient_is_named(value: float) -> None:
    one = check(Session(a=torch.ones(3), b=torch.tensor([1.0, value])))
    with pytest.raises(Diverged, match=r"a gradient is not finite at step 0.*\(b, rank 0, stage 1\)"):
        one.after_step(0, StepMetrics(1.0, 1.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_gradient_whose_squares_overflow_is_finite(dtype: torch.dtype) -> None:
    large = torch.full((4,), torch.finfo(dtype).max / 8, dtype=dtype)
    one = check(Session(a=large))
    one.after_step(0, StepMetrics(1.0, 1.0))
    assert one.largest and one.largest.norm == pytest.approx(2 * float(large[0]), rel=1e-3)


def test_steps_that_the_optimizer_skips_do_no_harm() -> None:
    one = check(Session(a=torch.tensor([math.inf])))
    one.after_step(0, StepMetrics(1.0, 1.0, skipped=Problem("precision.dtype", "float16", "overflows")))


def test_of_several_ranks_the_largest_is_reported() -> None:
    def work() -> None:
        rank = torch.distributed.get_rank()
        one = check(Session(**{"ab"[rank]: torch.tensor([10.0**rank])}))
        one.after_step(2, StepMetrics(1.0, 1.0))
        one.after_step(3, StepMetrics(math.inf, 1.0))

    with pytest.raises(Diverged, match=r"the loss is inf at step 3.* is 10 \(b, rank 1, stage 1\)"):
        forked_ranks.run_on_ranks(2, work, ("cpu", "cpu"))
