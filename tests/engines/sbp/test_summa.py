"""SUMMA on meshes of CPU ranks against `single`, in float64: losses, weights, optimizer state and bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engines.sbp.block_layout import Mesh
from engines.sbp.engine import Config, build
from engines.sbp.instruction import Unrunnable, undivided
from engines.sbp.program import program
from harness.core.memory_model import MemoryModel
from harness.interfaces import BatchShape, Model, PlanRequest
from harness.measure.count_model import count
from harness.sbp.device_grid import Grid
from harness.sbp.matmul_chain import chain_from_profile
from harness.sbp.route_to_plan import device_share, grid_from_plan
from harness.simulator import simulate
from models.gpt.config import Config as GPTConfig
from models.gpt.gpt import build as gpt
from models.llama.config import Config as LlamaConfig
from models.llama.llama import build as llama
from models.mlp.config import Config as MLPConfig
from models.mlp.mlp import build as mlp
from planners.summa import Config as SummaConfig
from planners.summa import build as build_summa
from tests.engines import zoo
from tests.support.sbp_plans import flat, on_mesh
from tests.support.sbp_runs import ADAM, GENTLE, Run, alone, check, check_sent, in_ranks, predicted

pytestmark = pytest.mark.usefixtures("ranks")

MLP = mlp(MLPConfig(widths=[24, 48, 24, 48]))
SAMPLES = 24


def transformer(tied: bool, dropout: float = 0.0, heads: int = 4) -> Model:
    return gpt(
        GPTConfig(
            layers=2, hidden=8 * heads, heads=heads, sequence=5, vocabulary=8 * heads, tied=tied, dropout=dropout,
            attention_dropout=dropout,
        )
    )  # fmt: skip


def gated(tied: bool = False) -> Model:
    return llama(LlamaConfig(layers=2, width=32, heads=4, kv_heads=2, hidden=24, sequence=5, vocabulary=24, tied=tied))


@pytest.mark.parametrize("mesh", [(2, 2), (1, 4), (4, 1)])
def test_an_mlp(mesh: tuple[int, int]) -> None:
    plans = [on_mesh(MLP, mesh, SAMPLES, m) for m in (1, 2)]
    check([Run(MLP, plans[0], SAMPLES), Run(MLP, plans[1], SAMPLES, ADAM)])


@pytest.mark.parametrize("mesh", [(2, 3), (3, 2)])
@pytest.mark.usefixtures("at_length")
def test_rows_and_columns_that_differ_have_panels_of_both(mesh: tuple[int, int]) -> None:
    check([Run(MLP, on_mesh(MLP, mesh, SAMPLES, 2), SAMPLES)])


def test_transformers_on_two_by_two() -> None:
    """A weight at both ends, one in each, dropout, and matmuls that read the same tensor."""
    some = [(transformer(True), 1), (transformer(False, 0.2), 2), (gated(), 1), (gated(tied=True), 2)]
    check([Run(model, on_mesh(model, (2, 2), 8, m), 8, (GENTLE, ADAM)[m - 1]) for model, m in some])


@pytest.mark.parametrize(("item", "other"), [("embedding", (2, 2, 1)), ("embedding", (2, 1, 2)), ("head", (2, 2, 1))])
def test_a_weight_that_one_end_alone_has_in_blocks_is_refused(item: str, other: tuple[int, ...]) -> None:
    model = transformer(True)
    plan, profile = on_mesh(model, (2, 2), 8), count(model, 8, "float64")
    name = next(name for name in plan.strategy if name.split(".")[0] == item)
    edited = replace(plan, strategy={**plan.strategy, name: other})
    with pytest.raises(Unrunnable, match=r"in another way than|is not in blocks"):
        program(edited, chain_from_profile(profile), Mesh(grid_from_plan(edited)))


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize("mesh", [(1, 2, 2, 2), (2, 2, 1, 2), (2, 1, 1, 4)])
def test_nodes_of_several_devices(mesh: tuple[int, ...]) -> None:
    model = transformer(True, heads=8)
    check([Run(model, on_mesh(model, mesh, 8, nodes=2), 8), Run(MLP, on_mesh(MLP, mesh, SAMPLES, nodes=2), SAMPLES)])


def test_convolutions_are_data_parallel_and_their_output_is_moved_into_blocks() -> None:
    model = zoo.model("vgg")
    plan = on_mesh(model, (2, 2), 8)
    assert set(plan.strategy.values()) == {(4, 1, 1), (2, 2)}
    check([Run(model, plan, 8, GENTLE)])


@pytest.mark.parametrize(("dtype", "autocast"), [("float32", None), ("float32", "bfloat16")])
def test_rounding(dtype: str, autocast: str | None) -> None:
    """Losses to a few roundings; in autocast weights are sent as they are stored, and what else as it is computed."""
    plan = on_mesh(MLP, (2, 2), SAMPLES, dtype=dtype, autocast=autocast)
    run = Run(MLP, plan, SAMPLES, dtype=dtype, autocast=autocast)
    (got,) = in_ranks([run])
    torch.testing.assert_close(got.losses, alone(run).losses, rtol=2e-2 if autocast else 1e-5, atol=0)
    check_sent(got, run)


def test_bytes_are_those_of_the_paper_and_stand_in_the_simulated_schedule() -> None:
    """(|X| / rows + |W| / columns) (1 + 2) received, for every micro-batch; nothing is all-reduced."""
    m, profile = 2, count(MLP, SAMPLES // 2, "float64")
    request = PlanRequest(BatchShape(SAMPLES, m), 1, 1, 4)
    plan = build_summa(SummaConfig()).plan(profile, flat(4), MemoryModel(), request)
    rows, columns = plan.strategy["linear_0"]
    share = device_share(profile, plan, chain_from_profile(profile))
    simulated = simulate(build(Config()).schedule(plan, share), plan, share, flat(4), MemoryModel()).figures
    assert simulated["bytes_sent"] == predicted(plan)
    sums = {"broadcast@forward": 0.0, "broadcast@backward": 0.0, "reduce@backward": 0.0}
    for number, (inputs, outputs) in enumerate([(24, 48), (48, 24), (24, 48)]):
        x = 8 * SAMPLES // m * inputs / rows * (columns - 1) / columns
        w = 8 * inputs * outputs / columns * (rows - 1) / rows
        sums["broadcast@forward"] += x + w
        sums["broadcast@backward"] += x + (w if number else 0)  # the model's input needs no gradient
        sums["reduce@backward"] += (x if number else 0) + w
    assert predicted(plan) == {kind: 4 * m * size for kind, size in sums.items()}


def test_a_mesh_that_does_not_divide_is_named() -> None:
    profile = count(mlp(MLPConfig(widths=[24, 50, 24])), SAMPLES, "float64")
    plan, mesh = on_mesh(mlp(MLPConfig(widths=[24, 48, 24])), (1, 4), SAMPLES), Mesh(Grid(1, 4))
    wrong = undivided(program(plan, chain_from_profile(profile), mesh), mesh)
    assert "50 outputs of linear_0 are not divisible by 4" in wrong
    assert "50 inputs of linear_1 are not divisible by 4" in wrong
    heads = count(transformer(True, heads=2), 8, "float64")
    with pytest.raises(Unrunnable, match="keeps 2 attention heads whole"):
        program(on_mesh(transformer(True), (1, 4), 8), chain_from_profile(heads), mesh)
