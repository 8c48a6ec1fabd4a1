"""List the candidates of mode=tune: micro-batch sizes, and the meshes that the engine supports, of all devices or of
fewer."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from omegaconf import DictConfig

from harness.checks import engine_support, request
from harness.checks.mesh import given_balance, has
from harness.config import overrides as config_overrides
from harness.config import registry
from harness.core import divisors
from harness.core.cluster import Cluster
from harness.core.plan import Mesh
from harness.core.problem import Problem, refuse, spelled
from harness.interfaces import Capabilities, Engine
from harness.planning.tune.schemes import Settings
from harness.user_model import reference

DEGREES = ("tensor", "pipeline", "data")
OWN = (
    "mode",
    "out",
    "remeasure",
    "overwrite",
    "tune.verify",
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
    settings: Settings = ()
    """The keys of its scheme that the user's configuration does not have."""

    @property
    def micro_batches(self) -> int:
        """Micro-batches of each replica, rounded down if there is a remainder."""
        return self.given or max(1, self.batch // (self.mesh.data * self.micro_batch))

    @property
    def is_even(self) -> bool:
        """Whether the batch can be cut so, or the user says how it is cut."""
        return bool(self.given) or self.batch % (self.mesh.data * self.micro_batch) == 0

    def uneven(self) -> list[Problem]:
        """A batch that cannot be cut so. Where `given` does not divide it, a run of the candidate says so."""
        if self.is_even:
            return []
        each = self.mesh.data * self.micro_batch
        parts = [f"mesh.data {self.mesh.data}"] * (self.mesh.data > 1)
        parts += [f"micro-batches of {self.micro_batch}"] * (self.micro_batch > 1)
        nearest = max(1, round(self.batch / each)) * each
        message = f"is no multiple of {' x '.join(parts)}"
        return [Problem("batch.size", self.batch, message, ({"batch.size": nearest},))]

    def config(self, scheme: DictConfig) -> DictConfig:
        """The configuration of a run of this candidate, made of its scheme's."""
        own = copy.deepcopy(scheme)
        own.mode = mode(scheme)
        self.set_in(own)
        return own

    def set_in(self, own: DictConfig) -> None:
        """Set the mesh and the number of micro-batches."""
        own.batch.micro_batches = self.micro_batches
        for name in DEGREES:
            own.mesh[name] = getattr(self.mesh, name)

    def command(self, scheme: DictConfig, overrides: Sequence[str], can: Capabilities) -> str:
        """Return the command that runs this candidate."""
        return reference.command(self.overrides(scheme, overrides, can))

    def overrides(self, scheme: DictConfig, overrides: Sequence[str], can: Capabilities) -> list[str]:
        """The overrides of that command."""
        settings = dict(self.settings)
        kept = [text for text in overrides if text.partition("=")[0] not in (*OWN, *settings)]
        degrees = [
            f"mesh.{name}={getattr(self.mesh, name)}"
            for name in DEGREES
            if _free(scheme, can, name) or scheme.mesh[name]
        ]
        chosen = [*(f"{key}={spelled(value)}" for key, value in settings.items()), *degrees]
        first = [] if mode(scheme) == "run" else [f"mode={mode(scheme)}"]
        return [*first, *kept, *chosen, f"batch.micro_batches={self.micro_batches}"]


def mode(config: DictConfig) -> str:
    """Return the mode of a candidate's command: run on this machine with a model, else simulate."""
    return "run" if config.cluster.name == "local" and not config.profile else "simulate"


def device_counts(cluster: Cluster) -> list[int]:
    """The numbers of devices that are tried, the largest first: any of the devices of a node, then whole nodes."""
    each = cluster.devices_per_node
    return sorted({*range(1, each + 1), *(each * nodes for nodes in range(1, cluster.nodes + 1))}, reverse=True)


class MicroBatches:
    """The micro-batches that meshes are tried with; `given` is the `batch.micro_batches` of the user, `stored` the size
    in the user's profile, which is kept."""

    def __init__(self, config: DictConfig, overrides: Sequence[str], stored: int | None = None) -> None:
        self.batch: int = config.batch.size
        count: int = config.batch.micro_batches
        self.given = count if config_overrides.given(overrides, "batch.micro_batches") else None
        only = stored or (None if self.given else config.batch.micro_batch_size)
        powers = [size for size in divisors.list_divisors(self.batch) if size.bit_count() == 1]
        self.sizes: list[int] | None = [only] if only else None if self.given else powers
        """Those of every mesh, the smallest first; None where they follow from the replicas."""

    def of(self, mesh: Mesh, settings: Settings = ()) -> list[Candidate]:
        """The candidates of a mesh, small micro-batches first."""
        sizes = [max(1, self.batch // (mesh.data * (self.given or 1)))] if self.sizes is None else self.sizes
        return [Candidate(size, mesh, self.batch, self.given, settings) for size in sizes]


def refuse_given(config: DictConfig, engine: Engine, cluster: Cluster) -> None:
    """Raise `CannotRun` for an engine that stands in for another one, for a setting that stands for several ones, and
    for degrees that are given and need more devices than there are."""
    if not registry.is_scheme(config.engine.name):
        message = "trains on one device with the delays of a pipeline, there is no speed to choose"
        refuse([Problem("engine", config.engine.name, message, ({"engine": "periodic"}, {"mode": "run"}))])
    given = {name: config.mesh[name] or 1 for name in DEGREES if has(config, engine.capabilities, name)}
    refuse([*engine_support.compares(config, engine), *request.too_many_devices(config, Mesh(**given), cluster)])


@dataclass(frozen=True)
class Degrees:
    """The degrees of a scheme's meshes that are `given`, and those that are `free`, to be chosen."""

    given: Mapping[str, int]
    free: tuple[str, ...]

    def meshes(self, devices: int) -> list[Mesh]:
        """All meshes of exactly so many devices; none where the given degrees do not divide them.

        Without a degree to choose there is one mesh, whatever the number of devices.
        """
        if not self.free:
            return [Mesh(**self.given)]
        left, rest = divmod(devices, math.prod(self.given.values()))
        if rest:
            return []
        found = _factors(left, len(self.free))
        return [Mesh(**{**self.given, **dict(zip(self.free, degrees, strict=True))}) for degrees in found]


def degrees(config: DictConfig, can: Capabilities) -> Degrees:
    """Those of the configuration of a scheme."""
    given = {name: config.mesh[name] or 1 for name in DEGREES}
    given["pipeline"] = given["pipeline"] if config.mesh.pipeline else max(1, len(given_balance(config)))
    return Degrees(given, tuple(name for name in DEGREES if _free(config, can, name)))


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
