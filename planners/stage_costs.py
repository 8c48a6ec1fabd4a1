"""The cost of each possible stage: in seconds, in bytes of memory, or in bytes of parameters.

A table over stages is n x n for a model of n layers: `table[first, last]` belongs to the stage that holds the layers
`first`..`last`. In a table of costs the impossible stages, `first` > `last`, cost infinity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from harness.core.cluster import Cluster, Link
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import ModelProfile
from harness.core.problem import NoPlan, Problem
from harness.interfaces import PlanRequest
from harness.schedule.builders.gpipe import recomputed
from planners.block_partition import Matrix, Vector

KEPT = 12
"""Tables of each kind that are kept: a search has a profile for each size of micro-batches."""


@dataclass(frozen=True)
class StageCosts:
    """`stages[k]` is the table for stage k; `layers[i]` the part of a stage's cost that is a sum over its layers."""

    layers: Vector
    stages: tuple[Matrix, ...]

    def for_sizes(self, sizes: Sequence[int]) -> list[float]:
        """Returns the cost of each stage, if stage k holds `sizes[k]` layers."""
        lasts = np.cumsum(sizes) - 1
        spans = zip(lasts - np.array(sizes) + 1, lasts, strict=True)
        return [float(table[first, last]) for table, (first, last) in zip(self.stages, spans, strict=True)]


def by_time(profile: ModelProfile, cluster: Cluster, request: PlanRequest) -> StageCosts:
    """Returns seconds for one micro-batch: the maximum of computing and receiving, which overlap.

    Computing is forward, backward, and forward again for the share of the micro-batches that is recomputed, but of a
    frozen prefix. Stage k receives from the devices of all stages before it. Raises NoPlan for a profile without times.
    """
    share, same = _recomputed(request) / request.batch.micro_batches, _Same(profile)
    seconds, computing = _computing(same, share)
    if not seconds.any():
        message = f"needs layer times, the profile of {profile.model or 'the model'} ({profile.source}) has none"
        raise NoPlan(Problem("planner.by", "time", message, ({"planner.by": "parameters"},)))
    stages = [computing]
    receiving: dict[tuple[Link, frozenset[Link]], Matrix] = {}
    of_nodes: dict[int, int] = {}  # a device of each node that is passed
    for source, device in pairwise(request.devices):
        of_nodes[cluster.node(source)] = source
        links = frozenset(cluster.link(before, device) for before in of_nodes.values())
        key = (cluster.link(source, device), links)
        if key not in receiving:
            receiving[key] = np.maximum(computing, _receiving(same, *key))
        stages.append(receiving[key])
    return StageCosts(seconds, tuple(stages))


def by_memory(profile: ModelProfile, memory: MemoryModel, request: PlanRequest) -> StageCosts:
    """Returns bytes of model state and activations after the forward passes of all micro-batches.

    Each micro-batch keeps what entered the stage, its input and the skips. One that is not recomputed also keeps all
    that autograd saves; at least one does so, if only while it is recomputed (torchgpipe, section 2.1). Where the
    memory model counts only the inputs of layers, just a recomputed micro-batch keeps what entered.
    """
    waiting = _recomputed(request)
    whole = max(request.batch.micro_batches - waiting, 1)
    state, tasks, shared = _bytes(_Same(profile), memory)
    entered = sent_bytes(profile).copy()
    entered[0] += profile.input_bytes
    if memory.activations == "inputs":
        kept = waiting * entered
    else:
        inputs = np.array([profile.boundary_bytes(i) for i in range(len(profile.layers))], dtype=np.float64)
        twice = np.minimum(inputs, tasks)  # the stage's input, if its first layer saves it
        kept = request.batch.micro_batches * entered - whole * twice[:, None]
    layers = state + whole * tasks
    return StageCosts(layers, (_sums(layers) + kept - shared,) * len(request.devices))


def by_parameters(profile: ModelProfile, request: PlanRequest) -> StageCosts:
    """Returns bytes of parameters."""
    layers = np.array([layer.param_bytes for layer in profile.layers], dtype=np.float64)
    shared = _shared(profile, frozen=False) + _shared(profile, frozen=True)
    return StageCosts(layers, (_sums(layers) - shared,) * len(request.devices))


def sent_bytes(profile: ModelProfile) -> Matrix:
    """Returns bytes of one micro-batch that are sent to each stage: its boundary, and each skip once (portals)."""
    return _sent(_Same(profile))


class _Same:
    """A profile as a key of what is made of it: equal to itself alone. A search has few profiles and plans them often;
    comparing two of them, or hashing one, takes longer than what is kept."""

    def __init__(self, profile: ModelProfile) -> None:
        self.profile = profile

    def __hash__(self) -> int:
        return id(self.profile)

    def __eq__(self, other: object) -> bool:
        return hash(self) == hash(other)  # the profile is there as long as the key is


def _kept(*tables: Matrix) -> None:
    """Refuses to change tables that later plans get, too."""
    for table in tables:
        table.setflags(write=False)


@lru_cache(maxsize=KEPT)
def _sent(of: _Same) -> Matrix:
    found = _entering(of.profile, float, float)
    _kept(found)
    return found


@lru_cache(maxsize=KEPT)
def _computing(of: _Same, share: float) -> tuple[Vector, Matrix]:
    """Returns the seconds of each layer, of which forward passes of a `share` come twice, but of a frozen prefix, and
    the table of their sums."""
    layers, prefix = of.profile.layers, of.profile.frozen_prefix
    again = [share if number >= prefix else 0.0 for number in range(len(layers))]
    pairs = zip(layers, again, strict=True)
    seconds = np.array([layer.forward_s * (1 + more) + layer.backward_s for layer, more in pairs])
    found = seconds, _sums(seconds)
    _kept(*found)
    return found


@lru_cache(maxsize=KEPT)
def _bytes(of: _Same, memory: MemoryModel) -> tuple[Vector, Vector, Matrix]:
    """Returns the bytes of each layer's state, those that a task keeps of it, and the table of the bytes of tied
    weights that sums of states count more than once."""
    profile, each = of.profile, range(len(of.profile.layers))
    state = np.array([memory.state_bytes(profile, i, i) for i in each], dtype=np.float64)
    tasks = np.array([memory.task_bytes(profile, i, i) for i in each], dtype=np.float64)
    weights = memory.weights * memory.versions
    shared = (weights + memory.gradients + memory.optimizer) * _shared(profile, frozen=False)
    shared += weights * _shared(profile, frozen=True)
    found = state, tasks, shared
    _kept(*found)
    return found


def _recomputed(request: PlanRequest) -> int:
    """Returns the number of micro-batches that are recomputed."""
    count, mode = request.batch.micro_batches, request.recompute
    return recomputed(0, count, mode) * (count - 1) + recomputed(count - 1, count, mode)  # only the last one may differ


def _sums(values: Vector) -> Matrix:
    """Returns the table of sums over the layers of a stage."""
    prefix = np.concatenate(([0.0], np.cumsum(values)))
    impossible = np.tri(len(values), k=-1, dtype=bool)
    return np.where(impossible, np.inf, prefix[None, 1:] - prefix[:-1, None])


def _shared(profile: ModelProfile, frozen: bool) -> Matrix:
    """Returns the table of bytes of tied weights, `frozen` ones or all others, that the sums over a stage's layers
    count more than once."""
    table = np.zeros((len(profile.layers), len(profile.layers)))
    last: dict[str, int] = {}  # the previous layer that has the parameter
    for number, layer in enumerate(profile.layers):
        for tied in (one for one in layer.tied if one.frozen == frozen):
            if tied.name in last:
                table[: last[tied.name] + 1, number:] += tied.bytes
            last[tied.name] = number
    return table


@lru_cache(maxsize=KEPT)
def _receiving(of: _Same, nearest: Link, links: frozenset[Link]) -> Matrix:
    """Returns the seconds in which a stage's inputs arrive: a message for the boundary, and one for each skip.

    The boundary comes over the `nearest` link. A skip may come from any stage before, so it is charged the slowest of
    the `links`; they differ only where stages are on several nodes.
    """
    found = _entering(
        of.profile, lambda size: _seconds(nearest, size), lambda size: max(_seconds(k, size) for k in links)
    )
    _kept(found)
    return found


def _seconds(link: Link, size: int) -> float:
    """Returns seconds of a message. Its gradient is sent back at the same time, or after it on a half duplex link."""
    return link.seconds(size) * (2 if link.duplex == "half" else 1)


def _entering(profile: ModelProfile, boundary: Callable[[int], float], skip: Callable[[int], float]) -> Matrix:
    """Returns the table of what enters a stage from the stages before it; the model's own input is left out.

    0 ... source | first ... target ... last | ...        a skip enters if source < first <= target <= last
    """
    layers = len(profile.layers)
    table = np.zeros((layers, layers))
    for first in range(1, layers):
        table[first] = boundary(profile.boundary_bytes(first))
    for s in profile.skips:
        table[s.source + 1 : s.target + 1, s.target :] += skip(s.bytes)
    return table
