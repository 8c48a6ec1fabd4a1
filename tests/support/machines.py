"""A machine as if it had been measured."""

from __future__ import annotations

from harness.core.cluster import Device, Link
from harness.host import devices
from harness.host.machine import Machine

MACHINE = Machine(
    Device(devices.cpu_model(), 10**10, {"float32": 1e12}, 1e10, kernel_s=1e-6), Link(1e-5, 1e-9), None, 1.8, 1.8
)
