from __future__ import annotations

import pytest

from harness.problem import NoPlan
from planners.autoddl.config import Config as AutoDDL
from planners.autoddl.config import build as autoddl
from planners.strategies import EXAMPLE, Config, build, check
from tests.harness.sbp.nets import dense, transformer
from tests.planners.products_cases import ADAM, cluster, request

NET = dense((64, 128, 32))
MEGATRON = ["embedding:1x1x2", "*.qkv:1x2x1", "*.up:1x2x1", "head:1x2x1", "*:1x1x2"]


def plan(strategies: list[str], profile=NET, devices: int = 8, local: int = 1, **config):
    planner = build(Config(strategies=strategies, **config))
    return planner.plan(profile, cluster(devices, local), ADAM, request(profile, devices))


def problem(strategies: list[str], **asked) -> tuple[str, str, str]:
    with pytest.raises(NoPlan) as caught:
        plan(strategies, **asked)
    found = caught.value.problem
    return found.key, found.what, found.mend


def test_the_first_pattern_that_is_like_a_name_counts():
    assert plan(["linear_1:2x2x2", "*:4x2x1"]).strategy == {"linear_0": (4, 2, 1), "linear_1": (2, 2, 2)}
    found = plan(MEGATRON, transformer(layers=1), 2).strategy
    assert found["block_0.attention.qkv"] == (1, 2, 1)
    assert found["block_0.mlp.down"] == (1, 1, 2)


@pytest.mark.parametrize("patterns", [["linear_*:2x2x2", "linear_?:4x2x1", "*:8x1x1"], ["*:2x2x2", "linear_*:4x2x1"]])
def test_a_later_pattern_does_not_count(patterns):
    """One that is left with no product is told, in its own words."""
    unused = patterns[1].partition(":")[0]
    assert problem(patterns)[0] == f"planner.strategies {unused}"
    assert set(plan(patterns[:1]).strategy.values()) == {(2, 2, 2)}


def test_equal_patterns_are_refused_with_the_mend():
    given = ["linear_0:4x2x1", "*:2x2x2", "linear_0:8x1x1", "*:8x1x1"]
    with pytest.raises(ValueError) as caught:
        check(Config(strategies=given))
    mend = "planner.strategies=[linear_0:4x2x1,*:2x2x2]"
    assert str(caught.value) == f"planner.strategies linear_0, *   must stand once, the first one counts   -> {mend}"
    assert plan(mend.partition("=")[2][1:-1].split(",")).strategy == {"linear_0": (4, 2, 1), "linear_1": (2, 2, 2)}


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
    assert problem(["linear_0:8x1x1"]) == (
        "planner.strategies", "have none for linear_1", "further ones, at last *:8x1x1",
    )  # fmt: skip
    assert problem(["*:8x1x1", "x:8x1x1"]) == (
        "planner.strategies x", "is like no product that is left for it, of linear_0, linear_1", "without x",
    )  # fmt: skip
    assert problem(["*:2x2x1"]) == (
        "planner.strategies *:2x2x1", "is 4 devices in 3 numbers, there are 8 devices", "numbers as 8x1x1",
    )  # fmt: skip
    assert problem(["*:2x2x2"], local=4) == (
        "planner.strategies *:2x2x2", "is 8 devices in 3 numbers, there are 2 nodes of 4", "numbers as 2x4x1x1x1x1",
    )  # fmt: skip
    odd = dense((64, 6))
    assert problem(["*:1x8x1"], profile=odd) == (
        "planner.strategies linear_0 1x8x1", "cannot split it: 64 samples in a micro-batch, 64 x 6",
        "one of 1x1x8, 1x2x4, 2x1x4, 2x2x2, 4x1x2 ...",
    )  # fmt: skip
    assert problem(["embedding:1x1x2", "*.qkv:1x2x1", "*.up:1x2x1", "*:1x1x2"], profile=transformer(), devices=2) == (
        "planner.strategies head 1x1x2", "has the weight of embedding, which is split by 1x1x2", "head:1x2x1",
    )  # fmt: skip


def test_values_that_no_run_can_have():
    with pytest.raises(ValueError) as caught:
        check(Config(strategies=[], paths="short"))
    assert str(caught.value).splitlines() == [
        f"planner.strategies []   say nothing of any product   -> {EXAMPLE}",
        "planner.paths short   is none of mixed, paper   -> planner.paths=mixed",
    ]
    for text in ("*", "*:1x2", "*:0x1x2", ":1x1x1", "*:1x1x1x2", "*:axbxc"):
        with pytest.raises(ValueError, match="is no pattern with 3 numbers"):
            check(Config(strategies=[text]))
    check(Config(strategies=["*:1x2x1", "a.*:1x1x1x2x1x2"]))
