"""Models of the zoo in the myelin engine, against engine=single."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.engines import contract, zoo
from tests.engines.myelin.cases import case

LARGE = [(model, *grid) for model in ("unet", "amoebanet", "gpt") for grid in ((4, 1), (2, 2))]


@pytest.mark.parametrize(("pipeline", "data"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("model", zoo.SIZES)
def test_trains_the_zoo_like_single(model: str, pipeline: int, data: int) -> None:
    contract.check_training(replace(case(model, pipeline, data, m=2 // data), samples=4))


@pytest.mark.parametrize(("model", "pipeline", "data"), LARGE)
def test_trains_the_zoo_on_four_ranks(model: str, pipeline: int, data: int) -> None:
    contract.check_training(replace(case(model, pipeline, data, m=2, transport="mpi"), samples=4))
