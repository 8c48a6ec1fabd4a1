"""Stages of a transformer as roles of their layers, for systems that know transformers only.

embedding, position, block_0, block_1 | block_2, block_3, norm, head
E          E         t        t         t        t        n     L
"""

from __future__ import annotations

import re

from harness.core.problem import Fix, Problem
from harness.export.planned import Planned

ROLES = (("embedding", "E"), ("position", "E"), (r"block_\d+", "t"), ("norm", "n"), ("head", "L"))


def roles(planned: Planned) -> list[str]:
    """The roles of the layers of each stage: ["EEtt", "ttnL"]."""
    names = [layer.name for layer in planned.profile.layers]
    return ["".join(map(_role, names[stage.first : stage.last + 1])) for stage in planned.plan.stages]


def blocks(planned: Planned) -> list[int]:
    """Number of transformer layers of each stage."""
    return [stage.count("t") for stage in roles(planned)]


def even_balance(planned: Planned) -> list[int]:
    """Numbers of layers of stages with about equally many transformer layers; none for fewer of these than stages."""
    whole, stages = "".join(roles(planned)), len(planned.plan.stages)
    each, more = divmod(whole.count("t"), stages)
    balance = [each + (number < more) for number in range(stages)] if each else []
    for end, kinds in ((0, "E"), (-1, "nL")) if each else ():
        balance[end] += sum(map(whole.count, kinds))
    return balance


def refused(planned: Planned, system: str, models: tuple[str, ...]) -> list[Problem]:
    """A model that is none of `models`, by name and by the names of its layers."""
    name, whole = str(planned.config.model.name), "".join(roles(planned))
    return [] if name in models and re.fullmatch("E+t+nL", whole) else [no_model(name, system, models)]


def no_model(name: str, system: str, models: tuple[str, ...]) -> Problem:
    """A model that is none of `models`."""
    message = f"is not a model of {system}, whose layers are those of {', '.join(models)}"
    fixes: tuple[Fix, ...] = tuple({"model": one} for one in models)
    return Problem("model", name, message, fixes)


def _role(name: str) -> str:
    return next((role for pattern, role in ROLES if re.fullmatch(pattern, name)), "?")
