"""The lines of metrics.jsonl, as the parent follows them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from harness.core.run_files import METRICS
from harness.run.step_lines import StepLines


def test_a_step_takes_as_long_as_its_batch_and_its_passes(tmp_path: Path) -> None:
    """Else a run whose data are slow would be ended as one that hangs."""
    config: Any = SimpleNamespace(warmup=0, steps=3, batch=SimpleNamespace(size=8))
    progress = MagicMock()
    lines = [{"step": step, "loss": 1.0, "step_time_s": 0.5, "data_wait_s": 40.0} for step in range(3)]
    (tmp_path / METRICS).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    followed = StepLines(config, tmp_path, progress, MagicMock(), start=1)
    followed.forward()
    assert followed.done == 3 and followed.seconds == [40.5, 40.5]
    assert [call.args[0] for call in progress.step.call_args_list] == [2, 3], "the first step was done before"
