"""The contract of tests/engines/contract.py for single and gpipe."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engines.gpipe import engine as gpipe_config
from engines.gpipe.engine import Config as GPipeConfig
from engines.gpipe.engine import build as build_gpipe
from engines.single import engine as single_config
from engines.single.engine import Config as SingleConfig
from engines.single.engine import build as build_single
from harness.config import registry
from harness.core.plan import Plan
from harness.interfaces import Model, OptimizerSpec
from planners.block_partition import even
from tests.engines import contract, networks, zoo
from tests.engines.contract import Case, gentle
from tests.problems import rows
from tests.tiers import short_soak

ZOO: dict[str, Model] = {name: zoo.model(name) for name in zoo.SIZES}
MODELS: dict[str, Model] = {**networks.ALL, **ZOO}
MODES = ("never", "except_last", "always")
COMPONENTS = {
    "all": {},
    "no dependency": {"dependency": False},
    "no streams": {"streams": False},
    "no portals": {"portals": False},
    "none": {"dependency": False, "streams": False, "portals": False},
}


def case(model: str, stages: int = 2, mode: str = "never", micro_batches: int = 4, **options: object) -> Case:
    network = MODELS[model]
    plan = Plan.contiguous(even(len(network.layers()), stages), micro_batches, mode)
    return Case(build_gpipe(GPipeConfig(**options)), network, plan)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("model", networks.ALL)
def test_gpipe_trains_like_single(model: str, stages: int, mode: str) -> None:
    contract.check_training(case(model, stages, mode))


@pytest.mark.parametrize("mode", MODES)
def test_gpipe_trains_a_model_of_several_outputs(mode: str) -> None:
    contract.check_training(
        replace(case("pairs", 2, mode), model=networks.outputs(), plan=Plan.contiguous([2, 2], 4, mode))
    )


@pytest.mark.fast
@pytest.mark.parametrize(("stages", "mode"), [(2, "never"), (3, "except_last"), (4, "always")])
@pytest.mark.parametrize("model", ZOO)
def test_gpipe_trains_the_zoo_like_single(model: str, stages: int, mode: str) -> None:
    contract.check_training(gentle(case(model, stages, mode)))


@pytest.mark.parametrize("model", short_soak(ZOO, zoo.HEAVY))
def test_single_recomputes_the_zoo(model: str) -> None:
    plain = gentle(case(model).reference)
    contract.check_training(replace(plain, plan=replace(plain.plan, recompute="except_last")))


@pytest.mark.parametrize("model", short_soak(ZOO, zoo.HEAVY))
def test_gpipe_runs_its_schedule_on_the_zoo(model: str) -> None:
    contract.check_trace(case(model, 3, "except_last"))


def test_every_model_is_held_to_the_contract() -> None:
    plugins = {plugin.name for plugin in registry.scan() if plugin.group == "model"}
    plugins.remove("hf")  # tests/models/test_hf.py compares its layers with the networks that they are made of
    assert plugins == {plugin for plugin, _ in zoo.SIZES.values()}


@pytest.mark.parametrize("dropout", [True, False])
@pytest.mark.parametrize("model", networks.ALL)
def test_gpipe_in_float32(model: str, dropout: bool) -> None:
    one = replace(case(model, 3, "except_last"), dtype="float32", dropout=dropout)
    contract.check_training(replace(one, optimizer=OptimizerSpec("sgd", lr=0.02)))


@pytest.mark.parametrize("options", COMPONENTS.values(), ids=COMPONENTS.keys())
@pytest.mark.parametrize("model", ["skips", "pairs", "tied"])
def test_gpipe_without_its_components(model: str, options: dict[str, bool]) -> None:
    contract.check_training(case(model, 3, "except_last", **options))


@pytest.mark.parametrize("samples", [7, 3])
def test_gpipe_with_uneven_micro_batches_and_more_chunks_than_samples(samples: int) -> None:
    contract.check_training(replace(case("skips", 2, "except_last", 5), samples=samples))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", ["skips", "tied"])
def test_several_stages_on_one_device(model: str, mode: str) -> None:
    """Of "tied" the layer that stands in two places is in two stages of device 0."""
    plan = Plan.contiguous(even(len(MODELS[model].layers()), 4), 4, mode)
    plan = replace(plan, stages=tuple(replace(stage, device=stage.device % 2) for stage in plan.stages))
    folded = replace(case(model), plan=plan)
    contract.check_training(folded)
    contract.check_trace(folded)


@pytest.mark.parametrize("mode", MODES)
def test_single_with_recomputation_trains_like_single(mode: str) -> None:
    for model in networks.ALL:
        plain = case(model).reference
        contract.check_training(replace(plain, plan=replace(plain.plan, recompute=mode)))


@pytest.mark.parametrize("mode", MODES)
def test_deferred_batch_norm(mode: str) -> None:
    contract.check_training(replace(case("norms", 3, mode, deferred_batch_norm=True), deferred=True))


@pytest.mark.usefixtures("computation")
@pytest.mark.parametrize("model", ["pairs", "tokens", "tied", "gpt", "llama", "amoebanet"])
def test_states_move_between_engines(model: str) -> None:
    contract.check_state_moves(case(model, 3, "except_last"))


@pytest.mark.parametrize("options", COMPONENTS.values(), ids=COMPONENTS.keys())
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", ["skips", "tied"])
def test_gpipe_runs_its_schedule(model: str, mode: str, options: dict[str, bool]) -> None:
    contract.check_trace(case(model, 4, mode, **options))


@pytest.mark.parametrize("mode", MODES)
def test_single_runs_its_schedule(mode: str) -> None:
    plain = case("tokens").reference
    contract.check_trace(replace(plain, plan=replace(plain.plan, recompute=mode)))


@pytest.mark.parametrize("layer", [1, 5, 13])
@pytest.mark.parametrize("streams", [True, False])
def test_a_crash_in_any_stage_reaches_the_caller(layer: int, streams: bool) -> None:
    contract.check_crash(case("skips", 3, "except_last", streams=streams), layer)


def test_a_stage_without_parameters() -> None:
    plan = Plan.contiguous([6, 2, 2], 4, "except_last")  # a ReLU and a Flatten
    contract.check_training(replace(case("norms"), plan=plan))


def test_a_crash_in_single_reaches_the_caller() -> None:
    contract.check_crash(case("skips").reference, 5)


def test_engines_accept_what_they_are_tested_with() -> None:
    contract.check_accepts(case("skips"))
    contract.check_accepts(case("skips").reference)


def test_engines_refuse_an_unknown_checkpoint_mode() -> None:
    for check, config in ((gpipe_config.check, GPipeConfig()), (single_config.check, SingleConfig())):
        assert check(config) == []  # type: ignore[operator]
        config.checkpoint = "some"
        (found,) = check(config)  # type: ignore[operator]
        assert (found.key, found.value) == ("engine.checkpoint", "some")


def test_single_refuses_stages() -> None:
    case_ = case("skips")
    problems = build_single(SingleConfig()).check(case_.plan, contract.profile_of(case_.model), *_any())
    assert rows(problems) == [("mesh.pipeline", 2, ["mesh.pipeline=1"])]


def _any() -> tuple:  # type: ignore[type-arg]
    from harness.core.cluster import Cluster
    from harness.core.memory_model import named

    return Cluster(devices_per_node=2), named("sgd_fp32")
