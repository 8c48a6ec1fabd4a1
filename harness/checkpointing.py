"""Activation checkpointing inside a stage: only the inputs of segments are kept, the rest is computed again.

stage     | layer 0   layer 1 | layer 2   layer 3 | layer 4 |      every second layer; the last one is whole
forward   x-------->--------->x-------->--------->x-------->          x: kept
backward                                          <---------
                              >-------->--------->                    its forward pass again, then back through it
                              <---------<---------
          >-------->--------->
          <---------<---------

Free of torch: engine and simulator ask the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from harness import divisors
from harness.plan import Plan, Stage
from harness.profile import LayerProfile, ModelProfile


@dataclass(frozen=True)
class Reading:
    """One reading of the paper's formula: `formula` gives the layers' inputs that a pipeline keeps, its minimum is
    `kept`, where a checkpoint comes every `optimum` layers; `every` is what stages with as many layers take."""

    formula: str
    optimum: float
    kept: float
    every: int


def readings(layers: int, stages: int) -> tuple[Reading, Reading]:
    """What Myelin (section V-A) says and means, N `layers` on G `stages`, a checkpoint every ac layers.

    G micro-batches keep their checkpoints, N/(G ac) + 1 on each stage. Of the layers that are computed again, ac at a
    time, the text has the minimum of one micro-batch, the printed formula counts G of them.
    """
    own = max(1, layers // stages)
    meant, printed = math.sqrt(layers), math.sqrt(layers / stages)
    return (
        Reading("G (N/(G ac) + 1) + ac", meant, 2 * meant + stages, nearest(own, meant)),
        Reading("G (N/(G ac) + 1 + ac)", printed, 2 * stages * printed + stages, nearest(own, printed)),
    )


def nearest(number: int, to: float) -> int:
    """The divisor that is nearest; the smaller one of two."""
    return min(divisors.of(number), key=lambda divisor: (abs(divisor - to), divisor))


def distance(every: str, own: int, layers: int) -> int:
    """Layers from one checkpoint to the next, in a stage of `own` of the model's `layers`; 0 for "never".

    "auto" takes the divisor of `own` that is nearest to sqrt(layers).
    """
    if every == "never":
        return 0
    return nearest(own, math.sqrt(layers)) if every == "auto" else int(every)


def segments(stage: Stage, every: str, layers: int) -> list[tuple[int, int]]:
    """The first and last layer of each segment of a stage that is computed again.

    The last layer of the model is in none: its backward pass follows at once.
    """
    step = distance(every, stage.layers, layers)
    end = min(stage.last, layers - 2)
    return [(first, min(first + step - 1, end)) for first in range(stage.first, end + 1, step)] if step else []


def checkpointed(profile: ModelProfile, plan: Plan, every: str) -> ModelProfile:
    """The profile in which backward passes hold the recomputation of segments. `every`: "never", "auto" or a number.

    The forward time of recomputed layers comes on top of their backward time, and they say the FLOPs of it. A segment
    saves its input (and skips from earlier segments of its stage), and what its layers save without checkpoints while
    it goes back: `working_bytes`.
    """
    layers = list(profile.layers)
    for stage in plan.stages:
        found = segments(stage, every, len(layers))
        for first, last in found:
            kept = profile.boundary_bytes(first) + sum(
                skip.bytes for skip in profile.skips if stage.first <= skip.source < first <= skip.target <= last
            )
            layers[first : last + 1] = _again(profile.layers[first : last + 1], kept)
        if found and found[-1][1] < stage.last:  # what the last layer takes is kept by none before it
            whole = layers[stage.last]
            layers[stage.last] = replace(whole, saved_bytes=max(whole.saved_bytes, profile.boundary_bytes(stage.last)))
    return replace(profile, layers=tuple(layers))


def _again(segment: tuple[LayerProfile, ...], kept: int) -> list[LayerProfile]:
    """The layers of a segment of which `kept` bytes are there when its backward pass begins.

    Going back through layer l there is what all layers up to l have saved.
    """
    found: list[LayerProfile] = []
    there = 0
    for layer in segment:
        there += layer.saved_bytes
        found.append(
            replace(
                layer,
                backward_s=layer.backward_s + layer.forward_s,
                saved_bytes=0 if found else kept,
                working_bytes=layer.working_bytes + there,
                recomputed_flops=layer.flops,
            )
        )
    return found
