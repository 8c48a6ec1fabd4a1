from __future__ import annotations

import pytest

from harness.core.problem import NoPlan
from planners.autoddl.planner import Config, build, check
from tests.harness.sbp.nets import dense, transformer
from tests.planners.tensor_parallel_cases import ADAM, cluster, request
from tests.problems import row

NET = dense((64, 128, 32))
DRAWN = ("random", "metropolis_hastings", "coordinate_descent")


def plan(profile=NET, devices: int = 8, micro_batches: int = 1, memory_bytes: int = 10**12, **config):
    there = cluster(devices, memory_bytes=memory_bytes)
    return build(Config(**config)).plan(profile, there, ADAM, request(profile, devices, micro_batches))


def test_no_search_finds_anything_cheaper_than_the_exact_one():
    best = plan().predicted["communication_s"]
    found = {name: plan(search=name, evaluations=500).predicted for name in DRAWN}
    found["exhaustive"] = plan(search="exhaustive").predicted
    assert all(one["communication_s"] >= best * (1 - 1e-12) for one in found.values())
    assert found["exhaustive"]["communication_s"] == pytest.approx(best, rel=1e-12)
    assert found["coordinate_descent"]["communication_s"] == pytest.approx(best, rel=1e-12)
    for name, one in found.items():
        counts, seconds = zip(*one["history"], strict=True)
        assert one["evaluations"] >= counts[-1], name
        assert seconds[-1] == pytest.approx(one["communication_s"])
    assert "history" not in plan().predicted


def test_mixed_paths_cost_no_more_than_the_papers():
    for profile in (NET, transformer()):
        mixed, paper = (plan(profile, paths=paths).predicted["communication_s"] for paths in ("mixed", "paper"))
        assert mixed <= paper * (1 + 1e-12)


def test_ends_that_are_split_by_samples_cost_more():
    free, split = (plan(ends=ends) for ends in ("free", "batch_split"))
    assert split.predicted["communication_s"] > free.predicted["communication_s"]
    assert split.layouts["output"] == ((8,),)
    assert split.layouts["linear_0"][0] != () == free.layouts["linear_0"][0]


def test_a_limit_of_replicas():
    assert max(p0 for p0, _, _ in plan(max_replicas=2).strategy.values()) <= 2


def test_powers_of_two_and_splits_that_do_not_divide():
    odd = dense((60, 30, 6), 48)
    assert any(p1 == 3 or p2 == 3 for _, p1, p2 in plan(odd, 12).strategy.values())
    found = plan(odd, 12, splits="power_of_two").strategy.values()
    assert all(p & (p - 1) == 0 for _, *others in found for p in others)
    assert plan(odd, 16, splits="any", max_replicas=1)
    with pytest.raises(NoPlan):
        plan(odd, 16, max_replicas=1)


@pytest.mark.usefixtures("computation")
def test_repeated_layers_are_split_the_same_way():
    profile = transformer(layers=4)
    there = {}
    for share in (0.7, 0.8, 0.9, 1.0):
        limit = round(share * plan(profile).predicted["held_bytes"])
        try:
            there[share] = plan(profile, memory_bytes=limit), plan(profile, memory_bytes=limit, repeat=True)
        except NoPlan:
            continue
    assert there
    for free, equal in there.values():
        blocks = [[s for name, s in equal.strategy.items() if name.startswith(f"block_{k}.")] for k in range(4)]
        assert all(block == blocks[0] for block in blocks)
        assert equal.predicted["communication_s"] >= free.predicted["communication_s"] * (1 - 1e-9)


def test_an_exhaustive_search_that_is_too_large():
    with pytest.raises(NoPlan) as caught:
        plan(transformer(), search="exhaustive")
    assert row(caught.value.problem) == ("planner.search", "exhaustive", ["planner.search=exact"])
    assert "at most 1e+07" in caught.value.problem.message


def test_values_that_no_run_can_have():
    found = check(Config(search="best", paths="p", ends="e", splits="s", max_replicas=0, memory_gb=-1.0, evaluations=0))
    assert [(problem.key, problem.value) for problem in found] == [
        ("planner.search", "best"), ("planner.paths", "p"), ("planner.ends", "e"), ("planner.splits", "s"),
        ("planner.max_replicas", 0), ("planner.evaluations", 0), ("planner.memory_gb", -1.0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "key", "default"),
    [
        ({"search": "random", "seed": -1}, "seed", 0),
        ({"seed": 1}, "seed", 0),
        ({"evaluations": 5}, "evaluations", 10_000),
        ({"search": "exhaustive", "evaluations": 5}, "evaluations", 10_000),
        ({"search": "random", "memory_gb": 1.0, "evaluations": 5}, "memory_gb", None),
        ({"search": "random", "repeat": True, "evaluations": 5}, "repeat", False),
        ({"convolutions": "whole"}, "convolutions", "split"),
    ],
)
def test_keys_that_the_search_would_not_look_at(given, key, default):
    (problem,) = check(Config(**given))
    assert (problem.key, problem.value) == (f"planner.{key}", given[key])
    assert problem.fixes == ({f"planner.{key}": default},)
    assert plan(**given | {key: default}).strategy


def test_a_search_that_draws_depends_on_its_seed_alone():
    one, again, other = (plan(search="random", evaluations=5, seed=seed).predicted["history"] for seed in (1, 1, 2))
    assert one == again != other
