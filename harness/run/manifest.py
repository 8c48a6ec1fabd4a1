"""The manifest of a run: code, libraries, machine, seeds and the exact command."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from harness.host import devices, malloc

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "numpy", "hydra-core", "omegaconf", "wandb", "deepspeed", "mpi4py")
# Variables that change results or timings. A list of names, not a pattern: a key or token can't slip in.
VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "KMP_AFFINITY",
    "KMP_BLOCKTIME",
    "GOMP_CPU_AFFINITY",
    "MALLOC_ARENA_MAX",
    "MALLOC_MMAP_MAX_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "LD_PRELOAD",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "CUBLAS_WORKSPACE_CONFIG",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "GLOO_SOCKET_IFNAME",
    "NCCL_ALGO",
    "NCCL_BUFFSIZE",
    "NCCL_CROSS_NIC",
    "NCCL_CUMEM_ENABLE",
    "NCCL_DEBUG",
    "NCCL_IB_DISABLE",
    "NCCL_IB_HCA",
    "NCCL_LAUNCH_MODE",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_NCHANNELS",
    "NCCL_NET",
    "NCCL_NET_GDR_LEVEL",
    "NCCL_NTHREADS",
    "NCCL_NVLS_ENABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL",
    "NCCL_PROTO",
    "NCCL_SHM_DISABLE",
    "NCCL_SOCKET_IFNAME",
    "NCCL_TOPO_FILE",
    "TORCH_FR_BUFFER_SIZE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_AVOID_RECORD_STREAMS",
    "TORCH_NCCL_BLOCKING_WAIT",
    "TORCH_NCCL_DESYNC_DEBUG",
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "TORCH_NCCL_ENABLE_MONITORING",
    "TORCH_NCCL_ENABLE_TIMING",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
    "TORCH_NCCL_HIGH_PRIORITY",
    "TORCH_NCCL_NAN_CHECK",
    "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "PYTHONHASHSEED",
)
NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
"""The packages that bring NCCL with a torch for CUDA."""
NEAREST = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""What two GPUs have in common, by NVML's number, as `nvidia-smi topo -m` writes it: a PCIe switch, several of them, a
host bridge, a NUMA node, the machine."""
_GIT_LIMIT_S = 5.0


def manifest(config_overrides: list[str], devices: list[str], seeds: dict[str, int], threads: int) -> dict[str, Any]:
    """Return the values that are needed to repeat a run; JSON values only, null for unknown ones.

    `config_overrides` are the user's own, `threads` the intra-op threads of each device. Nothing secret is read:
    variables are taken by name from a fixed list.
    """
    return {
        "start_time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "command": [sys.argv[0].removeprefix(f"{ROOT}/"), *sys.argv[1:]],
        "overrides": list(config_overrides),
        "git": git(ROOT),
        "versions": versions(),
        "machine": machine(),
        "gpus": gpus(),
        "devices": list(devices),
        "threads": threads,
        "seeds": dict(seeds),
        "slurm": slurm(),
        "environment": environment(),
    }


def environment() -> dict[str, str]:
    """Return the `VARIABLES` of this process and of its malloc settings, for the ranks."""
    given = os.environ | malloc.environment()
    return {name: given[name] for name in VARIABLES if name in given}


def git(root: Path) -> dict[str, Any] | None:
    """Commit and dirtiness of `root`, null where it is not itself a checkout; `sha` is null before the first commit."""
    top = _git(root, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != root.resolve():
        return None
    status = _git(root, "status", "--porcelain", "--untracked-files=normal")
    return {
        "sha": _git(root, "rev-parse", "--verify", "--quiet", "HEAD"),
        "branch": _git(root, "symbolic-ref", "--short", "--quiet", "HEAD"),
        "dirty": None if status is None else bool(status),
    }


def _git(root: Path, *arguments: str) -> str | None:
    """The output of one git command; null where git fails, is not there or takes too long."""
    command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
    # a hook or an outer command that exports GIT_DIR must not point us to another repository
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            check=False,
            env=environment,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=_GIT_LIMIT_S,
        )
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def versions() -> dict[str, str | None]:
    """Python and the packages that matter, from their metadata: nothing is imported. `nccl` is null for a torch without
    CUDA, or one that was built with an NCCL of the machine."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    nccl = next(filter(None, map(_version, NCCL)), None)
    return found | {package: _version(package) for package in PACKAGES} | {"nccl": nccl}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def machine() -> dict[str, Any]:
    """Host name, platform, CPU model, cores (all, and those this process may use) and memory in bytes."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    return {
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cpu": devices.cpu_model(),
        "cores": os.cpu_count(),
        "cores_allowed": allowed,
        "memory_bytes": _memory_bytes(),
    }


def _memory_bytes() -> int | None:
    with contextlib.suppress(ValueError, OSError, AttributeError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def gpus() -> list[dict[str, Any]]:
    """Name, memory, driver and links of each NVIDIA GPU of the machine; empty without a driver or nvidia-ml-py.

    `links` has the way to each GPU, as in a row of `nvidia-smi topo -m`: NV is NVLink, X the GPU itself (`NEAREST`).
    """
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        return list(_gpus(pynvml))
    except pynvml.NVMLError:
        return []
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _gpus(pynvml: Any) -> Iterator[dict[str, Any]]:
    driver = pynvml.nvmlSystemGetDriverVersion()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    for index, handle in enumerate(handles):
        yield {
            "index": index,
            "name": pynvml.nvmlDeviceGetName(handle),
            "memory_bytes": int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
            "driver": driver,
            "links": ["X" if other == index else _link(pynvml, handle, to) for other, to in enumerate(handles)],
        }


def _link(pynvml: Any, one: Any, other: Any) -> str | None:
    """The way from GPU to GPU; null where the driver does not say."""
    try:
        if pynvml.nvmlDeviceGetP2PStatus(one, other, pynvml.NVML_P2P_CAPS_INDEX_NVLINK) == pynvml.NVML_P2P_STATUS_OK:
            return "NV"
        return NEAREST.get(pynvml.nvmlDeviceGetTopologyCommonAncestor(one, other))
    except pynvml.NVMLError:
        return None


def slurm() -> dict[str, str] | None:
    """Job, array and step ids inside a Slurm job, else null."""
    names = {
        "job_id": "SLURM_JOB_ID",
        "array_job_id": "SLURM_ARRAY_JOB_ID",
        "array_task_id": "SLURM_ARRAY_TASK_ID",
        "restart_count": "SLURM_RESTART_COUNT",
        "partition": "SLURM_JOB_PARTITION",
        "nodes": "SLURM_JOB_NODELIST",
    }
    found = {key: os.environ[name] for key, name in names.items() if name in os.environ}
    return found or None
