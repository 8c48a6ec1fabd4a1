from __future__ import annotations

import pytest

from harness.core.problem import NoPlan
from planners import tensor_parallel_base
from planners.megatron import Config, build, check
from tests.harness.sbp.nets import dense, transformer
from tests.planners.tensor_parallel_cases import ADAM, cluster, request
from tests.problems import rows

NET = transformer(samples=64, hidden=128)


def plan(profile=NET, devices: int = 8, local: int = 1, memory_bytes: int = 10**12, **config):
    there = cluster(devices, local, memory_bytes)
    return build(Config(**config)).plan(profile, there, ADAM, request(profile, devices))


def test_products_are_split_in_pairs_by_columns_then_by_rows():
    found = plan(dimensions=1).strategy
    assert found == {
        "embedding": (1, 1, 8), "head": (1, 8, 1),
        **{f"block_{k}.{name}": numbers for k in (0, 1) for name, numbers in (
            ("attention.qkv", (1, 8, 1)), ("attention.projection", (1, 1, 8)),
            ("mlp.up", (1, 8, 1)), ("mlp.down", (1, 1, 8)),
        )},
    }  # fmt: skip


def test_the_best_mesh_is_taken():
    one, best = (plan(dimensions=dimensions).predicted for dimensions in (1, 2))
    assert best["communication_s"] <= one["communication_s"]
    assert best["communication_s"] == pytest.approx(best["baselines"]["megatron"]["communication_s"])


def test_the_best_mesh_is_one_that_fits():
    free = plan()
    replicas = {numbers[0] for numbers in free.strategy.values()}
    assert max(replicas) > 1
    least = plan(dimensions=1).predicted["held_bytes"]
    tight = None
    for share in (1.2, 1.4, 1.6, 2.0, 3.0):
        try:
            tight = plan(memory_bytes=round(least * share))
        except NoPlan:
            continue
        break
    assert tight is not None
    assert tight.predicted["held_bytes"] < free.predicted["held_bytes"]


def test_the_devices_of_a_node_split_weights_and_gradients_are_summed_across():
    found = plan(devices=8, local=4)
    assert all(numbers[0] == 2 for numbers in found.strategy.values()), "all nodes are replicas"


def test_a_vocabulary_is_padded_where_all_devices_split_weights():
    """Megatron-LM pads it; samples and heads must divide all the same."""
    odd = transformer(words=250, samples=64, hidden=128)
    assert plan(odd, dimensions=1).strategy["head"] == (1, 8, 1)
    assert plan(odd).strategy["head"][1] == 2


def test_with_two_dimensions_what_does_not_divide_is_padded_if_the_user_says_so():
    """AutoDDL's Megatron-like splits VGG13's 1000 classes over 16 devices and more."""
    odd = dense((512, 512, 512, 510), 8)
    narrow, wide = (plan(odd, padded=padded) for padded in (False, True))
    assert (narrow.strategy["linear_2"], wide.strategy["linear_2"]) == ((4, 2, 1), (2, 4, 1))
    assert wide.predicted["communication_s"] < narrow.predicted["communication_s"]


def test_a_mesh_bound_to_nodes_splits_weights_over_all_devices_of_each():
    narrow = dense((8, 8, 8), 2**22)
    free, bound = (plan(narrow, devices=8, local=4, mesh=mesh) for mesh in ("best", "node"))
    assert bound.strategy == {"linear_0": (2, 1, 1, 4, 1, 1), "linear_1": (2, 1, 1, 1, 1, 4)}
    assert {numbers[:2] for numbers in free.strategy.values()} == {(2, 4)}
    assert free.predicted["communication_s"] < bound.predicted["communication_s"]


def test_heads_that_do_not_divide_have_no_mesh():
    with pytest.raises(NoPlan, match="no mesh of Megatron's divides all matmuls"):
        plan(transformer(heads=3, hidden=48), dimensions=1)


def test_it_is_what_everybody_says_of_two_dense_layers():
    found = plan(dense((64, 256, 64), 32), dimensions=1)
    (traffic,) = found.traffic
    size = 4 * 32 * 64
    assert {(t.algorithm, t.phase): t.bytes for t in traffic} == {
        ("reduce_scatter", "forward"): size * 7 // 8, ("all_gather", "backward"): size * 7 // 8,
    }  # fmt: skip


def test_values_that_no_run_can_have():
    assert rows(check(Config(dimensions=3, mesh="row", ends="open"))) == [
        ("planner.dimensions", 3, ["planner.dimensions=2"]),
        ("planner.mesh", "row", ["planner.mesh=best"]),
        ("planner.ends", "open", ["planner.ends=free"]),
    ]


def test_the_memory_of_the_same_strategies_is_counted_once(monkeypatch):
    """A search for what fits asks for it with many limits, and so do the baselines that are compared."""
    counted = []
    needed = tensor_parallel_base._needed

    def counting(profile, memory, chain, plan):
        counted.append(tuple(plan.strategy.items()))
        return needed(profile, memory, chain, plan)

    monkeypatch.setattr(tensor_parallel_base, "_needed", counting)
    least = plan(dimensions=1).predicted["held_bytes"]
    counted.clear()
    plan(memory_bytes=least * 3)
    assert len(counted) > 1
    assert len(set(counted)) == len(counted)
