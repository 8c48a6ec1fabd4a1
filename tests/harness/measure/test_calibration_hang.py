"""Ranks that hang in a collective."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.harness.measure.calibration_runs import disturbed

pytestmark = pytest.mark.usefixtures("commands")


@pytest.mark.usefixtures("at_length")
def test_ranks_that_hang_end_it(tmp_path: Path) -> None:
    def stop(found: list[int]) -> None:
        for number in found[1:]:
            os.kill(number, signal.SIGSTOP)

    record = disturbed(tmp_path, stop, "launch.timeout_s=7")
    assert record.status == "timeout" and "launch.timeout_s=7 s" in record.reason
