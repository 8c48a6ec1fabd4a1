"""Models of the zoo in the myelin engine, against engine=single."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.engines import contract, zoo
from tests.engines.myelin.cases import case

pytestmark = pytest.mark.usefixtures("ranks")


@pytest.mark.usefixtures("at_length")
@pytest.mark.fast
@pytest.mark.parametrize(("pipeline", "data"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("model", zoo.SIZES)
def test_trains_the_zoo_like_single(model: str, pipeline: int, data: int) -> None:
    contract.check_training(replace(case(model, pipeline, data, m=2 // data), samples=4))


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize(("pipeline", "data"), [(4, 1), (2, 2)])
@pytest.mark.parametrize("model", zoo.SIZES)
def test_trains_the_zoo_on_four_ranks(model: str, pipeline: int, data: int) -> None:
    """Two samples or more in a micro-batch, since a batch norm of one sample is zero where a picture is a pixel."""
    contract.check_training(replace(case(model, pipeline, data, m=2, transport="mpi"), samples=8))
