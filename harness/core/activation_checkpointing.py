"""Activation checkpointing inside a stage: only the inputs of segments are kept, the rest is recomputed.

stage     | layer 0   layer 1 | layer 2   layer 3 | layer 4 |      every second layer; the last one is whole
forward   x-------->--------->x-------->--------->x-------->          x: kept
backward                                          <---------
                              >-------->--------->                    forward pass again, then its backward pass
                              <---------<---------
          >-------->--------->
          <---------<---------

Does not import torch: engine and simulator use the same functions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from harness.core import divisors
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.plan import Plan, Stage


@dataclass(frozen=True)
class Interpretation:
    """One interpretation of the paper's formula for the layers' inputs that a pipeline keeps.

    `formula` has its minimum `kept` with a checkpoint every `optimum` layers; `every` is the divisor that stages take.
    """

    formula: str
    optimum: float
    kept: float
    every: int


def interpretations(layers: int, stages: int) -> tuple[Interpretation, Interpretation]:
    """Returns two interpretations of Myelin (section V-A), N `layers` on G `stages`, a checkpoint every ac layers.

    G micro-batches keep their checkpoints, N/(G ac) + 1 on each stage. Of the recomputed layers, ac at a time, the text
    counts one micro-batch (the first result), the printed formula G of them (the second).
    """
    stage_layers = max(1, layers // stages)
    meant, printed = math.sqrt(layers), math.sqrt(layers / stages)
    return (
        Interpretation("G (N/(G ac) + 1) + ac", meant, 2 * meant + stages, nearest(stage_layers, meant)),
        Interpretation("G (N/(G ac) + 1 + ac)", printed, 2 * stages * printed + stages, nearest(stage_layers, printed)),
    )


def nearest(number: int, to: float) -> int:
    """Returns the divisor of `number` that is nearest `to`; the smaller one of two."""
    return min(divisors.list_divisors(number), key=lambda divisor: (abs(divisor - to), divisor))


def distance(every: str, stage_layers: int, layers: int) -> int:
    """Returns the layers from one checkpoint to the next, in a stage of `stage_layers` of the model's `layers`.

    It is 0 for "never"; "auto" takes the divisor of `stage_layers` that is nearest to sqrt(layers).
    """
    if every == "never":
        return 0
    return nearest(stage_layers, math.sqrt(layers)) if every == "auto" else int(every)


def segments(stage: Stage, every: str, layers: int) -> list[tuple[int, int]]:
    """Returns the first and last layer of each recomputed segment of a stage.

    The last layer of the model is in none: its backward pass follows directly.
    """
    step = distance(every, stage.layers, layers)
    end = min(stage.last, layers - 2)
    return [(first, min(first + step - 1, end)) for first in range(stage.first, end + 1, step)] if step else []


def checkpointed(profile: ModelProfile, plan: Plan, every: str) -> ModelProfile:
    """Returns the profile in which backward passes recompute segments. `every`: "never", "auto" or a number.

    The backward time of recomputed layers includes their forward time, and `recomputed_flops` its FLOPs. A segment
    saves its input (and skips from earlier segments of its stage); what its layers save while its backward pass runs is
    `working_bytes`. A segment of a frozen prefix saves nothing.
    """
    layers = list(profile.layers)
    for stage in plan.stages:
        recomputed = [one for one in segments(stage, every, len(layers)) if one[1] >= profile.frozen_prefix]
        for first, last in recomputed:
            kept = profile.boundary_bytes(first) + sum(
                skip.bytes for skip in profile.skips if stage.first <= skip.source < first <= skip.target <= last
            )
            layers[first : last + 1] = _recomputed_segment(profile.layers[first : last + 1], kept)
        if recomputed and recomputed[-1][1] < stage.last:  # no earlier layer keeps the last layer's input
            last_layer = layers[stage.last]
            layers[stage.last] = replace(
                last_layer, saved_bytes=max(last_layer.saved_bytes, profile.boundary_bytes(stage.last))
            )
    return replace(profile, layers=tuple(layers))


def _recomputed_segment(segment: tuple[LayerProfile, ...], kept: int) -> list[LayerProfile]:
    """Returns the layers of a recomputed segment that keeps `kept` bytes until its backward pass begins.

    While the backward pass runs through layer l, all that layers up to l have saved is allocated.
    """
    layers: list[LayerProfile] = []
    saved = 0
    for layer in segment:
        saved += layer.saved_bytes
        backward_s = layer.backward_s + layer.forward_s
        fixed_s = layer.backward_s * layer.backward_fixed + layer.forward_s * layer.forward_fixed
        layers.append(
            _changed(
                layer,
                backward_s=backward_s,
                backward_fixed=fixed_s / backward_s if backward_s else 0.0,
                saved_bytes=0 if layers else kept,
                working_bytes=layer.working_bytes + saved,
                backward_bytes=layer.backward_bytes + saved if layer.backward_bytes else 0,
                recomputed_flops=layer.flops,
            )
        )
    return layers


def _changed(layer: LayerProfile, **numbers: float) -> LayerProfile:
    """Returns the layer with other numbers, which follow from checked ones: `replace` would check all fields again, for
    each layer of each plan of a search."""
    found = object.__new__(LayerProfile)
    vars(found).update(vars(layer), **numbers)
    return found
