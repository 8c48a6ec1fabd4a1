"""Who starts the ranks of a run: torchrun, the parent by ssh, srun, or the worker, by fork. Free of torch."""

from __future__ import annotations

from omegaconf import DictConfig

from harness.core.cluster import Cluster
from harness.core.plan import Mesh
from harness.core.problem import Problem
from harness.host.slurm_job import Allocation
from harness.interfaces import Capabilities
from harness.launch import network, slurm_step
from harness.launch.hosts import step as hosts_step
from harness.launch.joined import step as joined_step
from harness.launch.rank_step import RankStep


def nodes(config: DictConfig) -> Allocation | None:
    """The nodes of the ranks: torchrun's, launch.hosts, or those of the Slurm job; None where they are forked."""
    return joined_step.group(config) or hosts_step.group(config) or slurm_step.job(config)


def step(config: DictConfig, mesh: Mesh, cluster: Cluster) -> RankStep | None:
    """Return how the ranks of a plan are started; None if the worker forks them. Raises `CannotRun` where there are
    others than planned."""
    if joined_step.group(config):
        return joined_step.step(mesh)
    if hosts_step.group(config):
        return hosts_step.step(config, mesh)
    return slurm_step.step(config, mesh, cluster)


def problems(config: DictConfig, capabilities: Capabilities) -> list[Problem]:
    """Return the problems of starting the ranks as the configuration, or this process's start, asks for."""
    if config.launch.hosts:
        return hosts_step.problems(config, capabilities)
    trains = config.mode == "run" and config.cluster.name == "local" and capabilities.multi_process
    if joined_step.group(config):
        found = joined_step.problems(config, capabilities)
    else:
        trains = trains and not slurm_step.job(config)  # there each rank looks
        found = slurm_step.problems(config, capabilities)
    here = network.problem(config.launch.interface) if trains else None
    return [*found, *([here] if here else ())]
