"""Layers that are all-gathered together: used by the session to shard, by memory model and schedule to predict."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from harness.core.model_profile import ModelProfile

if TYPE_CHECKING:
    from engines.fsdp.engine import Config

MIB = 2**20


def groups(sizes: Iterable[int], config: Config) -> list[list[int]]:
    """Numbers of layers, by their own bytes: as many neighbours together as `config.group_mb` allows.

    Those of 0 bytes are in no group.
    """
    found: list[list[int]] = []
    room = 0.0
    for number, size in enumerate(sizes):
        if not size:
            continue
        if not found or size > room:
            found.append([])
            room = config.group_mb * MIB
        found[-1].append(number)
        room -= size
    return found


def own_bytes(profile: ModelProfile) -> list[int]:
    """Return the bytes of each layer's parameters; 0 for a layer with shared ones, because the root gathers these."""
    return [0 if layer.tied else layer.param_bytes for layer in profile.layers]
