"""The keys of `planner=madpipe`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from planners.periodic.plans import wrong_duplex

if TYPE_CHECKING:
    from planners.madpipe.planner import MadPipe

PHASES = ("exact", "published")


@dataclass
class Config:
    name: str = "madpipe"
    """The planner."""
    allocation: str = "exact"
    """exact: fixed point without grids, and the best consecutive stages; published: the paper's Algorithm 1 alone."""
    iterations: int = 10
    """Of Algorithm 1 (K in the paper), for planner.allocation=published."""
    atomic: bool = True
    """Whether layers of a stage run as one block; false also lets them run apart, up to 40 layers, 12 on a device."""
    reassign: bool = True
    """Whether stages may change devices after the integer program."""
    limit_s: float = 8.0
    """Seconds for the integer programs together; then the best plan so far counts. The paper has 60."""
    duplex: str = "half"
    """cluster: as its links; half: a link is busy one way at a time, as in the paper; full: both ways at once."""


def build(config: Config) -> MadPipe:
    """The planner; raises ValueError as `check` does."""
    from planners.madpipe.planner import MadPipe

    check(config)
    return MadPipe(config)


def check(config: Config) -> None:
    """Raise ValueError with a line for each value that no run can have."""
    wrong = wrong_duplex(config.duplex)
    if config.allocation not in PHASES:
        what = f"is none of {', '.join(PHASES)}"
        wrong.append(f"planner.allocation {config.allocation}   {what}   -> planner.allocation={PHASES[0]}")
    if config.allocation == "published" and not config.atomic:
        what = "is for planner.allocation=exact, planner.allocation is published"
        wrong.append(f"planner.atomic false   {what}   -> planner.atomic=true")
    if config.iterations < 1:
        wrong.append(f"planner.iterations {config.iterations}   must be at least 1   -> planner.iterations=10")
    if not config.limit_s > 0:
        wrong.append(f"planner.limit_s {config.limit_s:g}   must be above 0   -> planner.limit_s=8")
    if wrong:
        raise ValueError("\n".join(wrong))
