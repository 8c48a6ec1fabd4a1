"""What says to this process that it is one rank of several: torchrun's variables, or Slurm's in a step. No torch here.

    RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT    torchrun, or another launcher that sets them
    SLURM_PROCID SLURM_STEP_NUM_TASKS SLURM_LOCALID                       srun

The first ones count where WORLD_SIZE is above 1: torchrun may itself be a task of srun.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from harness.core.problem import Problem
from harness.host.slurm_job import Allocation

WORLD, EACH = "WORLD_SIZE", "LOCAL_WORLD_SIZE"
NAMES = (WORLD, "RANK", "LOCAL_RANK", EACH, "MASTER_ADDR", "MASTER_PORT")
SRUN_ADDRESS = "SLURM_LAUNCH_NODE_IPADDR"
"""The address of the node where srun runs, as the other nodes see it."""


@dataclass(frozen=True)
class Place:
    """A rank among `count`, number `local` of its node, in the `step`-th start of all; rank 0 is, or sees, `address`.

    `count_name` is the variable that says `count`.
    """

    rank: int
    local: int
    count: int
    count_name: str
    step: str
    address: str


def several(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun, or another launcher with its variables, has started several ranks, and this is one."""
    world = environment.get(WORLD, "")
    return world.isdigit() and int(world) > 1


def place(environment: Mapping[str, str] = os.environ) -> Place:
    """Returns the place of this process, which is one of several ranks."""
    if several(environment):
        rank, local, count = (int(environment[name]) for name in ("RANK", "LOCAL_RANK", WORLD))
        return Place(rank, local, count, WORLD, "0", environment["MASTER_ADDR"])
    rank, local, count = (int(environment[f"SLURM_{name}"]) for name in ("PROCID", "LOCALID", "STEP_NUM_TASKS"))
    step, address = environment["SLURM_STEP_ID"], environment.get(SRUN_ADDRESS, "")
    return Place(rank, local, count, "SLURM_STEP_NUM_TASKS", step, address)


def group(environment: Mapping[str, str] = os.environ) -> Allocation | None:
    """Returns the nodes of the ranks of torchrun, with as many on each as here; None where there is one rank."""
    if not several(environment) or problems(environment):
        return None
    count, each = int(environment[WORLD]), int(environment[EACH])
    return Allocation("", (each,) * (count // each), started=f"{WORLD}={count}, {EACH}={each}")


def problems(environment: Mapping[str, str] = os.environ) -> list[Problem]:
    """Returns what is wrong with the variables: those that are missing, no numbers, or of unequal nodes."""
    count = environment.get(WORLD)
    if missing := [name for name in NAMES if not environment.get(name)]:
        message = f"says that this is one of several ranks, but {', '.join(missing)} is not set"
        hint = "start run.py by torchrun, or without a launcher: python run.py ..."
        return [Problem(WORLD, count, message, hint=hint)]
    numbers = [name for name in NAMES if name != "MASTER_ADDR"]
    if wrong := [name for name in numbers if not environment[name].isdigit()]:
        return [Problem(name, environment[name], "is no number", hint="start run.py by torchrun") for name in wrong]
    world, rank, local, each = (int(environment[name]) for name in (WORLD, "RANK", "LOCAL_RANK", EACH))
    if each < 1 or world % each or rank % each != local or rank >= world:
        message = (
            f"ranks in all, of which {each} are on this node ({EACH}), and this is rank {rank}, number {local} here"
        )
        hint = "start as many ranks on each node: torchrun --nnodes=N --nproc-per-node=P on each of them"
        return [Problem(WORLD, world, f"{message}: nodes have unequal numbers of ranks", hint=hint)]
    return []
