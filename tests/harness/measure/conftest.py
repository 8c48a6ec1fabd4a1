"""For these tests: a cache of their own, in which the machine is known."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.host import machine
from tests.harness.measure.calibration_runs import MACHINE


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of this module's own, in which the machine is known."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REGATTA_CACHE", str(tmp_path_factory.mktemp("cache")))
        machine.store(MACHINE)
        yield
