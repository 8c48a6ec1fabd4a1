"""The devices of cluster=local: those of this machine, or of the nodes of a Slurm job.

A problem with a number names the environment variable that is its source.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.core.problem import Fix, Problem
from harness.host import devices, launched, slurm_job
from harness.host.devices import DetectedDevices
from harness.host.slurm_job import Allocation

if TYPE_CHECKING:
    from harness.config.cluster_config import ClusterConfig


def count(detected: DetectedDevices, job: Allocation | None) -> int:
    """Returns the devices of each node unless the user specifies them: GPUs, tasks of a job, or CPUs of this process.

    In a job they are its tasks for an engine of one process, too (`job` is None): `slurm.submit` checks these.
    """
    group = job if job and job.started else None  # each of its ranks has a device
    current_job = group or (None if detected.kind == "cuda" else job or slurm_job.current())
    return current_job.tasks[0] if current_job else detected.count


def origin(config: ClusterConfig) -> str:
    """Returns the source of the number of CPU devices of a node, " (SLURM_TASKS_PER_NODE=2)"; "" if no variable sets
    it."""
    job = launched.group() or slurm_job.current()
    if not job or config.name != "local" or config.devices or devices.detect(config.device).kind == "cuda":
        return ""
    return f" ({_variable(job)})"


def problems(config: ClusterConfig, detected: DetectedDevices, job: Allocation | None) -> list[Problem]:
    """Returns problems where the configuration needs more than the detected devices, or the nodes of `job`, have."""
    missing = _nodes(config, job)
    if detected.kind == "cuda":
        missing += _gpus(config, detected)
    elif job:
        missing += _tasks(config, job)
    return missing


def _nodes(config: ClusterConfig, job: Allocation | None) -> list[Problem]:
    available, requested = job.nodes if job else 1, config.nodes or 1
    if requested <= available:
        return []
    message, hint = "cluster=local is this machine, 1 node", ""
    if job and job.started:
        message = f"the ranks are on {available} ({job.started})"
    elif job:
        message, hint = f"the job has {available} ({slurm_job.NODES})", f"sbatch --nodes={requested}"
    elif current_job := slurm_job.current():
        message += f"; the job's {current_job.nodes} ({slurm_job.NODES}) are for ranks that srun starts"
    return [Problem("cluster.nodes", requested, message, ({"cluster.nodes": available},), hint)]


def _tasks(config: ClusterConfig, job: Allocation) -> list[Problem]:
    """Checks CPU devices of a job's nodes, which are its tasks; without a job they are threads, and many are only
    slow."""
    tasks = job.tasks[: config.nodes]
    fewest, most = min(tasks), max(tasks)
    if config.devices <= fewest if config.devices else fewest == most:
        return []
    each = str(fewest) if fewest == most else f"{fewest} to {most}"
    message = f"a CPU device is a {'rank' if job.started else 'task of the job'}, a node has {each} ({_variable(job)})"
    hint = "" if job.started else f"sbatch --ntasks-per-node={config.devices or most}"
    return [Problem("cluster.devices", config.devices, message, ({"cluster.devices": fewest},), hint)]


def _gpus(config: ClusterConfig, detected: DetectedDevices) -> list[Problem]:
    needed = config.devices or 1
    if detected.count >= needed:
        return []
    available, job = f"{detected.count} found", slurm_job.current()
    if not (detected.count or devices.torch_has_cuda()):
        available += "; the torch that is installed is not built for CUDA"
    elif job and job.gpus is not None:
        available += f"; the job has {job.gpus} on this node ({slurm_job.GPUS})"
    elif job:
        available += f"; the job has none ({slurm_job.GPUS} is not set)"
    key, value = ("cluster.devices", config.devices) if config.devices else ("cluster.device", config.device)
    fix: Fix = {"cluster.devices": detected.count} if detected.count else {"cluster.device": "cpu"}
    return [Problem(key, value, f"needs {needed} GPUs that torch can use, {available}", (fix,))]


def _variable(job: Allocation) -> str:
    return job.started or f"{slurm_job.TASKS}={','.join(map(str, job.tasks))}"
