from __future__ import annotations

import pytest

from harness.core.problem import NoPlan, Problem
from planners.autoddl.planner import Config as AutoDDL
from planners.autoddl.planner import build as autoddl
from planners.strategies import EXAMPLE, Config, build, check
from tests.harness.sbp.nets import dense, transformer
from tests.planners.tensor_parallel_cases import ADAM, cluster, request
from tests.problems import row, rows

NET = dense((64, 128, 32))
MEGATRON = ["embedding:1x1x2", "*.qkv:1x2x1", "*.up:1x2x1", "head:1x2x1", "*:1x1x2"]


def plan(strategies: list[str], profile=NET, devices: int = 8, local: int = 1, **config):
    planner = build(Config(strategies=strategies, **config))
    return planner.plan(profile, cluster(devices, local), ADAM, request(profile, devices))


def problem(strategies: list[str], **asked) -> Problem:
    with pytest.raises(NoPlan) as caught:
        plan(strategies, **asked)
    return caught.value.problem


def test_the_first_pattern_that_is_like_a_name_counts():
    assert plan(["linear_1:2x2x2", "*:4x2x1"]).strategy == {"linear_0": (4, 2, 1), "linear_1": (2, 2, 2)}
    found = plan(MEGATRON, transformer(layers=1), 2).strategy
    assert found["block_0.attention.qkv"] == (1, 2, 1)
    assert found["block_0.mlp.down"] == (1, 1, 2)


@pytest.mark.parametrize("patterns", [["linear_*:2x2x2", "linear_?:4x2x1", "*:8x1x1"], ["*:2x2x2", "linear_*:4x2x1"]])
def test_a_later_pattern_does_not_count(patterns):
    """One that is left with no product is reported."""
    unused = patterns[1].partition(":")[0]
    found = problem(patterns)
    assert (found.key, found.value) == ("planner.strategies", unused)
    assert plan(found.fixes[0]["planner.strategies"])
    assert set(plan(patterns[:1]).strategy.values()) == {(2, 2, 2)}


def test_equal_patterns_are_refused_with_a_fix():
    given = ["linear_0:4x2x1", "*:2x2x2", "linear_0:8x1x1", "*:8x1x1"]
    (found,) = check(Config(strategies=given))
    assert row(found) == (
        "planner.strategies", "linear_0, *", ["planner.strategies=[linear_0:4x2x1,*:2x2x2]"],
    )  # fmt: skip
    assert plan(found.fixes[0]["planner.strategies"]).strategy == {"linear_0": (4, 2, 1), "linear_1": (2, 2, 2)}


def test_nodes_of_several_devices_have_pairs():
    assert plan(["*:2x1x1x2x1x2"], local=4).strategy == {"linear_0": (2, 1, 1, 2, 1, 2), "linear_1": (2, 1, 1, 2, 1, 2)}


@pytest.mark.parametrize("profile", [NET, transformer(layers=2)], ids=["dense", "transformer"])
def test_the_strategies_of_the_optimum_by_hand_cost_the_optimum(profile):
    best = autoddl(AutoDDL()).plan(profile, cluster(8), ADAM, request(profile, 8))
    by_hand = [f"{name}:{'x'.join(map(str, numbers))}" for name, numbers in best.strategy.items()]
    found = plan(by_hand, profile)
    assert found.predicted["communication_s"] == pytest.approx(best.predicted["communication_s"], rel=1e-12)
    assert found.strategy == best.strategy


def test_strategies_that_are_not_those_of_model_and_devices():
    key = "planner.strategies"
    assert row(problem(["linear_0:8x1x1"])) == (key, None, [f"{key}=[linear_0:8x1x1,*:8x1x1]"])
    assert row(problem(["*:8x1x1", "x:8x1x1"])) == (key, "x", [f"{key}=[*:8x1x1]"])
    odd, tied = dense((64, 6)), ["embedding:1x1x2", "*.qkv:1x2x1", "*.up:1x2x1", "*:1x1x2"]
    for found, value, hint in (
        (problem(["*:2x2x1"]), "*:2x2x1", "numbers as 8x1x1"),
        (problem(["*:2x2x2"], local=4), "*:2x2x2", "numbers as 2x4x1x1x1x1"),
        (problem(["*:1x8x1"], profile=odd), "linear_0:1x8x1", "one of 1x1x8, 1x2x4, 2x1x4, 2x2x2, 4x1x2 ..."),
        (problem(tied, profile=transformer(), devices=2), "head:1x1x2", "head:1x2x1"),
    ):
        assert (found.key, found.value, found.hint) == (key, value, hint)


def test_values_that_no_run_can_have():
    empty, short = check(Config(strategies=[], paths="short"))
    assert (empty.key, empty.value, empty.hint) == ("planner.strategies", [], EXAMPLE)
    assert row(short) == ("planner.paths", "short", ["planner.paths=mixed"])
    for text in ("*", "*:1x2", "*:0x1x2", ":1x1x1", "*:1x1x1x2", "*:axbxc"):
        assert rows(check(Config(strategies=[text]))) == [("planner.strategies", text, [])]
    assert check(Config(strategies=["*:1x2x1", "a.*:1x1x1x2x1x2"])) == []
