"""What this machine can do, measured once and kept: peaks, memory bandwidth, links, and how far its cores go together.

The file lies in $REGATTA_CACHE/machines, else $XDG_CACHE_HOME/regatta/machines, else ~/.cache/regatta/machines. It may
be lost or spoilt at any time: then the machine is measured again.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import re
import warnings
from dataclasses import dataclass
from pathlib import Path

from harness import devices, profile_cache
from harness.cluster import Device, Link
from harness.serial import Document, SchemaError

MEASURING = ("measuring.py", "malloc.py", "workers.py")
"""Modules of harness/ whose edits make a measurement out of date."""


@dataclass(frozen=True)
class Machine(Document):
    """This machine's devices, all alike, as programs find them.

    `device` has the FLOP/s of large products by dtype, the bytes/s of a large sum, and the time of the smallest kernel;
    CPU devices compute with one thread. `link` is a copy between two devices, `host_link` one between a device and the
    host (None: as `link`). `cores` is how many CPU devices' worth of work all of them do at once, 0 for GPUs, which
    share nothing.
    """

    device: Device
    link: Link
    host_link: Link | None = None
    cores: float = 0.0

    def __post_init__(self) -> None:
        numbers = {**self.device.peak_flops, "memory_bandwidth": self.device.memory_bandwidth,
                   "kernel_s": self.device.kernel_s, "cores": self.cores}  # fmt: skip
        for name, value in numbers.items():
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value}, must be a finite number of at least 0")


def measure(wanted: str = "auto") -> Machine:
    """Measure the devices of kind `wanted` ("auto", "cpu" or "cuda"), which takes some seconds. Imports torch.

    Best in a process of its own that called `harness.malloc.tune`, as ranks do. Raises ValueError without such devices.
    """
    from harness import measuring

    return measuring.measure(devices.detect(wanted))


def stored(wanted: str = "auto", remeasure: bool = False) -> Machine | None:
    """What is kept of the devices of kind `wanted`; None where nothing is, or nothing that can be read.

    With `remeasure` only what was measured since this process began.
    """
    name = devices.detect(wanted).name
    if not profile_cache.is_there(path(name), remeasure):
        return None
    try:
        machine = Machine.load(path(name))
    except (OSError, SchemaError, RecursionError):
        return None
    return machine if machine.device.name == name and machine.device.peak_flops else None


def store(machine: Machine) -> None:
    """Keep a measurement. A folder that cannot be written is a warning: the next run measures again."""
    place = path(machine.device.name)
    try:
        machine.save(place)
    except OSError as error:
        warnings.warn(
            f"the measurement of this machine is not kept, the next run measures again: {place}: "
            f"{error.strerror or error} -> set REGATTA_CACHE to a folder that can be written",
            stacklevel=2,
        )


def path(device_name: str) -> Path:
    """Where the measurement for these devices, the installed torch and the cores of this process is kept."""
    sources = (Path(__file__).parent / name for name in MEASURING)
    key = {
        "device": device_name,
        "torch": importlib.metadata.version("torch"),
        "cores": devices.cores(),
        "sources": [hashlib.sha256(source.read_bytes()).hexdigest() for source in sources],
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", device_name)
    return profile_cache.folder().parent / "machines" / f"{name}-{digest}.json"
