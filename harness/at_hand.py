"""What cluster=local has: the devices of this machine, or those of the nodes of a Slurm job. Every number that is
refused is told with the variable that it is from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness import allocation, devices
from harness.allocation import Allocation
from harness.devices import Found
from harness.problem import Problem

if TYPE_CHECKING:
    from harness.clusters import ClusterConfig


def count(found: Found, job: Allocation | None) -> int:
    """Devices of each node where the user does not say: GPUs, tasks of a job, or CPUs that this process has.

    In a job they are its tasks for an engine of one process, too (`job` is None): `slurm.submit` judges by these.
    """
    here = None if found.kind == "cuda" else job or allocation.found()
    return here.tasks[0] if here else found.count


def origin(config: ClusterConfig) -> str:
    """The variable that says how many CPU devices a node has, " (SLURM_TASKS_PER_NODE=2)"; "" where none does."""
    here = allocation.found()
    if not here or config.name != "local" or config.devices or devices.detect(config.device).kind == "cuda":
        return ""
    return f" ({_variable(here)})"


def problems(config: ClusterConfig, found: Found, job: Allocation | None) -> list[Problem]:
    """What is asked of the devices that were `found` here, or of the nodes of `job`, and is not there."""
    wrong = _nodes(config, job)
    if found.kind == "cuda":
        wrong += _gpus(config, found)
    elif job:
        wrong += _tasks(config, job)
    return wrong


def _nodes(config: ClusterConfig, job: Allocation | None) -> list[Problem]:
    there, asked = job.nodes if job else 1, config.nodes or 1
    if asked <= there:
        return []
    what, mend = "cluster=local is this machine, 1 node", f"cluster.nodes={there}"
    if job:
        what, mend = f"the job has {there} ({allocation.NODES})", f"sbatch --nodes={asked}, or {mend}"
    elif here := allocation.found():
        what += f"; the job's {here.nodes} ({allocation.NODES}) are for ranks that srun starts"
    return [Problem(f"cluster.nodes {asked}", what, mend)]


def _tasks(config: ClusterConfig, job: Allocation) -> list[Problem]:
    """CPU devices of the nodes of a job are its tasks; without a job they are threads, and too many are only slow."""
    tasks = job.tasks[: config.nodes]
    fewest, most = min(tasks), max(tasks)
    if config.devices <= fewest if config.devices else fewest == most:
        return []
    each = str(fewest) if fewest == most else f"{fewest} to {most}"
    what = f"a CPU device is a task of the job, a node has {each} ({_variable(job)})"
    shown = "null" if config.devices is None else config.devices
    mend = f"sbatch --ntasks-per-node={config.devices or most}, or cluster.devices={fewest}"
    return [Problem(f"cluster.devices {shown}", what, mend)]


def _gpus(config: ClusterConfig, found: Found) -> list[Problem]:
    wanted = config.devices or 1
    if found.count >= wanted:
        return []
    here, given = f"{found.count} found", allocation.found()
    if not (found.count or devices.torch_has_cuda()):
        here += "; the torch that is installed is not built for CUDA"
    elif given and given.gpus is not None:
        here += f"; the job has {given.gpus} on this node ({allocation.GPUS})"
    elif given:
        here += f"; the job has none ({allocation.GPUS} is not set)"
    key = f"cluster.devices {config.devices}" if config.devices else f"cluster.device {config.device}"
    mend = f"cluster.devices={found.count}" if found.count else "cluster.device=cpu"
    return [Problem(key, f"needs {wanted} GPUs that torch can use, {here}", mend)]


def _variable(job: Allocation) -> str:
    return f"{allocation.TASKS}={','.join(map(str, job.tasks))}"
