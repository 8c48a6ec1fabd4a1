"""Whether all ranks have the same plan: with two plans they would wait for each other in different collectives."""

from __future__ import annotations

import hashlib
from typing import Any

import torch.distributed as dist

from harness.core.plan import Plan


class Disagreement(RuntimeError):
    """Ranks have different plans."""


def check_same_plan(plan: Plan) -> None:
    """Collective. Raises Disagreement in every rank, with the first rank and key that differ from rank 0's."""
    own = {
        "mesh": plan.mesh,
        "micro_batches": plan.micro_batches,
        "stages": plan.stages,
        "recompute": plan.recompute,
        **{f"strategy of {name}": numbers for name, numbers in plan.strategy.items()},
        **{f"layout of {name}": places for name, places in plan.layouts.items()},
    }
    digests = _gathered(hashlib.blake2b(repr(own).encode(), digest_size=16).digest())
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is None:
        return
    plans = _gathered(own)
    key = next((key for key in {**plans[0], **plans[other]} if plans[0].get(key) != plans[other].get(key)), "order")
    raise Disagreement(
        f"ranks have different plans: {key} is {plans[0].get(key)} in rank 0, {plans[other].get(key)} in rank {other} "
        "-> start all of them with the same plan.json"
    )


def _gathered(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
