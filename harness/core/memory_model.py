"""The memory model: bytes of model state for each parameter, and what is kept of the activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from harness.core.model_profile import ModelProfile
from harness.core.serialization import Document

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class MemoryModel(Document):
    """Model state as multiples of the profile's own parameter bytes, and what is kept of the activations.

    `weights`: bytes for each byte of `LayerProfile.param_bytes`; `gradients`, `optimizer`, `offloaded`: for each of
    these bytes that is trained. The last one is in the host's memory and copied to each device in buffers, `bucketed`
    bytes for each byte of its parameters, but at most `buckets_bytes`.
    With `flat` all gradients are in one buffer, into which those of the first micro-batch are copied, too.
    `versions` copies of the weights are kept, or as many as `copies` lists for each stage of a plan; `reducing` are
    further gradients during the all-reduce over replicas, `rebuilt` those that are there between two steps, once, while
    buffers of gradients get new ones in their place.
    With `freed` an update frees the gradients, which only come again with the next backward task, layer by layer, and
    it works with `updating` bytes for each byte of a stage's parameters and of its largest one.
    `activations` says what a task keeps until its backward pass: the `inputs` of its layers (MadPipe's model) or all
    `saved` tensors. `reserve_bytes` are kept free on each device. `messages`: what arrives has a buffer until it has
    been used ("passing"), and in addition one that is "posted" for the next one (`engines.myelin`); or one buffer for
    all micro-batches, from which it is "copied" twice, and outputs stay until their backward task
    (`engines.deepspeed`); or a permanent buffer for each micro-batch ("kept").
    """

    name: str = "sgd_fp32"
    weights: float = 1.0
    gradients: float = 1.0
    optimizer: float = 0.0
    offloaded: float = 0.0
    bucketed: float = 0.0
    buckets_bytes: int = 0
    reducing: float = 0.0
    rebuilt: float = 0.0
    flat: bool = False
    versions: int = 1
    copies: tuple[int, ...] = ()
    freed: bool = False
    updating: tuple[float, float] = (0.0, 0.0)
    activations: Literal["inputs", "saved"] = "saved"
    messages: Literal["passing", "posted", "copied", "kept"] = "passing"
    reserve_bytes: int = 0

    def available_bytes(self, device_bytes: int) -> int:
        """Returns the bytes that a run may use of a device with so much memory."""
        return max(0, device_bytes - self.reserve_bytes)

    def state_bytes(self, profile: ModelProfile, first: int, last: int) -> int:
        """Returns the bytes of weights, gradients, optimizer state and buffers of the layers `first`..`last`.

        They can be added to those of other layers: buckets are not included."""
        parts = self.state_parts(profile, range(first, last + 1))
        return sum(parts.values()) - parts.get("buckets", 0)

    def state_parts(self, profile: ModelProfile, layers: Sequence[int]) -> dict[str, int]:
        """Returns the permanent bytes, by kind, of a device that has these layers; tied weights count once."""
        trained = profile.trained_bytes_of(layers)
        buckets = min(self.buckets_bytes, round(trained * self.bucketed))
        return ({"buckets": buckets} if buckets else {}) | {
            "weights": round(profile.parameter_bytes_of(layers) * self.weights * self.versions),
            "gradients": round(trained * self.gradients),
            "optimizer": round(trained * self.optimizer),
            "buffers": profile.buffer_bytes_of(layers),
        }

    def task_bytes(self, profile: ModelProfile, first: int, last: int) -> int:
        """Returns the bytes that one micro-batch keeps from its forward to its backward pass on layers
        `first`..`last`."""
        if self.activations == "inputs":
            return sum(profile.boundary_bytes(layer) for layer in range(first, last + 1))
        return round(profile.sum("saved_bytes", first, last))

    def delayed_bytes(self, profile: ModelProfile, first: int, last: int) -> int:
        """Returns the bytes that the backward pass of one micro-batch keeps for delayed gradients of the weights.

        These are gradients of outputs: of each matmul with a trained weight, else of the layer. The first stage with
        a backward pass keeps none: its input needs no gradient, so all of its backward pass is delayed.
        """
        needed = first > profile.frozen_prefix
        return sum(self.delayed_of(profile, number) for number in range(first, last + 1)) if needed else 0

    def delayed_of(self, profile: ModelProfile, number: int) -> int:
        """Returns the bytes of one layer in `delayed_bytes`."""
        layer, width = profile.layers[number], DTYPE_BYTES[profile.dtype]
        rows = (p.heads * p.rows_per_sample * p.out for p in layer.products if p.weight_bytes and not p.frozen)
        return max(sum(rows) * profile.micro_batch * width, layer.output_bytes) if layer.trained_bytes else 0

    def checkpoint_bytes(self, profile: ModelProfile, first: int, last: int) -> int:
        """Returns the bytes that one micro-batch keeps until its recomputation: the stage's input and incoming
        skips."""
        return profile.boundary_bytes(first) + sum(s.bytes for s in profile.skips_into(first, last))


NAMED = {
    model.name: model
    for model in (
        MemoryModel("sgd_fp32"),
        MemoryModel("sgd_momentum_fp32", optimizer=1.0),
        MemoryModel("adam_fp32", optimizer=2.0),
        # fp16 weights and gradients, fp32 master weights, gradients and two moments: 20 bytes a parameter (Myelin V-B)
        MemoryModel("adam_mixed", optimizer=8.0),
        # of these only fp16 weights and gradients stay: 4 bytes a parameter. fp32 weights and moments are in the host's
        # memory, the rest in buckets of 16M parameters, 16 bytes each
        MemoryModel("myelin_offload", offloaded=6.0, bucketed=8.0, buckets_bytes=16 * 16_000_000),
        # three times the weights in all, only the inputs of the chain's layers (MadPipe, section 4.1)
        MemoryModel("madpipe_paper", weights=3.0, gradients=0.0, activations="inputs"),
    )
}


OF_ADAM = 2.0
"""What a step of torch's Adam works with at once, for each byte of a parameter: the root of its second moment, and that
divided. SGD adds in place; so do fused kernels, which are not known here."""


def updating(model: MemoryModel) -> float:
    """Returns the bytes that a step of the optimizer works with for each byte of the parameter that it updates."""
    return OF_ADAM if model.name == "adam_fp32" else 0.0


def named(name: str, optimizer: str = "sgd", momentum: float = 0.0) -> MemoryModel:
    """Returns a memory model by its name; "auto" follows from the optimizer. Raises KeyError for an unknown name.

    Muon keeps one moment for a matrix and two for all else: two are an upper bound.
    """
    if name == "auto":
        adam = optimizer in ("adam", "adamw", "nadam", "muon")
        name = "adam_fp32" if adam else "sgd_momentum_fp32" if momentum else "sgd_fp32"
    return NAMED[name]
