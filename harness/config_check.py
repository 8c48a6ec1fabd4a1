"""Numbers and names that no run can have. What depends on model, cluster and engine is checked once these are known."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from harness import check, registry
from harness.costs import COSTS
from harness.interfaces import Engine
from harness.memory import NAMED
from harness.precision import AUTOCAST, DTYPES
from harness.problem import Problem
from harness.srun import CHOICES

MODES = ("run", "plan", "simulate", "profile", "calibrate", "tune")
OPTIMIZERS = ("sgd", "adam", "adamw")
LARGEST_SEED = 2**63 - 1
AT_LEAST_1 = ("batch.size", "batch.micro_batches", "steps", "mesh.data", "mesh.pipeline", "mesh.tensor")
AT_LEAST_0 = ("warmup", "seed", "optimizer.momentum", "optimizer.weight_decay", "launch.checkpoint_every",
              "launch.grace_s")  # fmt: skip
ABOVE_0 = ("optimizer.lr", "launch.timeout_s")
NAMES = {
    "mode": MODES,
    "costs": COSTS,
    "memory": ("auto", *NAMED),
    "launch.ranks": CHOICES,
    "optimizer.name": OPTIMIZERS,
    "precision.dtype": DTYPES,
    "precision.autocast": AUTOCAST,
}


def problems(config: DictConfig) -> list[Problem]:
    """Everything wrong with a complete configuration that can be seen without model and cluster."""
    found = [*_names(config)]
    found += _numbers(config, AT_LEAST_1, "must be at least 1", 1, lambda value: value >= 1)
    found += _numbers(config, AT_LEAST_0, "must be at least 0", 0, lambda value: value >= 0)
    found += _numbers(config, ABOVE_0, "must be above 0", None, lambda value: value > 0)
    found += _numbers(config, ("seed",), f"must be at most {LARGEST_SEED}", 0, lambda value: value <= LARGEST_SEED)
    spread = "is a relative spread, from 0 to 1"
    found += _numbers(config, ("jitter",), spread, 0.05, lambda value: 0 <= value <= 1)
    if config.profile is not None and not Path(config.profile).is_file():
        found.append(Problem(f"profile {config.profile}", "is not a file"))
    if config.mode == "calibrate":
        return found  # no plug-in has a say in it
    for group in registry.FOLDERS:
        found += registry.problems(group, config[group])
    if not any(problem.key.startswith(("data.", "model.")) for problem in found):
        found += registry.unsuited(config.data, config.model)
    return found + ([] if config.mode == "profile" else _stages(config))


def closest(typed: str, known: Sequence[str]) -> str:
    """The known word that was probably meant: one that begins so, else a similar one, else the first.

    Capitals count as small letters.
    """
    typed = typed.lower()
    small = {word.lower(): word for word in known}
    begun = [word for word in small if word.startswith(typed)]
    return small[(begun or difflib.get_close_matches(typed, list(small), n=1) or list(small))[0]]


def _stages(config: DictConfig) -> list[Problem]:
    """Stages that are given one by one must be those of the mesh, and of an engine that has stages."""
    balance, pipeline = check.stated(config), config.mesh.pipeline
    if min(balance, default=0) < 1 or registry.problems("engine", config.engine):
        return []  # told elsewhere, or there are none
    engine: Engine = registry.build("engine", config.engine)
    each = len(engine.placement(pipeline)) // pipeline if pipeline else 0
    if each > 1 and pipeline * each != len(balance):
        what = f"{check.balance_key(balance)} has {len(balance)} stages, the engine has {each} on each device"
        return [Problem(f"mesh.pipeline {pipeline}", what, f"mesh.pipeline={max(1, len(balance) // each)}")]
    if each <= 1 and pipeline != len(balance):
        mend = f"leave mesh.pipeline out, or as many numbers in planner.balance: {pipeline}"
        what = f"{check.balance_key(balance)} has {len(balance)} stages"
        shown = "null" if pipeline is None else pipeline
        return [Problem(f"mesh.pipeline {shown}", what, mend if pipeline else "leave mesh.pipeline out")]
    if len(balance) > 1 and not engine.capabilities.pipeline:
        what = f"has {len(balance)} stages, engine={config.engine.name} has 1"
        instead = engine.capabilities.because.get("pipeline")
        mend = f"{instead.instead if instead else 'engine=gpipe'}, or planner.balance=[{sum(balance)}]"
        return [Problem(check.balance_key(balance), what, mend)]
    return []


def _names(config: DictConfig) -> list[Problem]:
    found = []
    for key, known in NAMES.items():
        value = OmegaConf.select(config, key)
        if value is None or value in known:
            continue
        found.append(Problem(f"{key} {value}", f"is not one of {', '.join(known)}", f"{key}={closest(value, known)}"))
    return found


def _numbers(
    config: DictConfig, keys: tuple[str, ...], what: str, mend: float | None, right: Callable[[Any], bool]
) -> list[Problem]:
    """A key that is null has no number to check; `mend` None stands for the key's default."""
    found = []
    for key in keys:
        value = OmegaConf.select(config, key)
        if value is None or (math.isfinite(value) and right(value)):
            continue
        typed = _default(key) if mend is None else mend
        found.append(Problem(f"{key} {value}", what if math.isfinite(value) else "must be finite", f"{key}={typed}"))
    return found


def _default(key: str) -> Any:
    from harness.config import Config

    return OmegaConf.select(OmegaConf.structured(Config), key)
