"""What fills a device, in words: 12.1 GiB of weights, 12.1 GiB of gradients, 24.2 GiB of optimizer state, ..."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.core.memory_model import MemoryModel
from harness.core.model_profile import ModelProfile
from harness.core.plan import Mesh
from harness.core.units import size
from harness.simulator.memory_timeline import Peak

WORDS = {
    "optimizer": "optimizer state",
    "saved": "activations",
    "outputs": "outputs",
    "checkpoints": "checkpoints of activations",
    "received": "received activations",
    "to be sent": "activations to be sent",
    "working": "gradients of activations",
    "reducing": "gradients being reduced",
    "gradients of an update": "gradients",
    "updating": "work of the optimizer",
}
"""Words for what `harness.simulator.memory_timeline` and memory models call otherwise."""
SMALL = 0.01
"""The share of all below which a part is not named."""


def fullest(peaks: Sequence[Peak]) -> dict[str, int]:
    """The contents of the fullest device at its peak."""
    return max(peaks, key=lambda peak: peak.bytes).contents


def of_state(memory: MemoryModel, profile: ModelProfile, mesh: Mesh) -> dict[str, int]:
    """Weights, gradients and optimizer state of a device, on average over those that share them."""
    parts = memory.state_parts(profile, range(len(profile.layers)))
    return {name: count // (mesh.pipeline * mesh.tensor) for name, count in parts.items()}


def text(parts: Mapping[str, int]) -> str:
    """The parts, the largest first."""
    least = SMALL * sum(parts.values())
    shown = sorted(((name, count) for name, count in parts.items() if count > least), key=lambda one: -one[1])
    return ", ".join(f"{size(count)} of {WORDS.get(name, name)}" for name, count in shown)
