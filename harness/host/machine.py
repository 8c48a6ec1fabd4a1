"""The measured machine, cached on disk: peak FLOP/s, memory bandwidth, links, and how its cores scale together.

The file is in $REGATTA_CACHE/machines, else $XDG_CACHE_HOME/regatta/machines, else ~/.cache/regatta/machines. If it is
missing or damaged, the machine is measured again.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import math
from dataclasses import dataclass
from pathlib import Path

from harness.core.cluster import CallTimes, Device, Link
from harness.core.serialization import Document
from harness.host import devices, profile_cache
from harness.host.devices import DetectedDevices

MEASURING = (
    "measure/benchmark_machine.py",
    "measure/reference_work.py",
    "measure/time_calls.py",
    "measure/work_together.py",
    "host/malloc.py",
    "runtime/collectives.py",
    "runtime/cpu_streams.py",
)
"""Modules of harness/ whose edits make a measurement out of date."""


@dataclass(frozen=True)
class Machine(Document):
    """This machine's devices, which are equal, as measured by programs.

    `device` has the FLOP/s of large matmuls by dtype, the bytes/s of a large sum, and the time of the smallest kernel;
    CPU devices compute with one thread. The memory of a GPU is what is left for tensors once a process uses it. `link`
    is a copy between two devices, `host_link` one between a device and the host (None: as `link`). `cores` is how many
    CPU devices' worth of work all of them do at once, 0 for GPUs, which share nothing: `cores` where these are threads
    of one process, `process_cores` where each is a process (0: not measured). `calls` are those of such processes.
    `reference_s` is what a fixed piece of work takes on one core (`harness.measure.reference_work`), 0 for GPUs.
    """

    device: Device
    link: Link
    host_link: Link | None = None
    cores: float = 0.0
    process_cores: float = 0.0
    calls: tuple[CallTimes, ...] = ()
    reference_s: float = 0.0

    @property
    def knows_processes(self) -> bool:
        """Whether what an engine of several processes uses is measured, too."""
        return not self.cores or self.process_cores > 0

    def __post_init__(self) -> None:
        numbers = {
            **self.device.peak_flops,
            "memory_bandwidth": self.device.memory_bandwidth,
            "kernel_s": self.device.kernel_s,
            "cores": self.cores,
            "process_cores": self.process_cores,
            "reference_s": self.reference_s,
        }
        for name, value in numbers.items():
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value}, must be a finite number of at least 0")


def stored(wanted: str = "auto", remeasure: bool = False, tf32: bool = False) -> Machine | None:
    """Returns the cached measurement of the devices of kind `wanted`; None if there is none that can be read.

    With `remeasure` only one that was made since this process began. `tf32`: the peak of float32 on GPUs is that of
    `precision.tf32=true`.
    """
    found = devices.detect(wanted)
    place = path(found, tf32)
    if not profile_cache.exists(place, remeasure):
        return None
    machine = profile_cache.read(Machine, place)
    return machine if machine and machine.device.name == found.name and machine.device.peak_flops else None


def reference_s(kind: str) -> float:
    """Returns what known work takes on this machine when it is quiet, by the cached measurement of the devices of this
    kind; 0 where nobody knows."""
    machine = stored(kind)
    return machine.reference_s if machine else 0.0


def store(machine: Machine, tf32: bool = False) -> None:
    """Caches a measurement."""
    found = devices.detect()
    place = path(found if found.name == machine.device.name else devices.detect("cpu"), tf32)
    profile_cache.keep(place, machine, "the measurement of this machine is not kept")


def path(found: DetectedDevices, tf32: bool = False) -> Path:
    """Returns the path of the measurement for these devices, the installed torch and the cores of this process.

    Of GPUs their number counts, since one alone has no link to another one, their driver, and their memory: a part of
    a card has the name of the whole.
    """
    sources = (Path(__file__).parents[1] / name for name in MEASURING)
    key: dict[str, object] = {
        "device": found.name,
        "torch": importlib.metadata.version("torch"),
        "cores": devices.cores(),
        "sources": [hashlib.sha256(source.read_bytes()).hexdigest() for source in sources],
    }
    if found.kind == "cuda":
        key |= {"gpus": found.count, "memory_bytes": found.memory_bytes, "driver": found.driver, "tf32": tf32}
    return profile_cache.keyed(folder(), found.name, key)


def folder() -> Path:
    """Returns the folder of measurements of this machine."""
    return profile_cache.folder().parent / "machines"
