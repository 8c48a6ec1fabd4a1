"""Buffers and other state that layers of several stages share: right while no forward pass changes it.

    stage 0   layer 0   cosines --\
                                   one buffer in the model, a copy on each device
    stage 1   layer 3   cosines --/

What a forward pass changes is refused: copies would differ, and two stages of one device would change it in another
order than the whole model. It is refused before the run where the profile says so, or after the step that did it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.plan import Plan
from harness.core.problem import Fix, Problem

HINT = "one of its own for each layer, or all of them in one stage"
SHOWN = 3
"""Layers that a message names."""


class Home(NamedTuple):
    """Where a layer is."""

    stage: int
    device: int


def homes(plan: Plan) -> list[Home]:
    """Returns the home of each layer."""
    return [Home(number, stage.device) for number, stage in enumerate(plan.stages) for _ in range(stage.layers)]


def refused(plan: Plan, profile: ModelProfile) -> list[Problem]:
    """Returns a problem for all that layers of several stages share and a forward pass changes."""
    owners, home = _written(profile.layers), homes(plan)
    problems = []
    for name, numbers in owners.items():
        if len({home[number] for number in numbers}) > 1:
            places = [(profile.layers[number].name, home[number]) for number in numbers]
            problems.append(not_to_be_copied(name, places, together(plan, list(owners.values()))))
    return problems


def not_to_be_copied(name: str, places: Sequence[tuple[str, Home]], fixes: tuple[Fix, ...] = ()) -> Problem:
    """Returns the problem of a buffer or an attribute; `places` are the layers that share it, each with its home."""
    copied = len({home.device for _, home in places}) > 1
    wheres = [f"device {home.device}" if copied else f"stage {home.stage}" for _, home in places]
    shown = [f"layer {layer!r} ({where})" for (layer, _), where in zip(places[:SHOWN], wheres, strict=False)]
    shown += [f"{len(places) - SHOWN} more"] if len(places) > SHOWN else []
    owners = f"{', '.join(shown[:-1])} and {shown[-1]}"
    why = "copies would differ" if copied else "two stages change it in another order than the whole model"
    message = f"has {name!r}, which a forward or backward pass changes and {owners} share: {why}"
    return Problem("model", None, message, fixes, HINT)


def _written(layers: Sequence[LayerProfile]) -> dict[str, list[int]]:
    """Returns the numbers of the layers that share what a forward pass changes, by its name."""
    owners: dict[str, list[int]] = {}
    for number, layer in enumerate(layers):
        for buffer in layer.shared_buffers:
            if buffer.written:
                owners.setdefault(buffer.name, []).append(number)
    return owners


def together(plan: Plan, groups: Sequence[Sequence[int]]) -> tuple[Fix, ...]:
    """The fix that leaves each group of layers in one stage; none where the layers then are one stage."""
    layers, wanted = plan.stages[-1].last + 1, len(plan.stages)
    free = [cut for cut in range(1, layers) if not any(group[0] < cut <= group[-1] for group in groups)]
    stages = min(wanted, len(free) + 1)
    if stages < 2 or plan.pattern or wanted != plan.mesh.pipeline:
        return ()
    cuts = [0, *(free[number * (len(free) + 1) // stages - 1] for number in range(1, stages)), layers]
    balance = [end - start for start, end in pairwise(cuts)]
    fewer: Fix = {"mesh.pipeline": stages} if stages < wanted else {}
    return ({"planner": "given", "planner.balance": balance, **fewer},)
