"""Detects the devices of this machine without importing torch, or those of a node of an expected job (`slurm_job`)."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from harness.host import slurm_job

Kind = Literal["cpu", "cuda"]
CUDA_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""Variable with which CUDA numbers GPUs as NVML does, by their place; else the fastest is first."""
GROUPS, OWN_GROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


@dataclass(frozen=True)
class DetectedDevices:
    """`count` equal devices of one kind; `memory_bytes` is what each of them has (on CPUs: all of them together).

    `driver` is the version of the GPUs' driver.
    """

    kind: Kind
    name: str
    count: int
    memory_bytes: int
    driver: str = ""


def detect(wanted: str = "auto") -> DetectedDevices:
    """Returns the devices of kind `wanted` ("auto", "cpu" or "cuda"); auto takes GPUs where torch can use them.

    "cuda" on a machine without them gives a count of 0.
    """
    if wanted != "cpu":
        gpus = _gpus() if torch_has_cuda() else []
        if gpus:
            return DetectedDevices(
                "cuda", gpus[0].name, len(gpus), min(gpu.total_bytes for gpu in gpus), gpus[0].driver
            )
        if wanted == "cuda":
            return DetectedDevices("cuda", "GPU", 0, 0)
    return DetectedDevices("cpu", cpu_model(), cores(), available_memory_bytes())


def torch_names(kind: Kind, count: int, per_node: int | None = None) -> tuple[str, ...]:
    """Returns the torch device of each of the devices 0..count-1, `per_node` on a node. All CPU devices are "cpu"."""
    return tuple("cpu" if kind == "cpu" else f"cuda:{index % (per_node or count)}" for index in range(count))


def cores() -> int:
    """Returns the number of CPU cores that this process may use."""
    return len(affinity())


def affinity() -> tuple[int, ...]:
    """Returns the CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def cpu_model() -> str:
    """Returns the processor's name."""
    with suppress(OSError):
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if match:
            return match[1].strip()
    return platform.processor() or platform.machine() or "CPU"


def available_memory_bytes() -> int:
    """Returns the bytes available without swapping: MemAvailable, or what the control group leaves if that is less."""
    with suppress(OSError):
        match = re.search(r"^MemAvailable:\s*(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
        if match:
            return min(int(match[1]) * 1024, _control_group_bytes())
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@dataclass(frozen=True)
class ControlGroup:
    """A control group with a limit of memory, and what its files are called in its version."""

    folder: Path
    version: Literal[1, 2]

    def limit_bytes(self) -> int | None:
        """Returns the bytes that its processes may use; None: no limit, or none that can be read. Version 1 says that
        there is no limit by a number that no machine has."""
        return self._number("memory.max" if self.version == 2 else "memory.limit_in_bytes")

    def used_bytes(self) -> int | None:
        """Returns the bytes that its processes use."""
        return self._number("memory.current" if self.version == 2 else "memory.usage_in_bytes")

    def oom_kills(self) -> int | None:
        """Returns how many of its processes the kernel's OOM killer has ended."""
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        with suppress(OSError):
            if match := re.search(r"^oom_kill (\d+)$", (self.folder / name).read_text(), re.MULTILINE):
                return int(match[1])
        return None

    def _number(self, name: str) -> int | None:
        with suppress(OSError, ValueError):
            return int((self.folder / name).read_text())
        return None


def control_groups() -> list[ControlGroup]:
    """Returns this process's control groups and their ancestors: a container, a batch job.

    A machine has version 2, version 1, or both; then memory belongs to version 1. In a container the path may be the
    host's, of which the mounted folder is the end.
    """
    with suppress(OSError):
        text = OWN_GROUP.read_text()
        if match := re.search(r"^\d+:(?:[^:]*,)?memory(?:,[^:]*)?:/(.*)$", text, re.MULTILINE):
            return [ControlGroup(folder, 1) for folder in _with_ancestors(GROUPS / "memory", match[1])]
        if match := re.search(r"^0::/(.*)$", text, re.MULTILINE):
            return [ControlGroup(folder, 2) for folder in _with_ancestors(GROUPS, match[1])]
    return []


def _with_ancestors(mounted: Path, group: str) -> list[Path]:
    folder = mounted / group
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(mounted))]


def _control_group_bytes() -> int:
    """Returns the bytes that the control groups still allow; without a limit more than any machine has."""
    left = [1 << 62]
    for group in control_groups():
        limit, used = group.limit_bytes(), group.used_bytes()
        if limit is not None and used is not None:
            left.append(max(0, limit - used))
    return min(left)


def torch_has_cuda() -> bool:
    """Returns whether the installed torch is a build for CUDA, from its version file."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    with suppress(OSError):
        text = (Path(spec.origin).parent / "version.py").read_text()
        return re.search(r"^cuda\b[^=\n]*=\s*['\"]", text, re.MULTILINE) is not None
    return False


@dataclass(frozen=True)
class _Gpu:
    name: str
    total_bytes: int
    used_bytes: int = 0
    driver: str = ""


def gpu_used_bytes() -> int:
    """Returns the bytes of the first GPU that all processes use together, without starting CUDA in this one."""
    return next((gpu.used_bytes for gpu in _gpus()), 0)


def _gpus() -> list[_Gpu]:
    """Returns each GPU that CUDA_VISIBLE_DEVICES leaves visible, in torch's order (`CUDA_ORDER`).

    Only the number of GPUs is known for an expected job.
    """
    if job := slurm_job.expected():
        return [_Gpu("GPU", 0)] * (job.gpus or 0)
    with suppress(Exception), _nvml() as nvml:
        driver = str(nvml.nvmlSystemGetDriverVersion())
        found = []
        for handle in _visible(nvml, os.environ.get("CUDA_VISIBLE_DEVICES")):
            total, used = _memory(nvml, handle)
            found.append(_Gpu(str(nvml.nvmlDeviceGetName(handle)), total, used, driver))
        return found
    return []


def _memory(nvml: Any, handle: Any) -> tuple[int, int]:
    """Returns the bytes of a GPU that processes can have, and those that they use. What the driver reserves is in
    neither; version 1 of the call counts it as used, and a driver before 510 has no other."""
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2)
        return int(memory.total - memory.reserved), int(memory.used)
    except nvml.NVMLError:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        return int(memory.total), int(memory.used)


@contextmanager
def _nvml() -> Iterator[Any]:
    import pynvml

    pynvml.nvmlInit()
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _visible(nvml: Any, variable: str | None) -> list[Any]:
    """Returns the handles of what CUDA sees, in its order.

    CUDA_VISIBLE_DEVICES has indices, or UUIDs or the beginning of one; as in CUDA, the first invalid entry ends the
    list. A GPU that is divided (MIG) is as many as it has instances, of which CUDA sees the first one alone unless
    others are named.
    """
    cards = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    parts = {index: found for index, card in enumerate(cards) if (found := _instances(nvml, card))}
    if variable is None:
        whole = [card for index, card in enumerate(cards) if index not in parts]
        return [found[0] for found in parts.values()][:1] if parts else whole
    handles = []
    for entry in filter(None, (part.strip() for part in variable.split(","))):
        if entry.isdigit():
            index = int(entry)
            named = parts.get(index, cards[index : index + 1])[:1]
        else:
            every = [*cards, *(one for found in parts.values() for one in found)]
            named = [one for one in every if str(nvml.nvmlDeviceGetUUID(one)).startswith(entry)]
        if len(named) != 1:
            break
        handles += named
    return handles


def _instances(nvml: Any, card: Any) -> list[Any]:
    """Returns the instances into which a card is divided (MIG); none of one that is whole, or cannot be divided."""
    found: list[Any] = []
    with suppress(nvml.NVMLError):
        if nvml.nvmlDeviceGetMigMode(card)[0]:
            for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(card)):
                with suppress(nvml.NVMLError):
                    found.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(card, index))
    return found
