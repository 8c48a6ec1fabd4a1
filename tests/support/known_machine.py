"""A cache in which this machine is known: nothing is measured, and no profile of another test is found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from harness.core.cluster import Device, Link
from harness.host import devices, machine
from harness.host.machine import Machine

PEAKS = {"float32": 1e12, "float64": 5e11}
MACHINE = Machine(Device(devices.cpu_model(), 10**10, PEAKS, 1e10, kernel_s=1e-6), Link(1e-5, 1e-9), None, 1.8, 1.8)


@contextmanager
def known(factory: pytest.TempPathFactory, described: Machine = MACHINE) -> Iterator[None]:
    """`REGATTA_CACHE` is a new folder that holds the machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REGATTA_CACHE", str(factory.mktemp("cache")))
        machine.store(described)
        yield
