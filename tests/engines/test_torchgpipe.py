"""The contract of tests/engines/contract.py for torchgpipe, and what it cannot do."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue

import pytest

from tests.problems import row, rows

pytest.importorskip("torchgpipe")

import torch

from engines.torchgpipe import engine as torchgpipe_config
from engines.torchgpipe.engine import Config, build
from harness.core.cluster import Cluster
from harness.core.memory_model import named
from harness.core.plan import Plan, Stage
from harness.core.problem import Problem
from harness.core.trace import Trace
from harness.interfaces import Capabilities, Model, OptimizerSpec, Session
from harness.schedule.builders.gpipe import gpipe
from harness.schedule.transfers import plan_transfers
from planners.block_partition import even
from tests.engines import contract, networks, zoo
from tests.engines.contract import Case, gentle
from tests.support.sessions import run_session
from tests.tiers import short_soak

MODELS: dict[str, Model] = {**networks.ALL, **{name: zoo.model(name) for name in zoo.SIZES}}
MODES = ("never", "except_last", "always")
TIED = {"shared", "tied", "gpt"}
"""Networks in which layers share parameters."""


def case(model: str, stages: int = 2, mode: str = "never", micro_batches: int = 4, **options: object) -> Case:
    network = MODELS[model]
    plan = Plan.contiguous(even(len(network.layers()), stages), micro_batches, mode)
    return Case(build(Config(**options)), network, plan)  # type: ignore[arg-type]


def takes(model: str, stages: int) -> bool:
    return stages == 1 or model not in TIED


def refused(case: Case) -> list[Problem]:
    profile = contract.profile_of(case.model)
    return case.engine.check(case.plan, profile, Cluster(devices_per_node=4), named("sgd_fp32"))


def test_it_is_the_package_and_not_its_adapter() -> None:
    spec = find_spec("torchgpipe")
    assert spec and spec.origin
    assert Path(spec.origin).parent != Path(torchgpipe_config.__file__).parent


def test_what_it_cannot_do() -> None:
    can, all_of_it = build(Config()).capabilities, Capabilities()
    lacks = {f.name: own for f in fields(can) if (own := getattr(can, f.name)) != getattr(all_of_it, f.name)}
    print("torchgpipe differs from what an engine can do:", lacks)
    assert lacks == {"trace": False, "memory_meter": False, "serial_cpu_devices": True, "mixed": False}
    assert not (can.data or can.tensor or can.multi_process)


def test_it_refuses_exactly_the_models_whose_stages_share_parameters() -> None:
    for stages in (1, 2, 3):
        found = {model: problems for model in MODELS if (problems := refused(case(model, stages)))}
        print(f"in {stages} stages it refuses", {model: problems[0].message for model, problems in found.items()})
        assert found.keys() == (TIED if stages > 1 else set())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("model", "stages"), [(m, n) for m in networks.ALL for n in (1, 2, 3) if takes(m, n)])
def test_it_trains_like_single(model: str, stages: int, mode: str) -> None:
    contract.check_training(case(model, stages, mode))


def test_it_trains_a_model_of_several_outputs() -> None:
    plan = Plan.contiguous([2, 2], 4, "except_last")
    contract.check_training(replace(case("pairs"), model=networks.outputs(), plan=plan))


@pytest.mark.fast
@pytest.mark.parametrize(("stages", "mode"), [(2, "always"), (3, "except_last")])
@pytest.mark.parametrize("model", short_soak([model for model in zoo.SIZES if takes(model, 2)], zoo.HEAVY))
def test_it_trains_the_zoo_like_single(model: str, stages: int, mode: str) -> None:
    contract.check_training(gentle(case(model, stages, mode)))


@pytest.mark.parametrize(("mode", "calls"), [("never", 4), ("except_last", 7), ("always", 8)])
def test_the_plan_says_what_is_recomputed(mode: str, calls: int) -> None:
    one = case("tokens", 2, mode)
    called = SimpleQueue[str]()  # no state of the layers, which a recomputation would put back

    def train(session: Session) -> None:
        for name, layer in session.stage.named_children():  # type: ignore[attr-defined]
            layer.register_forward_pre_hook(lambda layer, inputs, name=name: called.put(name))
        session.step(one.model.sample(8))

    run_session(one.engine, one.model, one.plan, one.spec, train)
    counted = Counter(called.get() for _ in range(called.qsize()))
    assert counted == {str(number): calls for number in range(6)}


@pytest.mark.parametrize("model", networks.ALL)
def test_it_trains_in_float32(model: str) -> None:
    one = case(model, 3 if takes(model, 3) else 1, "except_last")
    contract.check_training(replace(one, dtype="float32", optimizer=OptimizerSpec("sgd", lr=0.02)))


def test_bfloat16() -> None:
    one = replace(case("skips", 3, "always"), dtype="bfloat16", optimizer=OptimizerSpec("sgd", lr=0.1))
    assert contract.run(one).losses == pytest.approx(contract.reference(one).losses, rel=0.03)


def test_autocast_holds_in_its_threads() -> None:
    losses = []
    for one in (case("norms", 2, "always"), case("norms").reference):
        spec = replace(one.spec, dtype="float32", autocast="bfloat16", optimizer=OptimizerSpec("sgd", lr=0.1))
        losses.append(run_session(one.engine, one.model, one.plan, spec, lambda session, one=one: steps(session, one)))
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def steps(session: Session, one: Case) -> list[float]:
    torch.manual_seed(3)
    return [session.step(one.model.sample(one.samples)).loss for _ in range(3)]


@pytest.mark.parametrize("mode", MODES)
def test_several_stages_on_one_device(mode: str) -> None:
    layers = len(MODELS["skips"].layers())
    stages = (Stage(0, 3, 0), Stage(4, 6, 1), Stage(7, 9, 0), Stage(10, layers - 1, 1))
    contract.check_training(replace(case("skips"), plan=replace(Plan.contiguous([layers], 4, mode), stages=stages)))


@pytest.mark.parametrize("model", ["skips", "pairs", "resnet"])
def test_states_move_between_engines(model: str) -> None:
    contract.check_state_moves(case(model, 3, "except_last"))


def test_a_stage_without_parameters() -> None:
    contract.check_training(replace(case("norms"), plan=Plan.contiguous([6, 2, 2], 4, "except_last")))


@pytest.mark.parametrize("layer", [1, 5, 13])
def test_a_crash_in_any_stage_reaches_the_caller(layer: int) -> None:
    contract.check_crash(case("skips", 3, "except_last"), layer)


def test_a_session_goes_on_after_a_crash() -> None:
    one = case("skips", 3, "always")
    torch.manual_seed(3)
    batch, wrong = one.model.sample(8), one.model.sample(8)
    wrong.inputs.resize_(8, 5)

    def train(session: Session, crash: bool) -> list[float]:
        losses = [session.step(batch).loss]
        if crash:
            with pytest.raises(RuntimeError) as caught:
                session.step(wrong)
            assert caught.value.__notes__ == ["in stage 0, layer '1', micro-batch 0"]
        return [*losses, session.step(batch).loss]

    crashed, straight = (
        run_session(one.engine, one.model, one.plan, one.spec, lambda session, crash=crash: train(session, crash))
        for crash in (True, False)
    )
    assert crashed == straight


@pytest.mark.parametrize("mode", MODES)
def test_deferred_batch_norm_is_theirs_with_the_biased_variance(mode: str) -> None:
    one = case("norms", 3, mode, deferred_batch_norm=True)
    mine = contract.run(one).states[-1]["model"]
    right = contract.reference(replace(one, deferred=True)).states[-1]["model"]
    assert list(mine) == list(right)
    start = 0.9**contract.STEPS  # what is left of the running variance that all begin with: 1
    for name, value in right.items():
        n = 8 if name.startswith("9.") else 8 * 4 * 4  # samples, and pixels before layer 9
        want = start + (value - start) * (n - 1) / n if name.endswith("running_var") else value
        torch.testing.assert_close(
            mine[name], want, rtol=1e-11, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(("model", "balance"), [("shared", [8, 2]), ("tied", [8]), ("gpt", [6])])
def test_layers_of_one_stage_may_share_parameters(model: str, balance: list[int]) -> None:
    one = gentle(replace(case(model), plan=Plan.contiguous(balance, 4, "always")))
    assert refused(one) == []
    contract.check_training(one)


def test_parameters_that_stages_share_are_refused_on_any_devices() -> None:
    one = case("tied")
    together = replace(one.plan, stages=tuple(replace(stage, device=0) for stage in one.plan.stages))
    for plan in (one.plan, together):
        found = refused(replace(one, plan=plan))
        assert rows(found) == [("mesh.pipeline", 2, ["mesh.pipeline=1", "engine=gpipe"])] * 3
        assert [problem.message.split()[1] for problem in found] == ["0.weight", "1.weight", "1.bias"]
        with pytest.raises(ValueError, match="duplicate parameters in distinct children"):
            one.engine.session(one.model, plan, one.spec).__enter__()


def test_its_schedule_is_that_of_gpipe() -> None:
    one = case("skips", 3, "except_last")
    profile = contract.profile_of(one.model)
    want = gpipe(4, [0, 1, 2], plan_transfers(one.plan, profile, portals=True), "except_last")
    assert one.engine.schedule(one.plan, profile) == want


def test_a_trace_has_steps_and_no_spans() -> None:
    one = case("skips")

    def train(session: Session) -> Trace:
        metrics = [session.step(one.model.sample(8), meter=True) for _ in range(2)]
        assert all(step.peak_memory_bytes is None for step in metrics)
        return session.trace()

    trace = run_session(one.engine, one.model, one.plan, one.spec, train)
    assert (len(trace.steps), trace.spans) == (2, ())


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_on_a_gpu(mode: str) -> None:
    """One GPU twice as two devices: the same losses as the CPU's, and memory by the allocator."""
    one = replace(case("shared"), plan=Plan.contiguous([8, 2], 4, mode))  # without dropout: a GPU draws other masks
    spec = replace(one.spec, devices=("cuda:0", "cuda:0"))

    def train(session: Session) -> list[float]:
        torch.manual_seed(3)
        metrics = [session.step(one.model.sample(8), meter=True) for _ in range(3)]
        assert all(step.peak_memory_bytes and min(step.peak_memory_bytes) > 0 for step in metrics)
        return [step.loss for step in metrics]

    losses = run_session(one.engine, one.model, one.plan, spec, train)
    assert losses == pytest.approx(contract.run(one).losses, rel=1e-9)


def test_wrong_values_are_reported_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torchgpipe_config.check(Config()) == []
    monkeypatch.setitem(sys.modules, "torchgpipe", None)  # what Python takes for "not there"
    missing, unknown = torchgpipe_config.check(Config(checkpoint="some"))
    assert (missing.key, missing.value, missing.hint) == ("engine", "torchgpipe", "pip install -e .[peers]")
    assert row(unknown) == ("engine.checkpoint", "some", ["engine.checkpoint=except_last"])
