"""engine=delayed by itself: without delay it is single, closed forms of delayed SGD, resuming, and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace

import pytest
import torch
from torch import nn

from engines.delayed.engine import Config, DelayedEngine, build, check
from engines.delayed.session import DelayedSession
from engines.periodic import weight_versions
from engines.single.engine import Config as SingleConfig
from engines.single.engine import build as build_single
from harness.core import staleness
from harness.core.cluster import Cluster
from harness.core.memory_model import named
from harness.core.model_profile import LayerProfile, ModelProfile, Tied
from harness.core.op import Op
from harness.core.pattern import Pattern, Placed
from harness.core.plan import Mesh, Plan, Stage
from harness.core.staleness import VERSIONS, Corrections
from harness.interfaces import Batch, BatchShape, Engine, Model, OptimizerSpec, PlanRequest, SessionSpec
from harness.runtime.delayed_optimizer import DelayedOptimizer
from harness.runtime.training_state import intra_op_threads
from planners.block_partition import even
from tests.engines import contract, naive_delays, networks, zoo
from tests.engines.contract import Case
from tests.engines.delayed import scalar_chain
from tests.engines.naive_delays import Pipeline
from tests.problems import row, rows

MOMENTUM = OptimizerSpec("sgd", lr=0.05, momentum=0.9, weight_decay=0.01)
ADAMW = OptimizerSpec("adamw", lr=0.01, weight_decay=0.01)
SPEC = SessionSpec(("cpu",), MOMENTUM, "float64", seed=7)
PROFILE = ModelProfile((LayerProfile("0"),))
ALL = Corrections(prediction=True, error_feedback=True, look_ahead=0.5, lr_steps=7)
WHOLE_WAY = Corrections(prediction=True, round_trip=True)
PIPEMARE = Corrections(lr_steps=7, discrepancy=0.135)


def plan(balance: Sequence[int], micro_batches: int) -> Plan:
    firsts = [sum(balance[:j]) for j in range(len(balance))]
    return Plan(Mesh(), tuple(Stage(f, f + n - 1, 0) for f, n in zip(firsts, balance, strict=True)), micro_batches)


def engine(stages: int, versions: str = "stash", **keys: object) -> DelayedEngine:
    return build(Config(stages=stages, versions=versions, **keys))  # type: ignore[arg-type]


def trained(
    engine: Engine, model: Model, chosen: Plan, batches: Sequence[Batch], spec: SessionSpec = SPEC
) -> tuple[list[float], dict[str, torch.Tensor]]:
    with engine.session(model, chosen, spec) as session, intra_op_threads(1):
        losses = [session.step(batch).loss for batch in batches]
        return losses, session.state_dict()["model"]


def batches_of(model: Model, samples: int, steps: int) -> list[Batch]:
    torch.manual_seed(3)
    return [model.sample(samples) for _ in range(steps)]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.fast
@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAMW], ids=lambda one: one.name)
@pytest.mark.parametrize("corrections", [ALL, WHOLE_WAY, PIPEMARE], ids=["all", "whole way", "pipemare"])
@pytest.mark.parametrize(("stages", "versions"), [(4, "flush"), (1, "flush"), (1, "stash"), (1, "none")])
def test_without_delay_it_is_single_to_the_bit(
    stages: int, versions: str, corrections: Corrections, optimizer: OptimizerSpec
) -> None:
    """With every correction: they do nothing."""
    model, m = networks.skips(), 4
    layers, batches = len(model.layers()), batches_of(model, 16, 4)
    spec = replace(SPEC, optimizer=optimizer)
    mine = engine(stages, versions, update_every=m, corrections=corrections)
    got = trained(mine, model, plan(even(layers, stages), m), batches, spec)
    want = trained(build_single(SingleConfig()), model, Plan.contiguous([layers], m), batches, spec)
    assert got[0] == pytest.approx(want[0], rel=1e-15)
    assert same(got[1], want[1])


@pytest.mark.parametrize("versions", VERSIONS)
@pytest.mark.parametrize("every", [1, 2])
def test_a_pipeline_that_never_drains(versions: str, every: int) -> None:
    """Delays go on from step to step, as in the naive loop; so they do if a step is one update."""
    model = networks.tokens()
    batches, balance = batches_of(model, 8, 6), [2, 2, 1, 1]
    for corrections in (Corrections(), ALL, WHOLE_WAY, *([PIPEMARE] if versions == "none" else [])):
        mine = engine(4, versions, update_every=every, corrections=corrections)
        got = trained(mine, model, plan(balance, 2), batches)
        keys = {"corrections": asdict(corrections), "ways_back": [0, 0, 1, 1]}
        pipe = Pipeline(2, every, balance, [4, 3, 2, 1], versions, drain=False, **keys)
        want = naive_delays.train(model, SPEC, batches, pipe)
        torch.testing.assert_close(got[0], want.losses, rtol=1e-11, atol=0)
        torch.testing.assert_close(got[1], want.states[-1], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("versions", VERSIONS)
@pytest.mark.parametrize("factors", [(1.1,), (1.1, 0.9), (1.1, 0.9, 1.2, 0.8)])
def test_a_chain_of_factors(factors: tuple[float, ...], versions: str, momentum: float) -> None:
    """Against a loop without torch, to 14 digits."""
    model = scalar_chain.network(factors)
    spec = replace(SPEC, optimizer=OptimizerSpec("sgd", lr=0.02, momentum=momentum))
    mine = engine(len(factors), versions, update_every=1)
    want = scalar_chain.trained(factors, 12, 0.02, momentum, versions)
    with mine.session(model, plan([1] * len(factors), 1), spec) as session:
        for batch, weights in zip(scalar_chain.batches(model, 12), want, strict=True):
            session.step(batch)
            found = [float(value) for value in session.state_dict()["model"].values()]
            assert found == pytest.approx(weights, rel=1e-14)


@pytest.mark.parametrize("delay", [0, 1, 2, 5])
@pytest.mark.parametrize(("share", "stable"), [(0.9, True), (1.1, False)])
def test_the_stability_limit_of_delayed_sgd(delay: int, share: float, stable: bool) -> None:
    """w(t+1) = w(t) - lr a w(t-d) is stable for lr a < 2 sin(pi / (2 (2 d + 1))): for d = 0 that is 2."""
    limit = 2 * math.sin(math.pi / (2 * (2 * delay + 1)))
    factors = (1.0,) * (delay + 1)
    model = scalar_chain.network(factors, fixed=delay)
    spec = replace(SPEC, optimizer=OptimizerSpec("sgd", lr=share * limit / scalar_chain.CURVATURE))
    batches = scalar_chain.batches(model, 60 * (delay + 1))
    _, weights = trained(engine(len(factors)), model, plan([1] * len(factors), 1), batches, spec)
    assert abs(float(weights["0.weight"])) < 0.1 if stable else abs(float(weights["0.weight"])) > 10


def test_prediction_is_spectrains() -> None:
    """W - s lr v, with the momentum v of torch's SGD: section 3.2 of the paper."""
    model, lr = scalar_chain.network((1.0, 1.0, 1.0), fixed=2), 0.02
    mine = engine(3, corrections=Corrections(prediction=True))
    w, v, seen = [1.0], [0.0], []
    for n in range(20):
        old = max(0, n - 2)
        seen.append(w[old] - (n - old) * lr * v[old])
        v.append(0.9 * v[n] + scalar_chain.CURVATURE * seen[-1])
        w.append(w[n] - lr * v[-1])
    spec = replace(SPEC, optimizer=OptimizerSpec("sgd", lr=lr, momentum=0.9))
    losses, weights = trained(mine, model, plan([1, 1, 1], 1), scalar_chain.batches(model, 20), spec)
    assert losses == pytest.approx([scalar_chain.CURVATURE / 2 * one**2 for one in seen], rel=1e-13)
    assert float(weights["0.weight"]) == pytest.approx(w[-1], rel=1e-13)


def unit_pattern(stages: int) -> Pattern:
    """1F1B where every task takes a unit of time: SpecTrain's."""
    last = 2 * stages - 1
    starts = {Op(j, kind): j if kind == "F" else last - j for j in range(stages) for kind in ("F", "B")}  # type: ignore[arg-type]
    return Pattern(2.0, tuple(Placed(op, op.stage, float(start % 2), start // 2) for op, start in starts.items()))


@pytest.mark.parametrize("stages", range(1, 10))
def test_the_whole_way_is_spectrains(stages: int) -> None:
    """Its formula, section 3.3, from the pattern, from what is in flight, and from the times of all tasks."""
    pattern, count, i = unit_pattern(stages), 12 * stages, 6 * stages
    chosen = Plan(Mesh(stages), tuple(Stage(j, j, j) for j in range(stages)), count, pattern=pattern)
    order = weight_versions.schedule(chosen, pattern, count, 1)
    ways, flights = weight_versions.ways_back(pattern), weight_versions.stored(order)
    assert ways == staleness.ways_back(flights) == Config(stages=stages).ways_back() == [k // 2 for k in range(stages)]
    plans = weight_versions.copy_plans(order, pattern, "none", 1, WHOLE_WAY)
    found = [plan.ahead[i] for plan in plans]
    assert found == [(k // 2 + stages - k - 1, k // 2) for k in range(stages)]
    for k, (forward, backward) in enumerate(found):  # that of micro-batch n ends 2 (n + N) - k
        begins, turns, over = k + 2 * i, 2 * (i + stages) - 1 - k, 2 * (i + stages)
        made = [sum(2 * (n + stages) - k <= time for n in range(count)) for time in (begins, turns, over)]
        assert (made[2] - 1 - made[0], made[2] - 1 - made[1]) == (forward, backward)  # its own update aside


@pytest.mark.parametrize("base", [0.135, 0.5])
def test_the_discrepancy_correction_is_pipemares(base: float) -> None:
    """Section 3.2, in plain numbers."""
    factors, lr, count = (1.1, 0.9, 1.2, 0.8), 0.02, 15
    w, delta = [list(factors)], [[0.0] * 4]
    for n in range(count):
        tau = [min(n, 3 - j) for j in range(4)]
        used = [w[n - tau[j]][j] for j in range(4)]
        back = [w[n][j] - tau[j] * delta[n][j] for j in range(4)]
        gradient, gradients, arriving = scalar_chain.CURVATURE * math.prod(used), [0.0] * 4, [1.0]
        for factor in used:
            arriving.append(arriving[-1] * factor)
        for j in (3, 2, 1, 0):
            gradients[j] = gradient * arriving[j]
            gradient *= back[j]
        w.append([old - lr * one for old, one in zip(w[n], gradients, strict=True)])
        keep = [base ** (1 / one) if one else 0.0 for one in tau]
        delta.append([k * d - (1 - k) * lr * one for k, d, one in zip(keep, delta[n], gradients, strict=True)])
    model = scalar_chain.network(factors)
    mine = engine(4, "none", corrections=Corrections(discrepancy=base))
    spec = replace(SPEC, optimizer=OptimizerSpec("sgd", lr=lr))
    _, weights = trained(mine, model, plan([1] * 4, 1), scalar_chain.batches(model, count), spec)
    assert [float(value) for value in weights.values()] == pytest.approx(w[-1], rel=1e-13)
    _, without = trained(engine(4, "none"), model, plan([1] * 4, 1), scalar_chain.batches(model, count), spec)
    assert not same(weights, without)


def test_error_feedback_with_a_delay_of_one() -> None:
    """An update is 2 u(t) - u(t-1), where u are the optimizer's own."""
    model, lr = scalar_chain.network((1.0,)), 0.05
    mine = engine(1, "2bw", update_every=1, corrections=Corrections(error_feedback=True))
    w, u = [1.0], []
    for n in range(20):
        u.append(-lr * scalar_chain.CURVATURE * w[max(0, n - 1)])
        w.append(w[n] + u[n] + (u[n] - u[n - 1] if n else 0.0))
    spec = replace(SPEC, optimizer=OptimizerSpec("sgd", lr=lr))
    _, weights = trained(mine, model, plan([1], 1), scalar_chain.batches(model, 20), spec)
    assert float(weights["0.weight"]) == pytest.approx(w[-1], rel=1e-12)


def test_a_look_ahead_is_nesterovs() -> None:
    """With SGD and its own momentum that is torch's nesterov=True. A gradient of zero comes first: nothing has moved
    before it. Without delay there is no look-ahead."""
    momentum, draw = 0.9, torch.Generator().manual_seed(3)
    for delay, nesterov in ((1, True), (5, True), (0, False)):
        mine, theirs = (nn.Parameter(torch.ones(4, dtype=torch.float64)) for _ in range(2))
        spec = OptimizerSpec("sgd", 0.1, momentum, weight_decay=0.01 if delay == 0 else 0.0)
        optimizer = DelayedOptimizer({"w": mine}, spec, Corrections(look_ahead=momentum))
        expected = torch.optim.SGD([theirs], 0.1, momentum, weight_decay=spec.weight_decay, nesterov=nesterov)
        for number in range(8):
            gradient = torch.randn(4, generator=draw, dtype=torch.float64) * bool(number)
            mine.grad, theirs.grad = gradient, gradient.clone()
            optimizer.step(delay, number)
            expected.step()
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0 if delay == 0 else 1e-15)


def test_learning_rates_by_delay() -> None:
    """lr / s^(1 - t/K) for the first K updates, then lr."""
    corrections = Corrections(lr_steps=4)
    assert [corrections.lr_factor(3, t) for t in range(6)] == pytest.approx(
        [3 ** -(1 - t / 4) for t in range(4)] + [1, 1]
    )
    assert [corrections.lr_factor(s, 0) for s in (0, 1)] == [1.0, 1.0] and Corrections().lr_factor(9, 0) == 1.0


@pytest.mark.parametrize("drain", [True, False])
@pytest.mark.parametrize(
    ("versions", "corrections"), [*((one, ALL) for one in VERSIONS), ("stash", WHOLE_WAY), ("none", PIPEMARE)]
)
def test_it_goes_on_where_a_checkpoint_was_written(versions: str, corrections: Corrections, drain: bool) -> None:
    """With what was in flight."""
    model, chosen = networks.tokens(), plan([2, 2, 1, 1], 4)
    batches = batches_of(model, 8, 6)
    mine = engine(4, versions, update_every=4 if versions == "flush" else 2, drain=drain, corrections=corrections)
    whole = trained(mine, model, chosen, batches)
    with mine.session(model, chosen, SPEC) as session, intra_op_threads(1):
        losses = [session.step(batch).loss for batch in batches[:3]]
        state = session.state_dict()
    with mine.session(model, chosen, SPEC) as session, intra_op_threads(1):
        session.load_state_dict(state)
        losses += [session.step(batch).loss for batch in batches[3:]]
        assert losses == whole[0] and same(session.state_dict()["model"], whole[1])


@pytest.mark.parametrize("versions", ["flush", "2bw"])
def test_it_goes_on_with_weights_that_layers_share(versions: str) -> None:
    model = networks.ALL["tied"]
    mine, chosen, batches = engine(1, versions, update_every=2), plan([len(model.layers())], 2), batches_of(model, 8, 4)
    whole = trained(mine, model, chosen, batches)
    with mine.session(model, chosen, SPEC) as session:
        session.step(batches[0])
        session.step(batches[1])
        state = session.state_dict()
    with mine.session(model, chosen, SPEC) as session, intra_op_threads(1):
        session.load_state_dict(state)
        assert [session.step(batch).loss for batch in batches[2:]] == whole[0][2:]
        assert same(session.state_dict()["model"], whole[1])


def test_a_state_of_another_pipeline_begins_with_an_empty_one() -> None:
    model, batches = networks.tokens(), batches_of(networks.tokens(), 8, 4)
    chosen = plan([2, 2, 1, 1], 2)
    with engine(4, "flush").session(model, chosen, SPEC) as session:
        session.step(batches[0])
        state = session.state_dict()
    losses = []
    for kept in (state, {key: value for key, value in state.items() if key != "delayed_pipeline"}):
        with engine(4, "stash").session(model, chosen, SPEC) as session, intra_op_threads(1):
            session.load_state_dict(kept)
            losses.append([session.step(batch).loss for batch in batches[1:]])
    assert losses[0] == losses[1]


def test_the_newest_weights_and_autocast() -> None:
    """Autocast copies a weight in the forward task, and its backward task uses the copy."""
    profile = replace(PROFILE, autocast="bfloat16")
    [problem] = engine(1, "none").check(plan([1], 4), profile, Cluster(), named("sgd_fp32"))
    assert row(problem) == ("engine.versions", "none", ["engine.versions=stash", "precision=fp32"])
    assert engine(1, "stash").check(plan([1], 4), profile, Cluster(), named("sgd_fp32")) == []


def test_states_move_between_engines() -> None:
    contract.check_state_moves(Case(engine(3, "flush"), networks.tokens(), plan([2, 2, 2], 4)))


@pytest.mark.parametrize("name", ["skips", "pairs", "tokens", "norms"])
def test_it_trains_as_single(name: str) -> None:
    model = networks.ALL[name]
    case = Case(engine(3, "flush"), model, plan(even(len(model.layers()), 3), 4))
    contract.check_training(case)
    contract.check_trace(case)
    contract.check_accepts(case)


@pytest.mark.parametrize("name", ["unet", "mlp", "resnet"])
def test_it_trains_the_zoo(name: str) -> None:
    model = zoo.model(name)
    contract.check_training(contract.gentle(Case(engine(3, "flush"), model, plan(even(len(model.layers()), 3), 4))))


@pytest.mark.parametrize("layer", [1, 5, 13])
def test_a_crash_in_any_stage_reaches_the_caller(layer: int) -> None:
    contract.check_crash(Case(engine(3), networks.skips(), plan([5, 5, 4], 4)), layer)


@pytest.mark.parametrize("versions", ["flush", "2bw", "stash", "none"])
def test_only_weights_that_are_needed_are_kept(versions: str) -> None:
    model = networks.tokens()
    with engine(4, versions, update_every=1).session(model, plan([2, 2, 1, 1], 1), SPEC) as session:
        assert isinstance(session, DelayedSession)
        for batch in batches_of(model, 4, 10):
            session.step(batch)
        kept = [len(stage.history) for stage in session.stages]
    assert kept == {"flush": [0] * 4, "2bw": [1] * 4}.get(versions, [3, 2, 1, 0])


def test_values_that_no_run_can_have() -> None:
    wrong = Config(stages=0, versions="stahs", update_every=0, corrections=Corrections(lr_steps=-1))
    assert [(key, fixes) for key, _, fixes in rows(check(wrong))] == [
        ("engine.versions", ["engine.versions=stash"]),
        ("engine.corrections.lr_steps", ["engine.corrections.lr_steps=0"]),
        ("engine.stages", ["engine.stages=1"]),
        ("engine.update_every", ["engine.update_every=1"]),
    ]
    for ahead in (-0.1, 1.0, float("nan")):
        [problem] = check(Config(corrections=Corrections(look_ahead=ahead)))
        assert row(problem)[0::2] == ("engine.corrections.look_ahead", ["engine.corrections.look_ahead=0.99"])
    fixes = ["engine.corrections.prediction=true", "engine.corrections.round_trip=false"]
    alone = check(Config(corrections=Corrections(round_trip=True)))
    assert rows(alone) == [("engine.corrections.round_trip", True, fixes)]
    for counts in ([1], [0, -1, 0], []):
        [problem] = check(Config(stages=3, way_back=counts))
        assert row(problem) == ("engine.way_back", counts, ["engine.way_back=null"])
    for counts in ([1, 2], [0, 1, 1], []):
        [problem] = check(Config(stages=3, in_flight=counts))
        assert row(problem) == ("engine.in_flight", counts, ["engine.in_flight=null"])
    assert check(Config(stages=3, in_flight=[5, 2, 1], way_back=[0, 1, 1])) == []


@pytest.mark.parametrize(
    ("versions", "prediction", "value", "fixes"),
    [
        ("none", False, 1.0, ["engine.corrections.discrepancy=0.135"]),
        ("none", False, -0.1, ["engine.corrections.discrepancy=0.135"]),
        ("stash", False, 0.135, ["engine.versions=none", "engine.corrections.discrepancy=0"]),
        ("2bw", True, 0.135, ["engine.versions=none", "engine.corrections.discrepancy=0"]),
        ("none", True, 0.1, ["engine.corrections.prediction=false", "engine.corrections.discrepancy=0"]),
        ("none", False, 0.135, None),
    ],
)
def test_discrepancies_that_do_not_exist(
    versions: str, prediction: bool, value: float, fixes: list[str] | None
) -> None:
    found = check(Config(versions=versions, corrections=Corrections(prediction=prediction, discrepancy=value)))
    assert [row(problem)[0::2] for problem in found] == [("engine.corrections.discrepancy", fixes)] * bool(fixes)


@pytest.mark.parametrize(
    ("typed", "meant"), [("PipeMare", "none"), ("PipeDream-2BW", "2bw"), ("PipeDream", "stash"), ("1F1B", "flush")]
)
def test_versions_are_known_by_the_names_of_papers(typed: str, meant: str) -> None:
    assert rows(check(Config(versions=typed))) == [("engine.versions", typed, [f"engine.versions={meant}"])]


def test_requests_that_cannot_run() -> None:
    request, cluster = PlanRequest(BatchShape(24, 12), pipeline=1, layers=6), Cluster()
    assert rows(engine(8).refuses(request, "float32", cluster)) == [("engine.stages", 8, ["engine.stages=6"])]
    [problem] = engine(4, update_every=5).refuses(request, "float32", cluster)
    assert problem.key == "engine.update_every" and problem.fixes[0] == {"engine.update_every": 6}
    assert engine(6, update_every=4).refuses(request, "float32", cluster) == []
    [problem] = engine(3).check(plan([2, 4], 4), PROFILE, cluster, named("sgd_fp32"))
    assert row(problem) == ("planner", None, ["planner=balance"])
    tied = (Tied("0.weight", 100),)
    layers = [LayerProfile(f"{n}", param_bytes=100, tied=tied if n in (0, 5) else ()) for n in range(6)]
    [problem] = engine(3).check(plan([2, 2, 2], 4), ModelProfile(tuple(layers)), cluster, named("sgd_fp32"))
    assert row(problem) == ("engine.stages", 3, ["engine.stages=1"])


@pytest.mark.parametrize(
    ("keys", "late"),
    [
        ({}, [3, 2, 1, 0]),
        ({"update_every": 2}, [2, 1, 1, 0]),
        ({"versions": "none", "in_flight": [2, 2, 2, 1]}, [1, 1, 1, 0]),
        ({"versions": "2bw"}, [1, 1, 1, 1]),
        ({"update_every": 12}, [1, 1, 1, 0]),
    ],
)
def test_it_says_how_late_gradients_are(keys: dict[str, object], late: list[int]) -> None:
    """And they are so, once the pipeline is full."""
    mine, chosen = engine(4, **keys), plan([2, 2, 1, 1], 12)  # type: ignore[arg-type]
    [note] = mine.notes(chosen, PROFILE, Cluster(), named("sgd_fp32"))
    said = "one update old" if set(late) == {1} else f"{late} updates old".replace(", ", ",")
    assert said in note.message and note.key == "engine.versions"
    assert ("they make one update a step, not" in note.message) is (mine.update_every(chosen) < 12)
    model = networks.tokens()
    with mine.session(model, chosen, SPEC) as session:
        assert isinstance(session, DelayedSession)
        for batch in batches_of(model, 12, 2):
            session.step(batch)
        assert [max(0, one.updates) for one in session.delays([0] * 4)] == late


def test_flush_has_no_note() -> None:
    for mine in (engine(4, "flush"), engine(4, "stash", update_every=12, drain=True), engine(1)):
        assert mine.notes(plan([2, 2, 1, 1], 12), PROFILE, Cluster(), named("sgd_fp32")) == []


def test_copies_of_the_weights() -> None:
    """Those that compute, the newest, and the older ones; each with its update, to predict from."""
    chosen = plan([2, 2, 1, 1], 1)
    assert engine(4).copies(chosen) == (5, 4, 3, 2)
    assert engine(4, corrections=ALL).copies(chosen) == (8, 6, 4, 2)
    assert engine(4, "flush").copies(chosen) == (2,) * 4 and engine(4, "2bw").copies(chosen) == (3,) * 4
