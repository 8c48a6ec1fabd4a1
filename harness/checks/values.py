"""Check values that no run can have, and that optional libraries are installed in the right version.

Checks that need the model, the cluster or the engine come later. Libraries are looked up without importing them.
"""

from __future__ import annotations

import functools
import math
import os
import reprlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from operator import ge
from typing import Any

from omegaconf import DictConfig, OmegaConf

from harness.checks import mesh
from harness.config import precision_words, registry
from harness.config.schema import AUTOCAST, DTYPES
from harness.core.memory_model import NAMED
from harness.core.problem import LEAVE_OUT, Fix, Problem, spelled
from harness.core.serialization import LARGEST_INT
from harness.core.value_checks import closest, one_of
from harness.export import systems
from harness.interfaces import Engine
from harness.launch.slurm_step import CHOICES
from harness.launch.supervisor import START_S
from harness.simulator.layer_times import COSTS

MODES = ("run", "plan", "simulate", "profile", "calibrate", "tune")
"""Those of one run."""
SEVERAL = {"race": "engine=...", "fit": "model=... cluster=..."}
"""Modes of several runs, and how they are called (`harness.races`, `harness.sweep.fit`)."""
OPTIMIZERS = ("sgd", "adam", "adamw", "nadam", "muon")
AT_LEAST_1 = ("batch.micro_batches", "batch.micro_batch_size", "steps", "mesh.data", "mesh.pipeline", "mesh.tensor")
AT_LEAST_0 = (
    "warmup",
    "seed",
    "optimizer.momentum",
    "optimizer.weight_decay",
    "launch.checkpoint_every",
    "launch.grace_s",
    "tune.verify",
)
ABOVE_0 = ("optimizer.lr", "launch.timeout_s", "race.minutes")
AT_MOST = {
    "batch.size": 10**9,  # its divisors are found one by one
    "batch.micro_batches": 2**16,  # a schedule lists every task
    "steps": 10**9,
    "warmup": 10**9,
    "seed": LARGEST_INT,
    "launch.timeout_s": 10**7,  # some months: the operating system waits no longer than some centuries
    "launch.grace_s": 10**7,
}
START = {"launch.timeout_s": START_S}
"""What stands for a default that is null, and follows the run."""
LARGEST_OF_MODEL = 2**24
"""Largest whole number of a model's or data set's keys: with larger ones bytes are beyond 64 bits."""
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
    typed: Any = OmegaConf.to_container(config, resolve=True)
    found = [*_unusable(typed)]
    if found:
        return found  # the other checks compute with the values
    found += _names(typed)
    samples = max(1, config.batch.micro_batches) * max(1, config.mesh.data or 1)  # one in each micro-batch
    found += _numbers(typed, ("batch.size",), "must be at least 1", samples, lambda value: value >= 1)
    found += _numbers(typed, AT_LEAST_1, "must be at least 1", 1, lambda value: value >= 1)
    found += _numbers(typed, AT_LEAST_0, "must be at least 0", 0, lambda value: value >= 0)
    alone = "is a race of one: 0 for none, or at least 2"
    found += _numbers(typed, ("tune.verify",), alone, 3, lambda value: value != 1)
    found += _numbers(typed, ABOVE_0, "must be above 0", None, lambda value: value > 0)
    found += _moments(config)
    known = {problem.key for problem in found}
    for key in (key for key in AT_MOST if key not in known):
        found += _numbers(typed, (key,), f"must be at most {AT_MOST[key]}", None, functools.partial(ge, AT_MOST[key]))
    spread = "is a relative spread, from 0 to 1"
    found += _numbers(typed, ("jitter",), spread, 0.05, lambda value: 0 <= value <= 1)
    found += _profiled(config)
    if config.profile is not None and not os.path.isfile(config.profile):
        found.append(Problem("profile", config.profile, "is not a file", ({"profile": LEAVE_OUT},)))
    if config.trace is not None and config.mode != "profile":
        fixes: tuple[Fix, ...] = ({"mode": "profile"}, {"trace": LEAVE_OUT})
        found.append(Problem("trace", config.trace, f"is for mode=profile, not for mode={config.mode}", fixes))
    elif config.trace is not None and not os.path.isfile(config.trace):
        found.append(Problem("trace", config.trace, "is not a file", ({"trace": LEAVE_OUT},)))
    if config.trace is not None and config.profile is not None:
        message = "has layer times of its own: one of the two"
        found.append(Problem("profile", config.profile, message, ({"profile": LEAVE_OUT}, {"trace": LEAVE_OUT})))
    found += systems.problems(config)
    if config.mode == "calibrate":
        return found  # no plug-in has a say in it
    for group in registry.FOLDERS:
        found += registry.problems(group, config[group])
    if not any(problem.key.startswith(("data.", "model.")) for problem in found):
        found += registry.unsuited(config.data, config.model)
    return found + ([] if config.mode == "profile" else _stages(config))


def _moments(config: DictConfig) -> list[Problem]:
    """What an optimizer keeps of older gradients must be a share below 1, and of an optimizer that has it."""
    optimizer, found = config.optimizer, []
    if optimizer.nesterov and (optimizer.name != "sgd" or not optimizer.momentum):
        fixes: list[Fix] = [{"optimizer.nesterov": False}]
        fixes += [{"optimizer.momentum": 0.9}] if optimizer.name == "sgd" else []
        if optimizer.name.startswith("adam"):
            fixes.append({"optimizer.name": "nadam", "optimizer.nesterov": False})
        message = "is for optimizer.name=sgd with optimizer.momentum"
        found.append(Problem("optimizer.nesterov", True, message, tuple(fixes)))
    if optimizer.momentum and optimizer.name != "sgd":
        meant = optimizer.beta1 is None and 0 < optimizer.momentum < 1
        fixes = [{"optimizer.beta1": optimizer.momentum, "optimizer.momentum": 0.0}] if meant else []
        fixes.append({"optimizer.momentum": 0.0})
        message = f"is of optimizer.name=sgd, {optimizer.name} has optimizer.beta1"
        found.append(Problem("optimizer.momentum", optimizer.momentum, message, tuple(fixes)))
    beta1 = optimizer.beta1
    if beta1 is not None and not 0 <= beta1 < 1:
        found.append(Problem("optimizer.beta1", beta1, "must be from 0 to below 1", ({"optimizer.beta1": None},)))
    elif beta1 is not None and optimizer.name == "sgd":
        fixes = [{"optimizer.momentum": beta1, "optimizer.beta1": None}, {"optimizer.beta1": None}]
        found.append(Problem("optimizer.beta1", beta1, "is of adam, adamw, nadam and muon", tuple(fixes)))
    return found


def _unusable(value: Any, key: str = "") -> Iterator[Problem]:
    """Values that no key can have, and that OmegaConf takes: lists in lists, and whole numbers that are too large."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _unusable(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        if nested := [item for item in value if isinstance(item, dict | list)]:
            yield Problem(key, None, f"holds {reprlib.repr(nested[0])}, a list of numbers or texts holds no other one")
        for item in value:
            yield from _unusable(item, key) if not isinstance(item, dict | list) else ()
    elif isinstance(value, int) and key not in AT_MOST:
        most = LARGEST_OF_MODEL if key.startswith(("model.", "data.")) else LARGEST_INT
        if abs(value) > most:
            digits = len(str(abs(value)))
            yield Problem(key, None, f"holds a whole number of {digits} digits, it must be at most {most}")


def _stages_of_one_device(balance: list[int], places: int) -> list[Problem]:
    """Those of an engine that has several on one device."""
    if len(balance) == places:
        return []
    message = f"has {len(balance)} stages, engine.stages is {places}"
    return [Problem("planner.balance", balance, message, ({"engine.stages": len(balance)},))]


def _stages(config: DictConfig) -> list[Problem]:
    """Stages that are given one by one must be those of the mesh, and of an engine that has stages."""
    balance, pipeline = mesh.given_balance(config), config.mesh.pipeline
    if min(balance, default=0) < 1 or registry.problems("engine", config.engine):
        return []  # reported by planner and engine, or there are none
    engine: Engine = registry.build("engine", config.engine)
    if not engine.capabilities.pipeline and (places := len(engine.placement(1))) > 1:
        return _stages_of_one_device(balance, places)
    each = len(engine.placement(pipeline)) // pipeline if pipeline else 0
    if each > 1 and pipeline * each != len(balance):
        message = f"planner.balance {spelled(balance)} has {len(balance)} stages, the engine has {each} on each device"
        return [Problem("mesh.pipeline", pipeline, message, ({"mesh.pipeline": max(1, len(balance) // each)},))]
    if each <= 1 and pipeline != len(balance):
        message = f"planner.balance {spelled(balance)} has {len(balance)} stages"
        hint = f"as many numbers in planner.balance: {pipeline}" if pipeline else ""
        return [Problem("mesh.pipeline", pipeline, message, ({"mesh.pipeline": LEAVE_OUT},), hint)]
    if len(balance) > 1 and not engine.capabilities.pipeline:
        message = f"has {len(balance)} stages, engine={config.engine.name} has 1"
        setting = engine.capabilities.disabled_by.get("pipeline")
        instead: Fix = setting.instead if setting else {"engine": "gpipe"}
        return [Problem("planner.balance", balance, message, (instead, {"planner.balance": [sum(balance)]}))]
    return []


def _value(typed: dict[str, Any], key: str) -> Any:
    """The value of a key; None where there is no such key."""
    found: Any = typed
    for part in key.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def _names(typed: dict[str, Any]) -> list[Problem]:
    given = ((key, _value(typed, key), known) for key, known in NAMES.items())
    found = [problem for key, value, known in given if value is not None for problem in one_of(key, value, known)]
    return [
        _as_mode(one) if one.key == "mode" else _as_precision(one) if one.key.startswith("precision.") else one
        for one in found
    ]


def _as_mode(problem: Problem) -> Problem:
    """Say that mode=race and mode=fit are some, too, but not of one run."""
    if problem.value in SEVERAL:
        hint = f"python run.py mode={problem.value} {SEVERAL[problem.value]}"
        return Problem("mode", problem.value, "has several runs, and this is one", hint=hint)
    found = replace(problem, message=f"{problem.message}, {', '.join(SEVERAL)}")
    meant = closest(str(problem.value), [*MODES, *SEVERAL])
    return replace(found, fixes=(), hint=f"mode={meant}") if meant in SEVERAL else found


def _as_precision(problem: Problem) -> Problem:
    """Suggest the format that was meant, where the name says one: as words, float8 and float64 are similar."""
    meant = precision_words.meant(str(problem.value), NAMES[problem.key])
    return replace(problem, fixes=({problem.key: meant},)) if meant else problem


def _numbers(
    typed: dict[str, Any], keys: tuple[str, ...], message: str, fix: float | None, right: Callable[[Any], bool]
) -> list[Problem]:
    """A key that is null has no number to check; `fix` None stands for the key's default."""
    found = []
    for key in keys:
        value = _value(typed, key)
        finite = isinstance(value, int) or (value is not None and math.isfinite(value))  # any int, however large
        if value is None or (finite and right(value)):
            continue
        wrong = message if finite else "must be finite"
        found.append(Problem(key, value, wrong, ({key: _default(key) if fix is None else fix},)))
    return found


def _profiled(config: DictConfig) -> list[Problem]:
    """Steps of launch.profiler that the run does not have."""
    steps, end = list(config.launch.profiler), config.warmup + config.steps
    there = [step for step in steps if 0 <= step < end]
    if there == steps:
        return []
    message = f"has steps that are not there: the last one is {end - 1} (warmup + steps - 1)"
    return [Problem("launch.profiler", steps, message, ({"launch.profiler": there},))]


def _default(key: str) -> Any:
    from harness.config.schema import Config

    return START.get(key, OmegaConf.select(OmegaConf.structured(Config), key))


def not_installed(engine: str, module: str, command: str, series: str = "") -> list[Problem]:
    """Return a problem that names the `command` to install `module`, or nothing if it is installed; for an engine's
    `check`.

    `module` is a name without dots, as `import` and `pip` take it ("torchgpipe"). With `series` ("0.19") only its
    versions will do: 0.19.8, and not 0.20.0.
    """
    if find_spec(module) is None:
        return [Problem("engine", engine, "is not installed", hint=command)]
    there = _version(module)
    if not series or f"{there}.".startswith(f"{series}."):
        return []
    return [Problem("engine", engine, f"needs {module} {series}, {there} is installed", hint=command)]


def _version(module: str) -> str:
    try:
        return version(module)
    except PackageNotFoundError:  # a bare source tree
        return "an unknown version"
