"""DeepSpeed's cut, held against the library's own functions."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from harness.core.cluster import Cluster
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import LayerProfile, ModelProfile, Tied
from harness.core.plan import Mesh, Plan
from harness.core.problem import CannotRun, NoPlan
from harness.interfaces import BatchShape, PlanRequest
from planners import deepspeed
from planners.deepspeed import Config, partition_balanced
from tests.planners.strategies import cuttings
from tests.problems import refused, row, rows

ROOT = Path(__file__).parents[2]
WEIGHTS = st.lists(
    st.integers(0, 10**9) | st.integers(0, 4) | st.floats(0, 1e9, allow_nan=False), min_size=1, max_size=12
)  # fmt: skip


@pytest.fixture(scope="module")
def library() -> Any:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime import utils

    return utils


def sizes(parts: list[int]) -> list[int]:
    return [end - begin for begin, end in pairwise(parts)]


def sums(weights: list[int], cut: tuple[int, ...] | list[int]) -> list[int]:
    rest = iter(weights)
    return [sum(next(rest) for _ in range(size)) for size in cut]


def plan(weights: list[int], stages: int, by: str = "parameters", **more: Any) -> Plan:
    model = ModelProfile(tuple(LayerProfile(f"l{k}", param_bytes=size) for k, size in enumerate(weights)))
    request = PlanRequest(BatchShape(24, 6), stages, **more)
    return deepspeed.build(Config(by=by)).plan(model, Cluster(), MemoryModel(), request)


@given(WEIGHTS, st.data())
def test_the_cut_is_the_librarys(library: Any, weights: list[float], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(weights)))
    assert partition_balanced(weights, parts) == sizes(library.partition_balanced(weights, parts))


@given(st.lists(st.integers(0, 99), min_size=1, max_size=30), st.data())
def test_plans_of_both_kinds_are_the_librarys(library: Any, weights: list[int], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(weights)))
    assert list(plan(weights, stages).balance) == sizes(library.partition_balanced(weights, stages))
    assert list(plan(weights, stages, "uniform").balance) == sizes(library.partition_uniform(len(weights), stages))


def test_it_is_neither_the_least_difference_nor_the_least_maximum() -> None:
    """As the documentation says; `planner=balance planner.by=parameters` finds the least maximum."""
    weights = [5, 4, 1, 6, 4, 6, 4]
    assert partition_balanced(weights, 4) == [2, 2, 2, 1]
    assert sums(weights, partition_balanced(weights, 4)) == [9, 7, 10, 4]
    assert min(max(s) - min(s) for s in (sums(weights, cut) for cut in cuttings(7, 4))) == 5
    weights = [3, 1, 6, 3, 2, 2, 1, 2]
    assert sums(weights, partition_balanced(weights, 3)) == [10, 5, 5]
    assert min(max(sums(weights, cut)) for cut in cuttings(8, 3)) == 9


def test_of_equals_the_last_cut() -> None:
    assert partition_balanced([0, 0, 0, 0], 2) == [3, 1]
    assert partition_balanced([1, 1, 1], 2) == [2, 1]


def test_what_a_plan_says() -> None:
    found = plan([4, 4, 8, 8], 2, data=2, recompute="always")
    assert (found.balance, found.mesh, found.micro_batches) == ((3, 1), Mesh(data=2, pipeline=2), 6)
    assert found.recompute == "always"
    assert found.predicted == {"stage_cost": [16, 8], "balance": 0.75}
    assert plan([4, 4, 8, 8], 2, "uniform").predicted == {}
    assert plan([0, 0], 2).predicted == {"stage_cost": [0, 0], "balance": 1.0}


def test_several_stages_on_a_device() -> None:
    found = plan([1] * 8, 2, placement=(0, 1, 1, 0))
    assert [(stage.layers, stage.device) for stage in found.stages] == [(2, 0), (2, 1), (2, 1), (2, 0)]
    assert [stage.device for stage in plan([1] * 8, 2, "uniform", placement=(0, 1, 1, 0)).stages] == [0, 1, 1, 0]


def test_what_layers_share_is_cut_twice_and_held_once() -> None:
    """DeepSpeed counts the parameters of each layer that it would build; a stage holds a shared one once."""
    tied = (Tied("w", 8),)
    layers = (LayerProfile("a", param_bytes=8, tied=tied), LayerProfile("b", param_bytes=8, tied=tied))
    model = ModelProfile((*layers, LayerProfile("c", param_bytes=16)))
    found = deepspeed.build(Config()).plan(model, Cluster(), MemoryModel(), PlanRequest(BatchShape(4, 2), 2))
    assert (found.balance, found.predicted["stage_cost"]) == ((2, 1), [8, 16])


@pytest.mark.parametrize("by", deepspeed.BY)
def test_more_stages_than_layers_are_refused(by: str) -> None:
    with pytest.raises(NoPlan) as caught:
        plan([1, 1, 1], 4, by)
    assert row(caught.value.problem) == ("mesh.pipeline", 4, ["mesh.pipeline=3"])


def test_an_unknown_key_is_refused() -> None:
    with pytest.raises(CannotRun) as caught:
        deepspeed.build(Config(by="time"))
    assert rows(refused(caught)) == [("planner.by", "time", ["planner.by=parameters"])]
    assert deepspeed.check(Config(by="uniform")) == []


def test_the_yaml_says_what_it_is_and_takes_its_schema() -> None:
    file = ROOT / "conf" / "planner" / "deepspeed.yaml"
    assert file.read_text().startswith("# ")
    assert "planner=deepspeed" in file.read_text()
    assert OmegaConf.load(file) == {"defaults": ["_deepspeed", "_self_"]}


def test_it_needs_neither_torch_nor_the_library() -> None:
    code = "import sys, planners.deepspeed; assert not {'torch', 'deepspeed'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
