"""The contract of tests/engines/contract.py for DeepSpeed: its pipeline, and ZeRO 0 to 3."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from engines.deepspeed import config as deepspeed_config
from engines.deepspeed.config import Config, build
from harness.cluster import Cluster
from harness.interfaces import Model, OptimizerSpec, Session
from harness.launch import call
from harness.memory import named
from harness.mesh import Mesh
from harness.plan import Plan
from tests.engines import contract, networks, zoo
from tests.engines.contract import Case

MODELS: dict[str, Model] = {**networks.ALL, **{name: zoo.model(name) for name in zoo.SIZES}}
CLOSE = 1e-6
"""What DeepSpeed must agree to in float32, losses and parameters of three steps."""
GENTLE = OptimizerSpec("sgd", lr=0.02, momentum=0.9)


def case(model: str, stages: int = 2, data: int = 1, zero: int = 0, checkpoint: str = "never", m: int = 4) -> Case:
    network = MODELS[model]
    layers = len(network.layers())
    balance = [layers // stages + (j < layers % stages) for j in range(stages)]
    plan = replace(Plan.contiguous(balance, m, checkpoint), mesh=Mesh(data=data, pipeline=stages))
    return Case(build(Config(zero=zero, checkpoint=checkpoint)), network, plan, "float32", optimizer=GENTLE)


@pytest.fixture
def close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(contract.TOLERANCE, "float32", CLOSE)


@pytest.mark.usefixtures("close")
@pytest.mark.parametrize("model", MODELS)
def test_the_pipeline_trains_like_single(model: str) -> None:
    contract.check_training(case(model, stages=3))


@pytest.mark.usefixtures("close")
@pytest.mark.parametrize("model", ["skips", "norms", "tied", "amoebanet"])
def test_the_pipeline_recomputes(model: str) -> None:
    contract.check_training(case(model, stages=2, checkpoint="always"))


@pytest.mark.usefixtures("close")
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_replicas_recompute(zero: int) -> None:
    recomputed = case("norms" if zero == 2 else "skips", stages=1, data=2, zero=zero, checkpoint="always", m=2)
    contract.check_training(recomputed)
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

        return call(one.engine, one.model, one.plan, spec, train)

    found = losses(cast)
    assert found == pytest.approx(losses(cast.reference), rel=1e-6)
    assert found != pytest.approx(run_plainly(cast), rel=1e-6)


def run_plainly(one: Case) -> list[float]:
    return contract.run(one.reference, steps=2).losses


@pytest.mark.parametrize("model", ["skips", "tied", "gpt"])
def test_the_pipeline_in_float64(model: str) -> None:
    contract.check_training(replace(case(model, stages=2), dtype="float64"))


@pytest.mark.usefixtures("close")
@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("model", ["tied", "unet"])
def test_pipelines_side_by_side_train_like_single(model: str, zero: int) -> None:
    contract.check_training(case(model, stages=2, data=2, zero=zero, m=2))


@pytest.mark.usefixtures("close")
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("model", ["skips", "shared", "tied", "unet", "gpt", "resnet"])
def test_zero_trains_like_single(model: str, zero: int) -> None:
    contract.check_training(case(model, stages=1, data=2, zero=zero, m=2))


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
    """DeepSpeed calls backward for each; `engines.deepspeed.module.OnePass` makes one pass of them."""
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

    return call(case.engine, case.model, case.plan, case.spec, count)


def test_an_optimizer_with_master_weights_in_bfloat16() -> None:
    """Steps too small for bfloat16 add up in the float32 copy of the weights."""
    tiny = replace(case("skips", stages=2, zero=1), dtype="bfloat16", optimizer=OptimizerSpec("sgd", lr=1e-4))

    def moved(session: Session) -> tuple[float, bool]:
        before = session.state_dict().get("model", {})  # complete in rank 0
        torch.manual_seed(3)
        batch = tiny.model.sample(tiny.samples)
        losses = [session.step(batch).loss for _ in range(40)]
        after = session.state_dict().get("model", {})
        return losses[0] - losses[-1], any(not torch.equal(before[name], value) for name, value in after.items())

    less, changed = call(tiny.engine, tiny.model, tiny.plan, tiny.spec, moved)
    assert less > 0 and changed


def test_offloading_needs_a_compiler_only_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    deepspeed_config.check(Config(zero=1))
    with pytest.raises(
        ValueError, match=r"engine\.offload true   compiles cpu_adam, and there is no g\+\+ and no ninja"
    ):
        deepspeed_config.check(Config(zero=1, offload=True))


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (Config(zero=4), "engine.zero 4   is none of 0, 1, 2, 3   -> engine.zero=3"),
        (Config(checkpoint="except_last"),
         "engine.checkpoint except_last   is none of never, always   -> engine.checkpoint=always"),
        (Config(offload=True), "engine.offload true   needs state in shards, engine.zero is 0   -> engine.zero=1"),
    ],
)  # fmt: skip
def test_values_that_no_run_can_have(config: Config, line: str) -> None:
    with pytest.raises(ValueError) as error:
        deepspeed_config.check(config)
    assert line in str(error.value).splitlines()


def problems(case: Case, dtype: str = "float32", **keys: object) -> Sequence[str]:
    profile = replace(contract.profile_of(case.model), dtype=dtype)
    engine = build(Config(**keys))  # type: ignore[arg-type]
    return [p.key for p in engine.check(case.plan, profile, Cluster(devices_per_node=8), named("sgd_fp32"))]


def test_number_formats_that_deepspeed_cannot_train() -> None:
    assert problems(case("skips")) == []
    assert problems(case("skips"), "float64") == []
    assert problems(case("skips", data=2), "float64") == ["precision.dtype float64"]
    assert problems(case("skips"), "bfloat16") == ["precision.dtype bfloat16"]
    assert problems(case("skips"), "bfloat16", zero=1) == []
    assert problems(case("skips"), "float16", zero=1) == []
    stages_and_sgd = ["engine.offload true"] * 2
    assert problems(case("skips"), zero=1, offload=True) == stages_and_sgd


def test_zero_2_and_3_have_no_pipeline() -> None:
    can = build(Config(zero=2)).capabilities
    assert (can.pipeline, can.data, can.because) == (False, True, "engine.zero=2")
    assert build(Config(zero=1)).capabilities.pipeline
