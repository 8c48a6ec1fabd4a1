"""The contract of tests/engines/contract.py for DeepSpeed: its pipeline, and ZeRO 0 to 3, in float32 and float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from harness.core.plan import Plan
from harness.interfaces import Session
from tests.engines import contract, networks, zoo
from tests.engines.contract import Case
from tests.engines.deepspeed.cases import GENTLE, MODELS, case
from tests.support.sessions import run_session
from tests.tiers import short_soak

pytestmark = pytest.mark.usefixtures("ranks")

CLOSE = 1e-6
"""What DeepSpeed must agree to in float32, losses and parameters of three steps."""


@pytest.fixture
def close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(contract.TOLERANCE, "float32", CLOSE)


@pytest.mark.fast
@pytest.mark.usefixtures("close")
@pytest.mark.parametrize("model", short_soak(MODELS, zoo.HEAVY))
def test_the_pipeline_trains_like_single(model: str) -> None:
    contract.check_training(case(model, stages=3))


@pytest.mark.usefixtures("close")
def test_a_stage_without_parameters() -> None:
    contract.check_training(replace(case("skips"), plan=Plan.contiguous([1, 13], 4)))


@pytest.mark.usefixtures("close")
def test_integers_that_skip_stages_have_no_gradient() -> None:
    contract.check_training(replace(case("skips"), model=networks.padded(), plan=Plan.contiguous([5, 6], 4)))


@pytest.mark.usefixtures("close")
@pytest.mark.parametrize("balance", [[3, 4], [2, 2, 3]])
def test_numbers_without_a_gradient_that_skip_stages(balance: list[int]) -> None:
    contract.check_training(replace(case("skips"), model=networks.detached(), plan=Plan.contiguous(balance, 4)))


@pytest.mark.usefixtures("close")
@pytest.mark.parametrize("model", ["skips", "norms", "tied", "amoebanet"])
def test_the_pipeline_recomputes(model: str) -> None:
    contract.check_training(case(model, stages=2, checkpoint="always"))


@pytest.mark.usefixtures("close")
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_replicas_recompute(zero: int) -> None:
    recomputed = case("norms" if zero == 2 else "skips", stages=1, data=2, zero=zero, checkpoint="always", m=2)
    contract.check_training(replace(recomputed, optimizer=replace(GENTLE, lr=0.005)))  # norms amplify every rounding
    contract.check_trace(recomputed)


@pytest.mark.parametrize("stages", [1, 2])
def test_autocast(stages: int) -> None:
    """The same kernels as in `single` under autocast, so the same loss."""
    cast = case("tokens", stages=stages, data=1)

    def losses(one: Case) -> list[float]:
        spec = replace(one.spec, autocast="bfloat16")

        def train(session: Session) -> list[float]:
            torch.manual_seed(3)
            return [session.step(one.model.sample(8)).loss for _ in range(2)]

        return run_session(one.engine, one.model, one.plan, spec, train)

    found = losses(cast)
    assert found == pytest.approx(losses(cast.reference), rel=1e-6)
    assert found != pytest.approx(run_plainly(cast), rel=1e-6)


def run_plainly(one: Case) -> list[float]:
    return contract.reference(one, steps=2).losses


@pytest.mark.parametrize("model", ["skips", "tied", "gpt", "llama"])
def test_the_pipeline_in_float64(model: str) -> None:
    contract.check_training(replace(case(model, stages=2), dtype="float64"))


@pytest.mark.usefixtures("close")
@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("model", ["tied", "unet"])
def test_pipelines_side_by_side_train_like_single(model: str, zero: int) -> None:
    contract.check_training(case(model, stages=2, data=2, zero=zero, m=2))


@pytest.mark.usefixtures("close")
@pytest.mark.parametrize(("model", "zero"), [("mlp", 0), ("tied", 1), ("unet", 2), ("gpt", 3)])
def test_zero_trains_like_single(model: str, zero: int) -> None:
    contract.check_training(conditioned(model, case(model, stages=1, data=2, zero=zero, m=2)))


@pytest.mark.usefixtures("close", "at_length")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_zero_trains_every_model_like_single(model: str, zero: int) -> None:
    contract.check_training(conditioned(model, case(model, stages=1, data=2, zero=zero, m=2)))


def conditioned(model: str, one: Case) -> Case:
    """A case that says something about the engine where the model magnifies rounding.

    Gradients of four tasks, two in each replica, are added up in another order than in `single`. Batch norm over few
    values divides by small spreads and magnifies that, in deep networks (where ReLU and max pooling flip, too) a
    thousandfold in each step. In "norms" twice the samples are enough. The deep ones get one task in each replica: the
    sum of two is the same in any order, so all must be equal. `test_sums_of_four_tasks` has the rest.
    """
    if model == "norms":
        return replace(one, samples=2 * one.samples)
    if model in ("amoebanet", "inception"):
        return replace(one, plan=replace(one.plan, micro_batches=1))
    return one


@pytest.mark.usefixtures("close", "at_length")
@pytest.mark.parametrize(("zero", "stages"), [(1, 2), (2, 1)])
def test_sums_of_four_tasks(zero: int, stages: int) -> None:
    """AmoebaNet with more samples and small steps, whose differences stay small; they still change the weights by far
    more than the tolerance."""
    one = replace(case("amoebanet", stages, data=2, zero=zero, m=2), samples=32)
    one = replace(one, optimizer=replace(GENTLE, lr=1e-4))
    contract.check_training(one)
    states = [state["model"] for state in contract.reference(one).states]
    assert max(float((states[-1][name] - value).abs().max()) for name, value in states[0].items()) > 1000 * CLOSE


@pytest.mark.parametrize(("zero", "stages"), [(0, 2), (1, 2), (2, 1), (3, 1)])
def test_running_statistics_are_averaged_over_replicas(zero: int, stages: int) -> None:
    contract.check_statistics(case("norms", stages=stages, data=2, zero=zero, m=2))


@pytest.mark.parametrize(("zero", "stages", "data"), [(0, 3, 1), (1, 2, 2), (1, 1, 2), (3, 1, 2)])
def test_states_move_between_engines(zero: int, stages: int, data: int) -> None:
    contract.check_state_moves(case("tied", stages=stages, data=data, zero=zero, m=2))


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("model", ["skips", "pairs", "tied", "unet"])
def test_the_pipeline_runs_its_schedule(model: str, checkpoint: str) -> None:
    contract.check_trace(case(model, stages=4, checkpoint=checkpoint))


@pytest.mark.parametrize(("zero", "stages"), [(0, 2), (1, 2), (0, 1), (1, 1), (2, 1), (3, 1)])
def test_replicas_run_their_schedule(zero: int, stages: int) -> None:
    contract.check_trace(case("tied", stages=stages, data=2, zero=zero, m=2))


@pytest.mark.parametrize(("zero", "stages", "data"), [(0, 2, 1), (1, 2, 2), (3, 1, 2)])
def test_a_crash_in_any_rank_reaches_the_caller(zero: int, stages: int, data: int) -> None:
    contract.check_crash(case("skips", stages=stages, data=data, zero=zero, m=2), layer=11)


def test_one_backward_pass_for_all_tensors_of_a_message() -> None:
    """DeepSpeed calls backward for each; `engines.deepspeed.pipeline_module.OnePass` makes one pass of them."""
    passes = call_counting(case("skips", stages=2))
    assert passes == 4, "as many as micro-batches"


def call_counting(case: Case) -> int:
    """How often the backward pass of a step goes through the first layer with parameters."""

    def count(session: Session) -> int:
        seen: list[int] = []
        parameter = session.stage[1].weight  # type: ignore[attr-defined]
        parameter.register_hook(lambda gradient: seen.append(1))
        session.step(case.model.sample(case.samples))
        return len(seen)

    return run_session(case.engine, case.model, case.plan, case.spec, count)
