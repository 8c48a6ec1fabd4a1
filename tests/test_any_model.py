"""Models that are not of the zoo against a plain loop of PyTorch: what the page makes of runs, and a few of its cells.

(`make matrix` does all of them.)
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.core.run_files import METRICS
from tests import tiers
from tests.any_model import __main__ as any_model
from tests.any_model import chain, reference
from tests.any_model.cases import CASES, COLUMNS, FEW, Case, Column, cells
from tests.any_model.chain import Chain
from tests.any_model.page import Cell, Model, page
from tests.matrix import End

NAMED = {case.name: case for case in CASES}
ENGINES = {column.name: column for column in COLUMNS}


@pytest.mark.usefixtures("commands")
@pytest.mark.parametrize("cell", tiers.split(["gpt2 gpipe", "googlenet fsdp", "lstm 1F1B"], ["lstm 1F1B"]))
def test_a_cell_of_the_page(tmp_path: Path, cell: str) -> None:
    """Of Transformers, with an override; of torchvision, with gradients of skips that arrive first; LSTM."""
    model, engine = cell.split()
    key = NAMED[model], ENGINES[engine]
    found = any_model.run_all([key], tmp_path)[key]
    assert found.end == End("ok") and found.difference is not None and found.difference <= 1e-9


@pytest.mark.parametrize(
    ("precision", "factor", "status"),
    [("fp64", 1 + 1e-10, "ok"), ("fp64", 1 + 1e-8, "error"), ("fp32", 1 + 1e-6, "ok"), ("fp32", 1 + 1e-4, "error")],
)
def test_losses_that_are_not_those_of_the_loop(tmp_path: Path, precision: str, factor: float, status: str) -> None:
    expected = reference.losses(NAMED["lstm"], precision)
    expected = [*expected[:-1], expected[-1] * factor]
    (tmp_path / METRICS).write_text("".join(json.dumps({"loss": loss}) + "\n" for loss in expected), encoding="utf-8")
    found = any_model.cell(NAMED["lstm"], Column("any", (), precision), End("ok"), tmp_path)
    assert found.end.status == status
    assert found.difference == pytest.approx(abs(factor - 1), rel=0.01)


def test_the_loop_trains() -> None:
    """So that a run which leaves out a gradient has another loss."""
    first, second, third = reference.losses(NAMED["lstm"], "fp64")
    assert first - second > 1e-6 * first and second - third > 1e-6 * first


def test_every_model_has_every_engine() -> None:
    found = cells()
    assert len(set(found)) == len(found)
    for case in CASES:
        of = [column.name for one, column in found if one is case]
        assert of == (list(FEW) if case.further else list(ENGINES)) or set(of) == set(FEW)
    assert sum(not case.further for case in CASES) == 12


def test_a_chain_has_a_layer_for_each_block() -> None:
    found = chain.of(NAMED["lstm"])
    assert found == Chain(layers=6, blocks=4, whole=4, most=1) and found.cut_at_every_block
    assert not Chain(6, 4, 4, most=2).cut_at_every_block
    assert not Chain(6, 4, 2, most=1).cut_at_every_block


@pytest.mark.parametrize(
    ("costs", "above"), [([1.0, 1.0], 0.0), ([1.0, 1.0, 1.0], 1 / 3), ([5.0, 1.0, 4.0], 0.0), ([4.0], 1.0)]
)
def test_two_stages(costs: list[float], above: float) -> None:
    assert chain.imbalance(costs) == pytest.approx(above)


def test_the_page() -> None:
    gpt, net = Case("gpt", "Block"), Case("net", "Bottleneck", further=True)
    gpipe, ddp = COLUMNS[1], COLUMNS[4]
    no = End("infeasible", "mesh.pipeline 2: has 1 layer -> engine=ddp")
    text = page(
        {
            (gpt, gpipe): Cell(End("ok"), 2e-16),
            (gpt, ddp): Cell(no),
            (net, gpipe): Cell(no),
            (net, ddp): Cell(End("error", "losses differ"), 0.5),
        },
        {gpt: Model(Chain(6, 4, 3, 1), 0.125), net: Model(Chain(2, 3, 3, 2), None)},
    ).splitlines()
    assert "| gpt | 2e-16 | (1) |" in text
    assert "| net | (1) | **broken** (2) |" in text
    assert "| gpt | 6 | 4 `Block` | yes, 1 opened | 12.5% |" in text
    assert "| net | 2 | 3 `Bottleneck` | no |  |" in text
    assert "Of the 2 cells of the first twelve models 1 are refused." in text
    assert text[-2:] == ["1. `has 1 layer -> engine=ddp`", "2. `error, losses differ`"]
