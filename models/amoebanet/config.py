"""The keys of `model=amoebanet`."""

from __future__ import annotations

from dataclasses import dataclass

from harness.core.problem import Problem
from models.config_ranges import at_least

SHRINK = 32
"""The last cells see 1/32 of the image's side: the stem and the reduction cells halve it five times."""
GROUPS = 3
"""Groups of normal cells, with a reduction cell between two groups."""
BOTTLENECK = 4
"""The bottlenecks of a cell have a quarter of its channels; the smallest cell has D / 2."""
TASK = "classification"
"""The task that the model is trained for."""


@dataclass
class Config:
    """AmoebaNet-D (L, D) of torchgpipe's section 4.2.1. The default is small: it trains on a laptop."""

    name: str = "amoebanet"
    """The network: models/amoebanet."""
    layers: int = 3
    """L, the number of normal cells; a multiple of 3. The network has L + 6 layers."""
    channels: int = 32
    """D, the channels of the first normal cells; a multiple of 8."""
    size: int = 64
    """Width and height of an image in pixels; a multiple of 32, at least 64. The papers have 224."""
    classes: int = 10
    """Number of classes; the papers have 1000."""


def check(config: Config) -> list[Problem]:
    """Numbers that no model can have."""
    groups = f"there are {GROUPS} groups of normal cells, all of one length"
    narrowest = f"the first cell has half of it, its bottlenecks a quarter of that, {config.channels / 8:g}"
    side = f"five halvings leave {config.size / SHRINK:g} pixels a side, there must be whole ones, at least 2"
    return [
        *_multiple("layers", config.layers, GROUPS, GROUPS, groups),
        *_multiple("channels", config.channels, 2 * BOTTLENECK, 2 * BOTTLENECK, narrowest),
        *_multiple("size", config.size, SHRINK, 2 * SHRINK, side),
        *at_least(config, "classes", 2),
    ]


def _multiple(key: str, number: int, factor: int, least: int, why: str) -> list[Problem]:
    """A problem if `number` is no multiple of `factor`, or below `least`; the fix is the next that is right."""
    if number >= least and number % factor == 0:
        return []
    right = max(least, -(-number // factor) * factor)
    message = f"must be a multiple of {factor}, at least {least}: {why}"
    return [Problem(f"model.{key}", number, message, ({f"model.{key}": right},))]
