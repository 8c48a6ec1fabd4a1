"""List the candidates of mode=tune: micro-batch sizes, and the meshes of all devices that the engine supports."""

from __future__ import annotations

import copy
import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from omegaconf import DictConfig

from harness.checks import request
from harness.checks.mesh import given_balance, has
from harness.config import overrides as config_overrides
from harness.core import divisors
from harness.core.plan import Mesh
from harness.core.problem import LEAVE_OUT, CannotRun, Fix, Problem
from harness.interfaces import Capabilities

DEGREES = ("tensor", "pipeline", "data")
OWN = (
    "mode",
    "out",
    "remeasure",
    "batch.micro_batches",
    "batch.micro_batch_size",
    *(f"mesh.{name}" for name in DEGREES),
)
"""Keys of the command that a tuned run has in its own way."""


@dataclass(frozen=True)
class Candidate:
    """`micro_batch` samples at once in each of `mesh.data` replicas, which share `batch` samples."""

    micro_batch: int
    mesh: Mesh
    batch: int
    given: int | None = None
    """`batch.micro_batches` of the user, which stays."""

    @property
    def micro_batches(self) -> int:
        """Micro-batches of each replica, rounded down if there is a remainder."""
        return self.given or max(1, self.batch // (self.mesh.data * self.micro_batch))

    def uneven(self) -> list[Problem]:
        """A batch that cannot be cut so. Where `given` does not divide it, a run of the candidate says so."""
        each = self.mesh.data * self.micro_batch
        if self.given or self.batch % each == 0:
            return []
        parts = [f"mesh.data {self.mesh.data}"] * (self.mesh.data > 1)
        parts += [f"micro-batches of {self.micro_batch}"] * (self.micro_batch > 1)
        nearest = max(1, round(self.batch / each)) * each
        message = f"is no multiple of {' x '.join(parts)}"
        return [Problem("batch.size", self.batch, message, ({"batch.size": nearest},))]

    def config(self, config: DictConfig) -> DictConfig:
        """The configuration of a run of this candidate."""
        own = copy.deepcopy(config)
        own.mode = mode(config)
        own.batch.micro_batches = self.micro_batches
        for name in DEGREES:
            own.mesh[name] = getattr(self.mesh, name)
        return own

    def command(self, config: DictConfig, overrides: Sequence[str], can: Capabilities) -> str:
        """Return the command that runs this candidate."""
        kept = [text for text in overrides if text.partition("=")[0] not in OWN]
        degrees = [
            f"mesh.{name}={getattr(self.mesh, name)}"
            for name in DEGREES
            if _free(config, can, name) or config.mesh[name]
        ]
        chosen = [*degrees, f"batch.micro_batches={self.micro_batches}"]
        first = [] if mode(config) == "run" else [f"mode={mode(config)}"]
        return shlex.join(["python", "run.py", *first, *kept, *chosen])


def mode(config: DictConfig) -> str:
    """Return the mode of a candidate's command: run on this machine with a model, else simulate."""
    return "run" if config.cluster.name == "local" and not config.profile else "simulate"


def candidates(
    config: DictConfig, overrides: Sequence[str], can: Capabilities, devices: int, stored: int | None
) -> list[Candidate]:
    """All of them, those too that do not divide the batch; small micro-batches first.

    `stored`: the micro-batch of the user's profile, which is kept. Raises `CannotRun` where no mesh has all devices.
    """
    batch = config.batch.size
    given = config.batch.micro_batches if config_overrides.given(overrides, "batch.micro_batches") else None
    found = []
    for mesh in meshes(config, can, devices):
        if stored:
            sizes = [stored]
        elif given:
            sizes = [max(1, batch // (mesh.data * given))]
        elif config.batch.micro_batch_size:
            sizes = [config.batch.micro_batch_size]
        else:
            sizes = [size for size in divisors.list_divisors(batch) if size.bit_count() == 1]
        found += [Candidate(size, mesh, batch, given) for size in sizes]
    return sorted(found, key=lambda one: (one.micro_batch, one.mesh.tensor, one.mesh.pipeline))


def meshes(config: DictConfig, can: Capabilities, devices: int) -> Iterator[Mesh]:
    """All meshes of so many devices with the degrees that are given; without a degree to choose there is one."""
    given = {name: config.mesh[name] or 1 for name in DEGREES}
    free = [name for name in DEGREES if _free(config, can, name)]
    taken = math.prod(given.values())
    if free and devices % taken:
        largest = max(given, key=lambda name: given[name])
        others = "".join(f"x mesh.{name} {n} " for name, n in given.items() if n > 1 and name != largest)
        below = [
            n
            for n in divisors.list_divisors(devices)
            if n < given[largest] and devices % (taken // given[largest] * n) == 0
        ]
        fixes: list[Fix] = [{f"mesh.{largest}": below[-1] if below else LEAVE_OUT}]
        fixes += [{"cluster.devices": -(-devices // taken) * taken}] if request.here(config) == "cpu" else []
        message = f"{others}does not divide the {devices} devices of the cluster"
        raise CannotRun([Problem(f"mesh.{largest}", given[largest], message, tuple(fixes))])
    for degrees in _factors(devices // taken, len(free)) if free else [()]:
        yield Mesh(**given | dict(zip(free, degrees, strict=True)))


def _free(config: DictConfig, can: Capabilities, name: str) -> bool:
    """Whether a degree is to be chosen: the engine has it, and the user says nothing of it."""
    stages = len(given_balance(config)) if name == "pipeline" else 0
    return has(config, can, name) and config.mesh[name] is None and not stages


def _factors(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as a product of so many."""
    if count == 1:
        yield (number,)
        return
    for first in divisors.list_divisors(number):
        yield from ((first, *rest) for rest in _factors(number // first, count - 1))
