"""What the matrix page makes of how runs end. (`make matrix` does the runs.)"""

from __future__ import annotations

import pytest

from harness.config import registry
from tests import matrix
from tests.matrix import CUT, End

REFUSED = """\
planning  failed after 1.6 ms
engine=single model=mlp cannot run:
  mesh.pipeline 2      engine=single has no pipeline stages   -> mesh.pipeline=1
  mesh.data 2          engine=single has no replicas          -> mesh.data=1
the earlier run in runs/x is kept
"""
FAILED = """\
starting  failed after 13.49 s
engine=deepspeed model=mlp: error: AssertionError: must provide optimizer
the ranks' output: runs/x/log
"""


@pytest.mark.parametrize(
    ("code", "printed", "ended"),
    [
        (0, "gpipe mlp: ok, 793 samples/s\n", End("ok")),
        (
            2, REFUSED,
            End("infeasible", "mesh.pipeline 2: engine=single has no pipeline stages -> mesh.pipeline=1"),
        ),
        (2, "run.py: unknown option\n", End("exit code 2", "run.py: unknown option")),
        (1, FAILED, End("exit code 1", "engine=deepspeed model=mlp: error: AssertionError: must provide optimizer")),
        (1, REFUSED, End("exit code 1", "the earlier run in runs/x is kept")),
        (-9, "", End("exit code -9", "it said nothing")),
    ],
)  # fmt: skip
def test_how_a_run_ended(code: int, printed: str, ended: End) -> None:
    assert matrix.end(code, printed) == ended
    assert ended.broken == (ended.status not in ("ok", "infeasible"))


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
