"""For the tests of the benchmark: what runs on two devices of a machine that need not be measured."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from analysis.bench.entries import prepared, profiled
from analysis.bench.worker import Entry
from harness.core.cluster import Device, Link
from harness.host.machine import Machine
from harness.interfaces import Batch
from tests.analysis.bench.stumbling import nothing_left

KEYS = ("model=mlp", "batch.size=8", "batch.micro_batches=4")
HERE = Machine(Device("cpu", 8 * 10**9, {"float32": 1e10}, 1e10, 1e-6), Link(1e-5, 1e-9), cores=2.0)
ENTRIES = {
    "single": ("engine=single",),
    "gpipe": ("engine=gpipe", "engine.checkpoint=never"),
    "ddp": ("engine=ddp",),
}


@pytest.fixture(scope="session")
def entries() -> dict[str, Entry]:
    profile = profiled(KEYS)
    return {name: prepared([*KEYS, *own], profile, HERE) for name, own in ENTRIES.items()}


@pytest.fixture
def batch(entries: dict[str, Entry]) -> Batch:
    return entries["single"].model.sample(8)


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    """One intra-op thread, since these tests fork; and no process is left."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with nothing_left():
        yield
    torch.set_num_threads(threads)
