"""The keys of `planner=autoddl`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, get_args

from harness.sbp.costs import Paths, Splits
from harness.sbp.optimum import Ends

if TYPE_CHECKING:
    from planners.autoddl.planner import AutoDDL

SEARCHES = ("exact", "exhaustive", "random", "metropolis_hastings", "coordinate_descent")
DRAWING = SEARCHES[2:]
"""Those that draw plans."""
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
    """GB (1e9 bytes) that a device has for everything that the memory ledger counts; null: its memory. For
    search=exact."""
    evaluations: int = 10_000
    """Plans that random, metropolis_hastings and coordinate_descent look at."""
    seed: int = 0
    """Of the same three."""


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
    if config.seed < 0:
        wrong.append(f"planner.seed {config.seed}   must be at least 0   -> planner.seed=0")
    if config.memory_gb is not None and not config.memory_gb > 0:
        wrong.append(f"planner.memory_gb {config.memory_gb:g}   must be above 0   -> planner.memory_gb=16")
    wrong += _unused(config)
    if wrong:
        raise ValueError("\n".join(wrong))


def _unused(config: Config) -> list[str]:
    """A line for each key that is set, and that the search would not look at."""
    found, unset = [], Config()
    for searches, keys in ((("exact",), ("memory_gb", "repeat")), (DRAWING, ("evaluations", "seed"))):
        for key in keys if config.search in SEARCHES and config.search not in searches else ():
            value, plain = getattr(config, key), getattr(unset, key)
            if value != plain:
                what = f"is for planner.search={' or '.join(searches)}, planner.search is {config.search}"
                typed = "null" if plain is None else str(plain).lower()
                found.append(f"planner.{key} {value}   {what}   -> planner.{key}={typed}")
    return found
