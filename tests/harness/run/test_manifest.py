from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NoReturn

import pytest

from harness.host import devices, malloc
from harness.run.manifest import ROOT, _git, git, gpus, manifest, slurm


def run_git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "init.defaultBranch=trunk"]
    command = ["git", *identity, "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    run_git(tmp_path, "init")
    (tmp_path / "file").write_text("one")
    return tmp_path


def test_everything_that_a_repetition_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", "engine=gpipe", "batch.size=8"])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = manifest(["engine=gpipe", "batch.size=8"], ["cpu:0", "cpu:1"], {"seed": 3}, threads=1)
    assert found["command"] == ["run.py", "engine=gpipe", "batch.size=8"]
    assert found["overrides"] == ["engine=gpipe", "batch.size=8"]
    assert (found["devices"], found["seeds"], found["threads"]) == (["cpu:0", "cpu:1"], {"seed": 3}, 1)
    assert found["environment"]["OMP_NUM_THREADS"] == "1"
    assert "CUDA_VISIBLE_DEVICES" not in found["environment"]
    assert found["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["versions"]["torch"] == metadata.version("torch")
    assert found["versions"]["hydra-core"] == metadata.version("hydra-core")
    assert found["machine"]["cores"] == os.cpu_count()
    assert found["machine"]["memory_bytes"] > 2**28
    start = datetime.fromisoformat(found["start_time"])
    assert start.utcoffset() == timedelta(0)
    assert abs(datetime.now(UTC) - start) < timedelta(minutes=1)
    assert json.loads(json.dumps(found)) == found


def test_the_environment_is_that_of_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "7")
    found = manifest([], [], {}, 1)
    assert malloc.environment().items() <= found["environment"].items()


def test_the_processor_is_named_in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "cpu_model", lambda: "an abacus")
    assert manifest([], [], {}, 1)["machine"]["cpu"] == "an abacus"


def test_how_nccl_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its version is that of the package that brings it; its variables and torch's for it change times."""
    given = {"NCCL_ALGO": "Ring", "NCCL_P2P_DISABLE": "1", "TORCH_NCCL_BLOCKING_WAIT": "1", "GLOO_SOCKET_IFNAME": "lo"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(metadata, "version", lambda package: {"nvidia-nccl-cu12": "2.27.5"}.get(package) or missing())
    found = manifest([], [], {}, 1)
    assert given.items() <= found["environment"].items()
    assert (found["versions"]["nccl"], found["versions"]["torch"]) == ("2.27.5", None)


def missing() -> NoReturn:
    raise metadata.PackageNotFoundError


def test_no_secret_gets_in(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "SLURM_JWT", "MALLOC_KEY"):
        monkeypatch.setenv(name, "s3cret")
    assert "s3cret" not in json.dumps(manifest([], [], {}, 1))


def test_git_separates_a_clean_tree_from_a_dirty_one(repository: Path) -> None:
    assert git(repository) == {"sha": None, "branch": "trunk", "dirty": True}
    run_git(repository, "add", "file")
    run_git(repository, "commit", "-m", "one")
    sha = run_git(repository, "rev-parse", "HEAD")
    assert git(repository) == {"sha": sha, "branch": "trunk", "dirty": False}
    (repository / "file").write_text("two")
    assert git(repository) == {"sha": sha, "branch": "trunk", "dirty": True}
    run_git(repository, "checkout", "--detach", "--force", "HEAD")
    assert git(repository) == {"sha": sha, "branch": None, "dirty": False}
    (repository / "new").touch()
    assert git(repository) == {"sha": sha, "branch": None, "dirty": True}


def test_git_of_another_project_around_us_is_not_ours(repository: Path) -> None:
    (repository / "inner").mkdir()
    assert git(repository / "inner") is None


def test_git_outside_a_checkout_or_without_git_is_null(
    tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_DIR", str(repository / ".git"))  # as inside a hook: it must not be believed
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.mkdir()
    assert git(outside) is None
    monkeypatch.setenv("PATH", str(outside))
    assert git(repository) is None


def test_git_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = tmp_path / "git"
    slow.write_text("#!/bin/sh\nexec sleep 30\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("harness.run.manifest._GIT_LIMIT_S", 0.2)
    start = time.monotonic()
    assert _git(tmp_path, "status") is None
    assert time.monotonic() - start < 5


def test_slurm_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    assert slurm() is None
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert slurm() == {"job_id": "12", "array_task_id": "3"}


class FakeError(Exception):
    pass


def driver(initialised: bool) -> ModuleType:
    """A stand-in for NVIDIA's library on a machine with four GPUs, or with none. The first two have NVLink, the third
    is on another socket, and the driver does not say how the last one is reached."""
    module = ModuleType("pynvml")

    def status(one: int, other: int) -> int:
        if 3 in (one, other):
            raise FakeError("not supported")
        return 0 if {one, other} == {0, 1} else 1

    def init() -> None:
        if not initialised:
            raise FakeError("driver not loaded")

    for name, value in {
        "NVMLError": FakeError,
        "nvmlInit": init,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: "550.1",
        "nvmlDeviceGetCount": lambda: 4,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda handle: f"GPU {handle}",
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=100 + handle),
        "nvmlDeviceGetP2PStatus": lambda one, other, index: status(one, other),
        "nvmlDeviceGetTopologyCommonAncestor": lambda one, other: 50 if 2 in (one, other) else 30,
        "NVML_P2P_CAPS_INDEX_NVLINK": 2,
        "NVML_P2P_STATUS_OK": 0,
    }.items():
        setattr(module, name, value)
    return module


def test_gpus_by_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", driver(initialised=True))
    assert gpus() == [
        {"index": index, "name": f"GPU {index}", "memory_bytes": 100 + index, "driver": "550.1", "links": links}
        for index, links in enumerate(
            [["X", "NV", "SYS", None], ["NV", "X", "SYS", None], ["SYS", "SYS", "X", None], [None, None, None, "X"]]
        )
    ]
    monkeypatch.setitem(sys.modules, "pynvml", driver(initialised=False))
    assert gpus() == []
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    assert gpus() == []


def test_manifest_imports_none_of_the_packages_whose_versions_it_notes() -> None:
    code = (
        "import sys; from harness.run.manifest import manifest; manifest([], [], {}, 1);"
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'hydra', 'wandb', 'deepspeed')))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
