import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.host import devices
from harness.launch import supervisor

ROOT = Path(__file__).parents[3]


def printed(code: str) -> str:
    """What a new process prints."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_cores_are_those_the_process_may_use():
    assert devices.cores() == len(os.sched_getaffinity(0))
    one = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"
    assert printed(f"{one}; from harness.host import devices; print(devices.cores())") == "1"


def test_a_cpu_has_a_name_and_memory():
    found = devices.detect("cpu")
    assert found.kind == "cpu" and found.name and found.count >= 1
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < found.memory_bytes <= total


def test_the_narrowest_of_all_control_groups_limits_the_memory(tmp_path, monkeypatch):
    """A batch job in a container: both have limits, the step of the job has none."""
    monkeypatch.setattr(devices, "GROUPS", tmp_path)
    monkeypatch.setattr(devices, "OWN_GROUP", tmp_path / "cgroup")
    assert devices.control_groups() == [] and devices._control_group_bytes() > 10**18, "none"
    (tmp_path / "cgroup").write_text("0::/job/step\n")
    for folder, limit, used in (("job/step", "max", 10), ("job", "1000", 300), (".", "5000", 4000)):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "memory.max").write_text(f"{limit}\n")
        (tmp_path / folder / "memory.current").write_text(f"{used}\n")
    folders = [group.folder for group in devices.control_groups()]
    assert folders == [tmp_path / "job" / "step", tmp_path / "job", tmp_path]
    assert devices._control_group_bytes() == 700


@pytest.mark.parametrize("controllers", ["memory", "cpu,memory", "memory,hugetlb", "cpu,memory,pids"])
@pytest.mark.parametrize("unified", ["", "0::/elsewhere\n"])
def test_control_groups_of_version_1(tmp_path, monkeypatch, controllers, unified):
    """Also where version 2 is there for other things. In a container the path may be the host's."""
    monkeypatch.setattr(devices, "GROUPS", tmp_path)
    monkeypatch.setattr(devices, "OWN_GROUP", tmp_path / "cgroup")
    (tmp_path / "cgroup").write_text(f"5:cpuset,memory_other:/no\n4:{controllers}:/job/step\n{unified}")
    none = 9223372036854771712
    for folder, limit, used in (("memory/job", 1000, 300), ("memory", none, 4000)):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (tmp_path / folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    (tmp_path / "memory" / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    found = devices.control_groups()
    assert [group.folder for group in found] == [
        tmp_path / "memory/job/step",
        tmp_path / "memory/job",
        tmp_path / "memory",
    ]
    assert [group.limit_bytes() for group in found] == [None, 1000, none]
    assert [group.oom_kills() for group in found] == [None, None, 3]
    assert devices._control_group_bytes() == 700


@pytest.mark.parametrize(
    ("text", "cuda"),
    [
        ("cuda: Optional[str] = None", False),
        ("cuda: Optional[str] = '12.8'", True),
        ('cuda = "13.0"', True),
        ("", False),
    ],
)
def test_a_cuda_build_is_reported_by_its_version_file(monkeypatch, tmp_path, text, cuda):
    (tmp_path / "version.py").write_text(f"from typing import Optional\n__version__ = '2.13.0'\n{text}\n")
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: spec)
    assert devices.torch_has_cuda() is cuda


def test_gpus_are_asked_for_only_if_torch_can_use_them(monkeypatch):
    monkeypatch.setattr(devices, "_gpus", lambda: [devices._Gpu("a GPU", 80), devices._Gpu("a GPU", 70)])
    monkeypatch.setattr(devices, "torch_has_cuda", lambda: True)
    assert devices.detect() == devices.detect("cuda") == devices.DetectedDevices("cuda", "a GPU", 2, 70)
    assert devices.detect("cpu").kind == "cpu"
    monkeypatch.setattr(devices, "torch_has_cuda", lambda: False)
    assert devices.detect().kind == "cpu"
    assert devices.detect("cuda") == devices.DetectedDevices("cuda", "GPU", 0, 0)


class Nvml:
    """Three GPUs, as nvidia-ml-py would name them; each of `divided` has two instances of 10 bytes, else 80."""

    NVMLError = type("NVMLError", (Exception,), {})
    old = False

    def __init__(self, *divided: int) -> None:
        self.divided = [f"GPU-{index}{index}" for index in divided]

    def nvmlSystemGetDriverVersion(self) -> str:
        return "570.1"

    def nvmlDeviceGetCount(self) -> int:
        return 3

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        if index >= 3:
            raise self.NVMLError
        return f"GPU-{index}{index}"

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return handle

    def nvmlDeviceGetName(self, handle: str) -> str:
        return "a GPU"

    nvmlMemory_v2 = 0x02000028

    def nvmlDeviceGetMemoryInfo(self, handle: str, version: int | None = None) -> SimpleNamespace:
        """Version 1 has what the driver reserves among what is used."""
        total = 10 if handle.startswith("MIG") else 80
        if version is None:
            return SimpleNamespace(total=total, used=3)
        if self.old:
            raise self.NVMLError
        return SimpleNamespace(total=total, reserved=2, used=1)

    def nvmlDeviceGetMigMode(self, handle: str) -> tuple[int, int]:
        if handle == "GPU-22":
            raise self.NVMLError  # an old card
        return (handle in self.divided, 0)

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: str) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: str, index: int) -> str:
        if index >= 2:
            raise self.NVMLError
        return f"MIG-{handle}-{index}"


@pytest.mark.parametrize(
    ("variable", "visible"),
    [
        (None, [0, 1, 2]), ("", []), ("2,0", [2, 0]), ("GPU-11", [1]), ("0,-1,2", [0]), ("1,7,2", [1]),
        ("GPU-1,GPU-0", [1, 0]), ("GPU-,0", []),
    ],
)  # fmt: skip
def test_cuda_visible_devices_is_honoured(variable, visible):
    """A UUID may be cut off where it is still that of one GPU."""
    assert devices._visible(Nvml(), variable) == [f"GPU-{index}{index}" for index in visible]


@pytest.mark.parametrize(
    ("variable", "visible"),
    [
        (None, ["MIG-GPU-00-0"]), ("0", ["MIG-GPU-00-0"]), ("MIG-GPU-00-1", ["MIG-GPU-00-1"]), ("1", ["GPU-11"]),
        ("MIG-GPU-00-1,MIG-GPU-00-0", ["MIG-GPU-00-1", "MIG-GPU-00-0"]),
    ],
)  # fmt: skip
def test_of_a_divided_gpu_a_part_is_seen(variable, visible):
    assert devices._visible(Nvml(0), variable) == visible


def test_a_part_has_its_own_memory(monkeypatch):
    """And GPUs are numbered by their places, as NVML does, not the fastest first."""
    monkeypatch.setattr(devices, "torch_has_cuda", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    for divided, total in (((), 78), ((0,), 8)):
        monkeypatch.setattr(devices, "_nvml", lambda divided=divided: nullcontext(Nvml(*divided)))
        assert devices.detect() == devices.DetectedDevices("cuda", "a GPU", 1, total, "570.1")
    assert supervisor._environment()["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


@pytest.mark.parametrize("old, total, used", [(False, 78, 1), (True, 80, 3)])
def test_what_the_driver_reserves_is_not_memory_that_others_give_back(monkeypatch, old, total, used):
    """A machine's GPU has what is free and what others use; an old driver does not say what it reserves."""
    found = Nvml()
    found.old = old
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(devices, "torch_has_cuda", lambda: True)
    monkeypatch.setattr(devices, "_nvml", lambda: nullcontext(found))
    assert devices.detect().memory_bytes == total
    assert devices.gpu_used_bytes() == used


def test_names_for_torch():
    assert devices.torch_names("cpu", 3) == ("cpu", "cpu", "cpu")
    assert devices.torch_names("cuda", 2) == ("cuda:0", "cuda:1")


def test_torch_is_not_imported():
    build = (
        "import sys; from harness.config import cluster_config as clusters; clusters.build(clusters.ClusterConfig())"
    )
    assert printed(f"{build}; print('torch' in sys.modules)") == "False"
