"""What the matrix page makes of how runs end. (`make matrix` does the runs.)"""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.config import registry
from harness.core.problem import Problem
from harness.core.record import RunRecord
from tests import matrix
from tests.matrix import CUT, End

NO_STAGES = Problem("mesh.pipeline", 2, "engine=single has no pipeline stages", ({"mesh.pipeline": 1},))
NO_REPLICAS = Problem("mesh.data", 2, "engine=single has no replicas", ({"mesh.data": 1},))


@pytest.mark.parametrize(
    ("record", "ended"),
    [
        (RunRecord("x", "ok"), End("ok")),
        (
            RunRecord("x", "infeasible", problems=(NO_STAGES, NO_REPLICAS)),
            End("infeasible", "mesh.pipeline 2: engine=single has no pipeline stages -> mesh.pipeline=1"),
        ),
        (RunRecord("x", "error", reason="AssertionError: no"), End("error", "AssertionError: no")),
        (RunRecord("x", "timeout", reason="no progress"), End("timeout", "no progress")),
    ],
)
def test_how_a_run_ended(record: RunRecord, ended: End) -> None:
    assert matrix.end(record) == ended
    assert ended.broken == (ended.status not in ("ok", "infeasible"))


@pytest.mark.usefixtures("commands")
def test_cells_that_are_refused_and_that_run() -> None:
    """The first is refused before anything starts, the second trains."""
    refused = matrix.run(("engine=single", "planner=balance", "model=mlp", "mesh.pipeline=2", "mesh.data=1"))
    assert refused.status == "infeasible" and refused.said.endswith("-> mesh.pipeline=1")
    assert matrix.run(("engine=single", "planner=balance", "model=mlp", "mesh.pipeline=1", "mesh.data=1")) == End("ok")


def test_models_that_end_the_same_way_share_a_row_and_equal_words_a_note() -> None:
    no = End("infeasible", "mesh.pipeline 2: none -> mesh.pipeline=1")
    by_model = {"gpt": (End("ok"), no), "mlp": (End("ok"), no), "unet": (no, End("exit code 1", "x: error: y"))}
    cells = {
        ("engine=e", "planner=balance", f"model={model}", *mesh): ended
        for model, ends in by_model.items() for mesh, ended in zip(CUT, ends, strict=True)
    }  # fmt: skip
    cells |= {("engine=d", "planner=balance", "model=gpt", *mesh): End("ok") for mesh in CUT}
    notes: list[str] = []
    assert matrix.table(cells, CUT, notes)[2:] == [
        "| `engine=d` | gpt | ok | ok |",
        "| `engine=e` | gpt, mlp | ok | (1) |",
        "| `engine=e` | unet | (1) | **broken** (2) |",
    ]
    assert notes == ["none -> mesh.pipeline=1", "exit code 1, x: error: y"]


def test_a_page_is_read_as_it_was_written() -> None:
    """The committed one, and one with broken cells."""
    jobs = [list(matrix.of_engines()), list(matrix.of_planners()), list(matrix.of_products())]
    written = matrix.PAGE.read_text(encoding="utf-8")
    parts = [matrix.read(written, own) for own in jobs]
    missing = sum(len(own) - len(part) for own, part in zip(jobs, parts, strict=True))
    assert matrix.page(parts[0], parts[1], parts[2], missing) == written
    parts[0] |= dict.fromkeys(list(parts[0])[:20], End("exit code 1", "x: a, b"))
    broken = matrix.page(parts[0], parts[1], parts[2])
    assert "**broken** (1)" in broken
    engines, planners, products = (matrix.read(broken, own) for own in jobs)
    assert matrix.page(engines, planners, products) == broken


def test_some_rows_are_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others stay, and notes are numbered again."""
    before = matrix.PAGE.read_text(encoding="utf-8")
    monkeypatch.setattr(matrix, "PAGE", tmp_path / "matrix.md")
    matrix.PAGE.write_text(before, encoding="utf-8")
    ran: list[matrix.Choice] = []

    def run(cell: matrix.Choice) -> End:
        ran.append(cell)
        return End("infeasible", "mesh.data 2: first") if "model=gpt" in cell else End("ok")

    monkeypatch.setattr(matrix, "run", run)
    assert matrix.main(["--engine", "ddp", "single", "--planner", "summa"]) == 0
    assert {cell[0] for cell in ran} == {"engine=ddp", "engine=single", "planner=summa"}
    after = matrix.PAGE.read_text(encoding="utf-8")
    others = [cell for cell in matrix.of_engines() if cell[0] not in ("engine=ddp", "engine=single")]
    assert matrix.read(after, others) == matrix.read(before, others)
    assert "| `engine=ddp` | gpt | (1) | (1) | (1) | (1) | (1) |" in after and "\n1. `first`\n" in after
    assert "engine=ddp has no pipeline stages" not in after


def test_every_engine_model_and_planner_is_there_once() -> None:
    engines, planners = list(matrix.of_engines()), [*matrix.of_planners(), *matrix.of_products()]
    cells = [" ".join(cell) for cell in engines + planners]
    assert len(set(cells)) == len(cells)
    for plugin in registry.scan():
        if plugin.group in ("engine", "planner", "model") and plugin.name not in matrix.NEED_MORE:
            assert any(f"{plugin.group}={plugin.name} " in cell for cell in cells)
    assert any(
        "engine=deepspeed engine.zero=3 planner=balance model=gpt mesh.pipeline=1 mesh.data=2" in c for c in cells
    )
