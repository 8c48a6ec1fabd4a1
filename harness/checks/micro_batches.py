"""`batch.micro_batch_size`: the number of micro-batches follows from their size, the batch and the replicas.

    batch.size=32 batch.micro_batch_size=4     engine=gpipe    8 micro-batches
                                               engine=ddp      4 in each of 2 replicas

`batch.micro_batches` is the truth: nothing else reads the size, but for mode=tune, which keeps it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from omegaconf import DictConfig

from harness.checks import mesh
from harness.config import cluster_config, registry
from harness.core import divisors
from harness.core.problem import LEAVE_OUT, CannotRun, Fix, Problem
from harness.launch import rank_starter

SIZE, COUNT = "batch.micro_batch_size", "batch.micro_batches"


def follow(config: DictConfig, count_given: bool) -> list[Problem]:
    """Set `batch.micro_batches` from `batch.micro_batch_size`, if that is given; what is wrong with it."""
    size, batch = config.batch.micro_batch_size, config.batch.size
    if size is None:
        return []
    if count_given:
        message = f"is given, and so is {COUNT}={config.batch.micro_batches}"
        return [Problem(SIZE, size, message, ({COUNT: LEAVE_OUT}, {SIZE: LEAVE_OUT}))]
    if config.profile:
        message = "is given, but a profile has micro-batches of its own size"
        return [Problem(SIZE, size, message, ({SIZE: LEAVE_OUT},))]
    if min(size, batch) < 1:
        return []  # `harness.checks.values` reports these
    count = replicas(config)
    each, rest = divmod(batch, count)
    if rest:
        nearest = max(1, round(batch / (count * size))) * count * size
        message = f"and {count} replicas do not divide batch.size {batch}"
        return [Problem(SIZE, size, message, ({"batch.size": nearest},))]
    if each % size:
        whole = f"batch.size {batch}" if each == batch else f"the {each} samples of each replica"
        fixes = tuple({SIZE: number} for number in divisors.nearest_divisors(each, size))
        return [Problem(SIZE, size, f"does not divide {whole}", fixes)]
    config.batch.micro_batches = each // size
    return []


def replicas(config: DictConfig) -> int:
    """The data parallel size that is given, or follows from the devices; 1 where the configuration has none."""
    with suppress(CannotRun, ValueError, ArithmeticError):
        cluster = cluster_config.build(cluster_config.from_group(config.cluster), job=rank_starter.nodes(config))
        can = registry.build("engine", config.engine).capabilities
        return mesh.resolve(config, can, cluster.devices, layers=cluster.devices).data
    return 1


def in_given_keys(problems: Sequence[Problem], config: DictConfig) -> list[Problem]:
    """The problems, with fixes that set the number of micro-batches in the place of their size, if that is given."""
    if config.batch.micro_batch_size is None:
        return list(problems)

    def instead(fix: Fix) -> Fix:
        sets = fix.get(COUNT, LEAVE_OUT) != LEAVE_OUT and SIZE not in fix
        return {**fix, SIZE: LEAVE_OUT} if sets else fix

    return [replace(problem, fixes=tuple(map(instead, problem.fixes))) for problem in problems]
