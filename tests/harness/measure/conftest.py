"""For these tests: a cache of their own, in which the machine is known."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.measure.calibration_runs import MACHINE
from tests.support import known_machine


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of this module's own, in which the machine is known."""
    with known_machine.known(tmp_path_factory, MACHINE):
        yield
