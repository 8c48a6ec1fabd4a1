"""Ranks that the parent starts over ssh, on the hosts of `launch.hosts`. Free of torch.

    parent --> starter --ssh--> agent on host 1 --> rank 0, rank 1
                       --ssh--> agent on host 2 --> rank 2, rank 3    each: harness.worker RUN_DIR train STEP TOKEN

They meet by RUN_DIR/rendezvous.json (`harness.launch.slurm_ranks`). The first rank that fails ends all.
"""

from __future__ import annotations

import ipaddress
import json
import re
import secrets
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import DictConfig

from harness.core.plan import Mesh
from harness.core.problem import LEAVE_OUT, CannotRun, Fix, Problem
from harness.core.run_files import RENDEZVOUS
from harness.host import devices, launched, slurm_job
from harness.host.slurm_job import Allocation
from harness.interfaces import Capabilities
from harness.launch.rank_names import RankNames

KEY = "launch.hosts"
HOST = re.compile(r"(?P<name>[^\s:,\[\]]+)(?::(?P<ranks>[1-9]\d*))?")


@dataclass(frozen=True)
class HostsStep:
    """The ranks of a run, `each` on each of the `hosts`, which the command `ssh` reaches."""

    mesh: Mesh
    hosts: tuple[str, ...]
    each: int
    ssh: str
    token: str = field(default_factory=lambda: secrets.token_hex(8))

    starter = "what starts the ranks over launch.ssh"
    starts_one = False
    tries = 1
    late_s = 0.0

    @property
    def names(self) -> RankNames:
        return RankNames(self.mesh, several=True)

    def command(self) -> list[str]:
        """The start of the command line: the starter and what it needs to know, before the command of a rank."""
        given = json.dumps({"hosts": self.hosts, "each": self.each, "ssh": shlex.split(self.ssh)})
        return [sys.executable, "-P", "-m", "harness.launch.hosts.starter", given]

    @contextmanager
    def cleaning_up(self, run_dir: Path, start: str = "0") -> Iterator[None]:
        """Within it the ranks run; then rendezvous.json is removed."""
        try:
            yield
        finally:
            (run_dir / RENDEZVOUS).unlink(missing_ok=True)


def group(config: DictConfig) -> Allocation | None:
    """The hosts, with the ranks of each; None where there are none, or no ranks are needed."""
    if not config.launch.hosts or config.mode in ("profile", "calibrate"):
        return None
    with suppress(CannotRun, ValueError, ArithmeticError):  # what is wrong with the devices is reported elsewhere
        counts = [count for _, count in _listed(config)]
        fewest = min(counts, default=0)  # unequal ones are a problem of their own
        return Allocation("", (fewest,) * len(counts), started=f"{KEY}={_text(config)}") if fewest else None
    return None


def step(config: DictConfig, mesh: Mesh) -> HostsStep:
    """The ranks of a plan. Raises `CannotRun` where there are others than the hosts have."""
    listed = _listed(config)
    count, each = sum(ranks for _, ranks in listed), listed[0][1]
    if count != mesh.size:
        whole = mesh.size % each == 0 and mesh.size > each
        few = [f"{name}:{each}" for name, _ in listed[: mesh.size // each]]
        fixes: tuple[Fix, ...] = ({KEY: few},) if whole and count > mesh.size else ()
        message = f"has {count} ranks, the plan is for {mesh.size}: one for each device of the mesh"
        raise CannotRun([Problem(KEY, _text(config), message, fixes, hint=f"hosts with {mesh.size} ranks in all")])
    return HostsStep(mesh, tuple(name for name, _ in listed), each, config.launch.ssh)


def problems(config: DictConfig, capabilities: Capabilities) -> list[Problem]:
    """Return the problems of starting ranks on the hosts, if there are any."""
    if not config.launch.hosts:
        return []
    text, wrong = _text(config), list[Problem]()
    none: Fix = {KEY: []}

    def refuse(message: str, *fixes: Fix, hint: str = "") -> None:
        wrong.append(Problem(KEY, text, message, fixes, hint=hint))

    bad = [one for one in map(str, config.launch.hosts) if not HOST.fullmatch(one)]
    names = [one.partition(":")[0] for one in map(str, config.launch.hosts)]
    if bad:
        refuse(f"{bad[0]!r} is no host", none, hint="[a:2,b:2]: hosts, each with its number of ranks")
    elif len(set(names)) < len(names):
        refuse("has a host twice", {KEY: list(dict.fromkeys(map(str, config.launch.hosts)))})
    elif len(here := [name for name in names if _is_loopback(name)]) > 1:
        refuse(f"has a host twice: {here[0]} and {here[1]} are both the host itself", none)
    elif here and len(names) > 1:
        message = f"has {here[0]}, a name that each host has for itself: others do not reach it so"
        refuse(message, hint="its name, or address, in the network")
    elif len(counts := {count for _, count in _listed(config)}) > 1:
        fewest = [f"{name}:{min(counts)}" for name in names]
        refuse(f"has unequal numbers of ranks, {min(counts)} to {max(counts)}", {KEY: fewest})
    elif len(names) * max(counts) < 2:
        refuse("has one rank", none)
    if launched.several():
        refuse(f"starts ranks, and this is one that torchrun has started ({launched.WORLD})", none)
    if job := slurm_job.current():
        refuse(f"is for hosts without Slurm, srun starts the ranks of the job ({slurm_job.JOB}={job.job})", none)
    if config.launch.ranks != "auto":
        wrong.append(Problem("launch.ranks", config.launch.ranks, f"has no hosts ({KEY})", ({"launch.ranks": "auto"},)))
    if not capabilities.multi_process:
        refuse(f"needs ranks, engine={config.engine.name} is one process", none)
    if capabilities.mpi:
        message = f"needs ranks that mpiexec or srun starts, not ssh ({KEY})"
        wrong.append(Problem("engine.transport", "mpi", message, ({"engine.transport": "torch"},)))
    return [*wrong, *_ssh_problems(config.launch.ssh)]


def _ssh_problems(command: str) -> list[Problem]:
    """A problem if nothing could be started by this command."""
    with suppress(ValueError):  # a quote that nothing closes
        if shlex.split(command):
            return []
    return [Problem("launch.ssh", command, "is no command", ({"launch.ssh": LEAVE_OUT},))]


def _listed(config: DictConfig) -> list[tuple[str, int]]:
    """The hosts and their numbers of ranks: as many as devices where none is given."""
    found = [HOST.fullmatch(str(one)) for one in config.launch.hosts]
    each = 0
    if not all(one and one["ranks"] for one in found):
        each = config.cluster.devices or devices.detect(config.cluster.device).count
    return [(one["name"], int(one["ranks"] or each)) for one in found if one]


def _is_loopback(name: str) -> bool:
    """Whether every host calls itself so."""
    bare = name.rpartition("@")[2]
    with suppress(ValueError):
        return ipaddress.ip_address(bare).is_loopback
    return bare.lower() in ("localhost", "localhost.localdomain", "ip6-localhost")


def _text(config: DictConfig) -> str:
    return f"[{','.join(map(str, config.launch.hosts))}]"
