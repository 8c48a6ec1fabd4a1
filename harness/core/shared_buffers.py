"""Buffers that layers on several devices share: each device has a copy, right while no forward pass changes it.

    device 0   layer 0   cosines --\
                                    one buffer in the model, a copy on each device
    device 1   layer 3   cosines --/

One that a forward pass changes is refused: before the run where the profile says so, or after the step that did it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.plan import Plan
from harness.core.problem import Fix, Problem

HINT = "a buffer of its own for each layer, or all of them on one device"
SHOWN = 3
"""Layers that a message names."""


def refused(plan: Plan, profile: ModelProfile) -> list[Problem]:
    """Returns a problem for each buffer that layers on several devices share and a forward pass changes."""
    owners = _written(profile.layers)
    device_of = [stage.device for stage in plan.stages for _ in range(stage.layers)]
    problems = []
    for name, numbers in owners.items():
        if len({device_of[number] for number in numbers}) > 1:
            places = [(profile.layers[number].name, device_of[number]) for number in numbers]
            problems.append(not_to_be_copied(name, places, _together(plan, list(owners.values()))))
    return problems


def not_to_be_copied(name: str, places: Sequence[tuple[str, int]], fixes: tuple[Fix, ...] = ()) -> Problem:
    """Returns the problem of a buffer; `places` are the layers that share it, each with its device."""
    shown = [f"layer {layer!r} (device {device})" for layer, device in places[:SHOWN]]
    shown += [f"{len(places) - SHOWN} more"] if len(places) > SHOWN else []
    owners = f"{', '.join(shown[:-1])} and {shown[-1]}"
    message = f"has a buffer {name!r} that a forward pass changes and that {owners} share: copies would differ"
    return Problem("model", None, message, fixes, HINT)


def _written(layers: Sequence[LayerProfile]) -> dict[str, list[int]]:
    """Returns the numbers of the layers that share a buffer that a forward pass changes, by its name."""
    owners: dict[str, list[int]] = {}
    for number, layer in enumerate(layers):
        for buffer in layer.shared_buffers:
            if buffer.written:
                owners.setdefault(buffer.name, []).append(number)
    return owners


def _together(plan: Plan, groups: Sequence[Sequence[int]]) -> tuple[Fix, ...]:
    """Returns the fix that leaves each group of layers in one stage; none where the layers then are one stage."""
    layers, wanted = plan.stages[-1].last + 1, len(plan.stages)
    free = [cut for cut in range(1, layers) if not any(group[0] < cut <= group[-1] for group in groups)]
    stages = min(wanted, len(free) + 1)
    if stages < 2 or plan.pattern or wanted != plan.mesh.pipeline:
        return ()
    cuts = [0, *(free[number * (len(free) + 1) // stages - 1] for number in range(1, stages)), layers]
    balance = [end - start for start, end in pairwise(cuts)]
    fewer: Fix = {"mesh.pipeline": stages} if stages < wanted else {}
    return ({"planner": "given", "planner.balance": balance, **fewer},)
