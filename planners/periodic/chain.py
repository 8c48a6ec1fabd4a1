"""A model as MadPipe sees it (sections 3 and 4.1): a chain of layers, with times in whole ticks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from harness.cluster import Cluster, Duplex
from harness.memory import MemoryModel
from harness.problem import NoPlan
from harness.profile import LayerProfile, ModelProfile
from harness.simulate.ledger import working_bytes

TICKS, MOST = 2**45, 2**58
"""All tasks of a chain together, and all messages at most. Sums of ticks are exact: what fits exactly fits."""
BUFFERS = 2
"""A device has so many buffers for what crosses a cut: one in use, one that fills."""


@dataclass(frozen=True)
class Shared:
    """State that several `layers` have in common, as those of tied weights: a device has its `bytes` once."""

    bytes: int
    layers: tuple[int, ...]


@dataclass(frozen=True)
class Chain:
    """L layers and the L + 1 boundaries around them; boundary b is before layer b.

        boundary   0      1      2      3        no message crosses the first and the last one
        layer      |  0   |  1   |  2   |

    Of each layer: `forward` and `backward` ticks, bytes of model `state` (3 W in the paper), bytes `stored` of each
    micro-batch from the start of its forward task to the end of its backward task. `shared` is what of the state counts
    once on a device though several of its layers have it. Of each boundary, where it is a cut between two devices:
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
        """Bytes of state of all layers before each boundary, what they share counted for each."""
        return _before(self.state)

    @cached_property
    def stores(self) -> tuple[int, ...]:
        """Bytes that all layers before each boundary store of a micro-batch."""
        return _before(self.stored)

    @cached_property
    def crossing(self) -> tuple[int, ...]:
        """C of the paper: ticks in which a message and its gradient cross each boundary, one after the other."""
        return tuple(there + back for there, back in zip(self.sent, self.returned, strict=True))

    def busy(self, boundary: int) -> int:
        """Ticks of a period in which the link of this cut is busy, in the direction in which it is longer."""
        return self.crossing[boundary] if self.duplex == "half" else max(self.sent[boundary], self.returned[boundary])

    def held(self, first: int, last: int, activations: int) -> int:
        """M of the paper: bytes of a device with the layers `first`..`last` and so many stored activations."""
        state = self.states[last + 1] - self.states[first] - self.again([range(first, last + 1)])
        return state + activations * self.kept(first, last) + self.buffers[first] + self.buffers[last + 1]

    def kept(self, first: int, last: int) -> int:
        """Bytes that the layers `first`..`last` store of a micro-batch."""
        return self.stores[last + 1] - self.stores[first]

    def again(self, ranges: Sequence[range]) -> int:
        """Bytes of what the layers of one device share, beyond the first of them that has it: `states` has it twice."""
        held = [(one.bytes, sum(any(n in some for some in ranges) for n in one.layers)) for one in self.shared]
        return sum(size * (count - 1) for size, count in held if count)

    def seconds(self, ticks: float) -> float:
        return ticks * self.tick_s


def chain_of(
    profile: ModelProfile, cluster: Cluster, memory: MemoryModel, duplex: Duplex = "half", micro_batches: int = 1
) -> Chain:
    """The chain of a profile on a cluster; raises NoPlan for a profile without times, or with times that no tick suits.

    All cuts are taken to cross the cluster's slowest link. A skip travels through every cut that it jumps over.

    Where the memory model counts all that is saved, as much is kept free on each device as a layer's backward pass
    needs at most; the first layer's device has the inputs of all `micro_batches`, the last one's another output. So the
    simulator counts.
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
    there = cluster.device.memory_bytes - memory.reserve_bytes
    if memory.activations == "saved":
        state[0] += micro_batches * profile.input_bytes
        state[-1] += layers[-1].output_bytes
        there -= max(working_bytes(profile, i, i, min(1.0, memory.gradients)) for i in numbers)
    return Chain(
        forward=tuple(ticks(layer.forward_s) for layer in layers),
        backward=tuple(ticks(layer.backward_s) for layer in layers),
        state=tuple(state),
        stored=tuple(memory.task_bytes(profile, i, i) for i in numbers),
        sent=messages,
        returned=messages,
        buffers=tuple(BUFFERS * size for size in crossing),
        memory=there,
        tick_s=tick_s,
        duplex=duplex,
        shared=_shared(profile, memory),
    )


def _tick_s(profile: ModelProfile, messages_s: float) -> float:
    work_s = math.fsum(layer.forward_s + layer.backward_s for layer in profile.layers)
    if not work_s:
        what = f"needs layer times, the profile of {profile.model or 'the model'} ({profile.source}) has none"
        raise NoPlan("profile", what, "a measured profile, or a cluster with cluster.peak_tflops")
    tick_s = float(2.0 ** math.frexp(max(work_s / TICKS, messages_s / MOST))[1])
    if work_s / tick_s < len(profile.layers):
        what = f"lets messages take {messages_s / work_s:.1g} times as long as all layers"
        raise NoPlan("cluster.bandwidth_gb_s", what, "a faster link, or layer times in seconds")
    return tick_s


def _shared(profile: ModelProfile, memory: MemoryModel) -> tuple[Shared, ...]:
    sizes = {tied.name: tied.bytes for layer in profile.layers for tied in layer.tied}
    found = []
    for name, size in sizes.items():
        state = memory.state_bytes(ModelProfile((LayerProfile(param_bytes=size),)), 0, 0)
        layers = [n for n, layer in enumerate(profile.layers) if any(tied.name == name for tied in layer.tied)]
        found.append(Shared(state, tuple(layers)))
    return tuple(found)


def _before(values: Sequence[int]) -> tuple[int, ...]:
    return tuple(accumulate(values, initial=0))
