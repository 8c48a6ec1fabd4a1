"""The process of an engine of one tree: a line on stdin asks for a step, a line on stdout has its seconds.

    python -P before_worker.py engine=gpipe model=unet ...         with PYTHONPATH=TREE

It is run as a file, so that all that it imports is of that tree: only what trees have had for long is used here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def main(keys: Sequence[str]) -> None:
    """Take turns until stdin ends."""
    seconds = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else is printed
    import torch

    from analysis.bench.entries import prepared, profiled
    from analysis.bench.worker import EntryProcess
    from harness.core.cluster import Device, Link
    from harness.host.machine import Machine

    torch.set_num_threads(1)  # so that processes that are forked inherit no pool of threads
    here = Machine(Device("cpu", 8 * 10**9, {"float32": 1e10}, 1e10, 1e-6), Link(1e-5, 1e-9), cores=2.0)
    entry = prepared(keys, profiled([key for key in keys if not key.startswith(("engine", "planner"))]), here)
    torch.manual_seed(0)
    batch = entry.model.sample(entry.profile.micro_batch * entry.plan.micro_batches * entry.plan.mesh.data)
    with EntryProcess(entry, batch) as process:
        for _ in sys.stdin:
            took_s = process.step()
            if process.failed:
                sys.exit(process.failed)
            print(took_s, file=seconds)


if __name__ == "__main__":
    main(sys.argv[1:])
