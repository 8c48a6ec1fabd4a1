"""Check a file with DeepSpeed's own class: `python -m harness.export.deepspeed_config REPLICAS < FILE`.

Ends with an error where DeepSpeed refuses it. It is a process of its own, because DeepSpeed imports torch.
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace
from typing import Any


def check(settings: dict[str, Any], replicas: int) -> None:
    """Raise what DeepSpeed raises for a configuration of so many replicas."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime import config

    # what asks for the size of a world that is not there
    there: Any = config.dist
    config.dist = SimpleNamespace(get_rank=lambda: 0)
    try:
        config.DeepSpeedConfig(settings, mpu=SimpleNamespace(get_data_parallel_world_size=lambda: replicas))
    finally:
        config.dist = there


if __name__ == "__main__":
    check(json.load(sys.stdin), int(sys.argv[1]))
