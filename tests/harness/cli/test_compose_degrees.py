"""An engine's own names of the mesh's degrees."""

from __future__ import annotations

import pytest

from harness.cli.compose import compose
from harness.core.problem import CannotRun
from tests.problems import refused, rows


def test_the_papers_names_stand_for_the_mesh() -> None:
    config = compose(["engine=myelin", "engine.g_inter=2", "engine.g_data=3"])
    assert (config.mesh.pipeline, config.mesh.data) == (2, 3)
    same = compose(["engine=myelin", "engine.g_inter=2", "mesh.pipeline=2"])
    assert (same.mesh.pipeline, same.mesh.data) == (2, None)


def test_two_numbers_for_one_degree_are_refused() -> None:
    with pytest.raises(CannotRun) as caught:
        compose(["engine=myelin", "engine.g_inter=2", "mesh.pipeline=4"])
    assert rows(refused(caught)) == [("engine.g_inter", 2, ["engine.g_inter=4", "without engine.g_inter"])]
