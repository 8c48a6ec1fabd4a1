"""The chain of layers of MadPipe (sections 3 and 4.1), with times in whole ticks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from harness.core.cluster import Cluster, Duplex
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.problem import NoPlan, Problem
from harness.simulator.memory_timeline import working_bytes

TICKS, MOST = 2**45, 2**58
"""Ticks of all tasks of a chain, and most ticks of all messages. Sums of ticks are exact."""
BUFFERS = 2
"""Buffers of a device for what crosses a cut: one in use, one that is being filled."""


@dataclass(frozen=True)
class Shared:
    """State that several `layers` share, such as tied weights: a device has its `bytes` once."""

    bytes: int
    layers: tuple[int, ...]


@dataclass(frozen=True)
class Chain:
    """L layers and the L + 1 boundaries around them; boundary b is before layer b.

        boundary   0      1      2      3        no message crosses the first and the last one
        layer      |  0   |  1   |  2   |

    Of each layer: `forward` and `backward` ticks, bytes of model `state` (3 W in the paper), bytes `stored` of each
    micro-batch from the start of its forward task to the end of its backward task. `shared` state counts
    once on a device, however many of its layers have it. Of each boundary, where it is a cut between two devices:
    ticks until the activation is `sent` and its gradient `returned`, bytes of `buffers` that each of the two devices
    keeps. A tick is `tick_s` seconds. A device has `memory` bytes. With `duplex` "half" a link is busy in one direction
    at a time.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    state: tuple[int, ...]
    stored: tuple[int, ...]
    sent: tuple[int, ...]
    returned: tuple[int, ...]
    buffers: tuple[int, ...]
    memory: int
    tick_s: float = 1.0
    duplex: Duplex = "half"
    shared: tuple[Shared, ...] = ()

    @property
    def layers(self) -> int:
        return len(self.forward)

    @cached_property
    def work(self) -> tuple[int, ...]:
        """U of the paper: forward and backward ticks of each layer."""
        return tuple(f + b for f, b in zip(self.forward, self.backward, strict=True))

    @cached_property
    def loads(self) -> tuple[int, ...]:
        """Ticks of all layers before each boundary: those of layers k..l are `loads[l + 1] - loads[k]`."""
        return _before(self.work)

    @cached_property
    def states(self) -> tuple[int, ...]:
        """Bytes of state of all layers before each boundary, shared state counted for each layer."""
        return _before(self.state)

    @cached_property
    def stores(self) -> tuple[int, ...]:
        """Bytes that all layers before each boundary store of a micro-batch."""
        return _before(self.stored)

    @cached_property
    def crossing(self) -> tuple[int, ...]:
        """C of the paper: ticks in which a message and its gradient cross each boundary, one after the other."""
        return tuple(sent + returned for sent, returned in zip(self.sent, self.returned, strict=True))

    def busy(self, boundary: int) -> int:
        """Returns the ticks of a period in which the link of this cut is busy, in its busier direction."""
        return self.crossing[boundary] if self.duplex == "half" else max(self.sent[boundary], self.returned[boundary])

    def held(self, first: int, last: int, activations: int) -> int:
        """Returns M of the paper: bytes of a device with the layers `first`..`last` that stores `activations`
        micro-batches."""
        state = self.states[last + 1] - self.states[first] - self.counted_twice([range(first, last + 1)])
        return state + activations * self.kept(first, last) + self.buffers[first] + self.buffers[last + 1]

    def kept(self, first: int, last: int) -> int:
        """Returns the bytes that the layers `first`..`last` store of a micro-batch."""
        return self.stores[last + 1] - self.stores[first]

    def counted_twice(self, ranges: Sequence[range]) -> int:
        """Returns the bytes of shared state of one device that `states` counts more than once."""
        held = [
            (shared.bytes, sum(any(n in layers for layers in ranges) for n in shared.layers)) for shared in self.shared
        ]
        return sum(size * (count - 1) for size, count in held if count)

    def seconds(self, ticks: float) -> float:
        return ticks * self.tick_s


def chain_from_profile(
    profile: ModelProfile, cluster: Cluster, memory: MemoryModel, duplex: Duplex = "half", micro_batches: int = 1
) -> Chain:
    """Returns the chain of a profile on a cluster.

    All cuts are assumed to cross the cluster's slowest link. A skip travels through every cut that it jumps over.

    Where the memory model counts all saved tensors, each device keeps free what the backward pass of a layer needs at
    most; the first layer's device has the inputs of all `micro_batches`, the last one's another output, as in the
    simulator. Raises NoPlan for a profile without times, or with times of too different size.
    """
    layers = profile.layers
    links = [cluster.link(0, device) for device in (1, cluster.devices - 1) if device < cluster.devices]
    ends = (0, len(layers))
    crossing = [0 if b in ends else profile.crossing_bytes(b) for b in range(len(layers) + 1)]
    slowest = [max((link.seconds(size) for link in links), default=0.0) for size in crossing]
    message_s = [0.0 if b in ends else seconds for b, seconds in enumerate(slowest)]
    tick_s = _tick_s(profile, math.fsum(message_s))

    def ticks(seconds: float) -> int:
        return round(seconds / tick_s)

    messages = tuple(ticks(seconds) for seconds in message_s)
    numbers = range(len(layers))
    state = [memory.state_bytes(profile, i, i) for i in numbers]
    available = memory.available_bytes(cluster.device.memory_bytes)
    if memory.activations == "saved":
        state[0] += micro_batches * profile.input_bytes
        state[-1] += layers[-1].output_bytes
        available -= max(working_bytes(profile, i, i, min(1.0, memory.gradients)) for i in numbers)
    return Chain(
        forward=tuple(ticks(layer.forward_s) for layer in layers),
        backward=tuple(ticks(layer.backward_s) for layer in layers),
        state=tuple(state),
        stored=tuple(memory.task_bytes(profile, i, i) for i in numbers),
        sent=messages,
        returned=messages,
        buffers=tuple(BUFFERS * size for size in crossing),
        memory=available,
        tick_s=tick_s,
        duplex=duplex,
        shared=_shared(profile, memory),
    )


def _tick_s(profile: ModelProfile, messages_s: float) -> float:
    work_s = math.fsum(layer.forward_s + layer.backward_s for layer in profile.layers)
    if not work_s:
        message = f"needs layer times, the profile of {profile.model or 'the model'} ({profile.source}) has none"
        hint = "a measured profile, or a cluster with cluster.peak_tflops"
        raise NoPlan(Problem("profile", None, message, hint=hint))
    tick_s = float(2.0 ** math.frexp(max(work_s / TICKS, messages_s / MOST))[1])
    if work_s / tick_s < len(profile.layers):
        message = f"lets messages take {messages_s / work_s:.1g} times as long as all layers"
        hint = "a faster link, or layer times in seconds"
        raise NoPlan(Problem("cluster.bandwidth_gb_s", None, message, hint=hint))
    return tick_s


def _shared(profile: ModelProfile, memory: MemoryModel) -> tuple[Shared, ...]:
    every = {tied.name: tied for layer in profile.layers for tied in layer.tied}
    shared = []
    for name, one in every.items():
        alone = LayerProfile(param_bytes=one.bytes, frozen_bytes=one.bytes if one.frozen else 0)
        state = memory.state_bytes(ModelProfile((alone,)), 0, 0)
        layers = [n for n, layer in enumerate(profile.layers) if any(tied.name == name for tied in layer.tied)]
        shared.append(Shared(state, tuple(layers)))
    return tuple(shared)


def _before(values: Sequence[int]) -> tuple[int, ...]:
    return tuple(accumulate(values, initial=0))
