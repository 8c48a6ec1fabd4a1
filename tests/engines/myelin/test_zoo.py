"""Models of the zoo in the myelin engine, against engine=single."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.engines import contract
from tests.engines.myelin.cases import ZOO, case


@pytest.mark.parametrize("model", ZOO)
def test_trains_the_zoo_like_single(model: str) -> None:
    contract.check_training(replace(case(model, m=2), samples=4))


@pytest.mark.parametrize(("model", "pipeline", "data"), [("unet", 4, 1), ("gpt", 2, 2), ("gpt", 4, 1)])
def test_trains_the_zoo_on_other_grids(model: str, pipeline: int, data: int) -> None:
    contract.check_training(replace(case(model, pipeline, data, m=2, transport="mpi"), samples=4))
