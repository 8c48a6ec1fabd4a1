"""The keys of `planner=autoddl`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, get_args

from harness.sbp.costs import Paths, Splits
from harness.sbp.optimum import Ends

if TYPE_CHECKING:
    from planners.autoddl.planner import AutoDDL

SEARCHES = ("exact", "exhaustive", "random", "metropolis_hastings", "coordinate_descent")
LARGEST = 10**7
"""Plans that an exhaustive search may look at where no number of evaluations is given."""


@dataclass
class Config:
    splits_products: ClassVar[bool] = True  # and asks for no layer times

    name: str = "autoddl"
    """The planner."""
    search: str = "exact"
    """exact: the proven optimum; exhaustive, random, metropolis_hastings or coordinate_descent: those of the paper."""
    paths: str = "mixed"
    """Between products. mixed: all-to-all only over the devices that change sides; paper: over all, as in its costs."""
    ends: str = "free"
    """free: the input lies as its layer wants it and needs no gradient, the output stays where it is; batch_split: both
    are split by samples alone, and have gradients."""
    splits: str = "even"
    """even: only what divides; power_of_two: and p1, p2 powers of two; any: parts may differ (planning only)."""
    repeat: bool = False
    """Whether repeated layers are split alike, as in the paper."""
    max_replicas: int | None = None
    """The largest p0, the paper's limit of memory; null: none."""
    memory_gb: float | None = None
    """GB for weights, gradients, optimizer and inputs of products; null: a device's memory. For search=exact."""
    evaluations: int = 10_000
    """Plans that a search of the paper looks at."""
    seed: int = 0
    """Of random searches."""


def build(config: Config) -> AutoDDL:
    """The planner; raises ValueError as `check` does."""
    from planners.autoddl.planner import AutoDDL

    check(config)
    return AutoDDL(config)


def check(config: Config) -> None:
    """Raise ValueError with a line for each value that no run can have."""
    choices = {"search": SEARCHES, "paths": get_args(Paths), "ends": get_args(Ends), "splits": get_args(Splits)}
    wrong = [
        f"planner.{key} {getattr(config, key)}   is none of {', '.join(known)}   -> planner.{key}={known[0]}"
        for key, known in choices.items()
        if getattr(config, key) not in known
    ]
    for key in ("max_replicas", "evaluations"):
        value = getattr(config, key)
        if value is not None and value < 1:
            wrong.append(f"planner.{key} {value}   must be at least 1   -> planner.{key}=1")
    if config.memory_gb is not None and not config.memory_gb > 0:
        wrong.append(f"planner.memory_gb {config.memory_gb:g}   must be above 0   -> planner.memory_gb=16")
    if config.search != "exact":
        for key, unset in (("memory_gb", None), ("repeat", False)):
            if getattr(config, key) is not unset:
                what = f"is for planner.search=exact, planner.search is {config.search}"
                wrong.append(f"planner.{key} {getattr(config, key)}   {what}   -> planner.search=exact")
    if wrong:
        raise ValueError("\n".join(wrong))
