"""How the library is loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
COLLECTIVES = """
import warnings
import torch
import torch.distributed as dist
from engines.deepspeed import load_deepspeed
if {loaded}:
    load_deepspeed.load(3)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_gather_into_tensor(torch.zeros(2), torch.zeros(2))
dist.reduce_scatter_tensor(torch.zeros(2), torch.zeros(2))
warnings.warn("`torch.distributed.reduce` is deprecated", FutureWarning)
dist.destroy_process_group()
"""


@pytest.mark.usefixtures("commands", "at_length")
@pytest.mark.parametrize("loaded", [True, False])
def test_known_warnings_are_left_out_of_the_log_and_no_others(loaded: bool) -> None:
    code = COLLECTIVES.format(loaded=loaded)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    lines = [line.partition("FutureWarning: ")[2] for line in done.stderr.splitlines() if "FutureWarning: " in line]
    assert lines[-1] == "`torch.distributed.reduce` is deprecated"
    assert len(lines) == (1 if loaded else 3)
