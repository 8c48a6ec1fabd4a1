"""The schemes that mode=tune compares: each combination of the values of an engine's searched keys, and its planners.

engine=deepspeed        planner=balance    engine.zero=0    engine.checkpoint=never
                        planner=megatron              1                       always
                                                      2
                                                      3

An engine's `Config.SEARCHED` and `Config.PLANNERS` say which there are; a key that the user gives keeps its value.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from omegaconf import DictConfig, OmegaConf

from harness.checks import stored_profile
from harness.cli.compose import compose
from harness.config import registry
from harness.config.overrides import given
from harness.core.plan import Mesh
from harness.core.problem import CannotRun, apply, spelled
from harness.interfaces import Engine, Planner, Searched

Settings = tuple[tuple[str, Any], ...]
"""Keys and values that differ from the user's configuration: (("planner", "megatron"), ("engine.zero", 1))."""
RECOMPUTATION = ("engine.checkpoint", "engine.checkpoint_every")
DETAILS = (*RECOMPUTATION, "planner.by")
"""Keys that make no kind of scheme of their own: of each kind the best is shown."""


@dataclass(frozen=True)
class Scheme:
    """One combination, with its configuration, engine and planner; `open` are degrees that the mesh must have above 1,
    since `settings` give keys that mean nothing without."""

    settings: Settings
    config: DictConfig
    engine: Engine
    planner: Planner
    open: tuple[str, ...] = ()
    tensor: bool | None = None
    """Whether the mesh must have tensor shards (True), must not (False), or may (None)."""

    @cached_property
    def kind(self) -> str:
        """The kind of scheme in a table: "deepspeed zero=1", "sbp planner=megatron"."""
        own = [f"{key.removeprefix('engine.')}={spelled(value)}" for key, value in self.settings if key not in DETAILS]
        return " ".join([self.config.engine.name, *own])

    @cached_property
    def recompute(self) -> str:
        """The micro-batches of which whole stages are recomputed: "never", "except_last" or "always"."""
        return str(OmegaConf.select(self.config, "engine.checkpoint", default="never"))

    @cached_property
    def recomputation(self) -> str:
        """The value of the engine's key of recomputation; "never" for an engine without one."""
        return str(next((v for key in RECOMPUTATION if (v := OmegaConf.select(self.config, key)) is not None), "never"))

    def takes(self, mesh: Mesh) -> bool:
        """Whether the scheme is one of its own on this mesh."""
        shards = self.tensor is None or self.tensor == (mesh.tensor > 1)
        return shards and all(getattr(mesh, degree) > 1 for degree in self.open)


def of(config: DictConfig, overrides: Sequence[str]) -> list[Scheme]:
    """All schemes of the configured engine, the user's own first."""
    return [
        scheme for planned, tensor in _planned(config, overrides) for scheme in _combined(*planned, overrides, tensor)
    ]


def default_planner(engine: str) -> str | None:
    """The planner of an engine that runs no plan of the default one; None for all other engines."""
    planners = registry.planners(engine)
    return planners[0] if planners and planners[0] != "balance" else None


def _planned(config: DictConfig, overrides: Sequence[str]) -> Iterator[tuple[tuple[Settings, DictConfig], bool | None]]:
    """The configuration with each planner, and whether it is for meshes with tensor shards.

    Where planners that split matmuls and others are searched, those plan with shards alone, the others without; of
    several that split, the first plans without shards, too.
    """
    names = [config.planner.name] if given(overrides, "planner") else list(registry.planners(config.engine.name))
    names = names or [config.planner.name]
    splitting = [registry.splits_matmuls(name) for name in names]
    for number, (name, splits) in enumerate(zip(names, splitting, strict=True)):
        tensor = splits if not all(splitting) else None if number == 0 else True
        if not any(splitting) and config.mesh.tensor not in (None, 1):
            tensor = None  # and it is said why there is no plan
        if name == config.planner.name:
            yield ((), config), tensor
            continue
        typed = apply(overrides, {"planner": name})
        try:
            other = compose(typed)
            stored_profile.follow(other, typed)
        except CannotRun:
            continue  # its keys are those of another planner
        yield ((("planner", name),), other), tensor


def _combined(
    settings: Settings, config: DictConfig, overrides: Sequence[str], tensor: bool | None
) -> Iterator[Scheme]:
    searched = {f"{group}.{key}": one for group in ("engine", "planner") for key, one in _searched(group, config)}
    open_keys = {key: one for key, one in searched.items() if not given(overrides, key)}
    own = {key: OmegaConf.select(config, key) for key in open_keys}
    values = [list(dict.fromkeys((own[key], *one.values))) for key, one in open_keys.items()]
    planner: Planner = registry.build("planner", config.planner)
    engines: dict[str, Engine] = {}  # by their keys: what a search knows of the schedules of one holds for its schemes
    for chosen in itertools.product(*values):
        other = {key: value for key, value in zip(open_keys, chosen, strict=True) if value != own[key]}
        made = config.copy()
        for key, value in other.items():
            OmegaConf.update(made, key, value)
        if registry.problems("engine", made.engine):
            continue  # values that exclude one another
        asked = tuple(dict.fromkeys(open_keys[key].degree for key in other if open_keys[key].degree))
        moved = any(key.startswith("planner.") for key in other)
        of_engine = str({key: value for key, value in other.items() if not key.startswith("planner.")})
        if of_engine not in engines:
            engines[of_engine] = registry.build("engine", made.engine)
        yield Scheme(
            (*settings, *other.items()),
            made,
            engines[of_engine],
            registry.build("planner", made.planner) if moved else planner,
            asked,
            tensor,
        )


def _searched(group: str, config: DictConfig) -> list[tuple[str, Searched]]:
    found: dict[str, Searched] = getattr(registry.schemas()[group, config[group].name], "SEARCHED", {})
    return list(found.items())
