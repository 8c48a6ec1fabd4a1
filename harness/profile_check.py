"""What keeps a run from starting, once the model's profile is known."""

from __future__ import annotations

from omegaconf import DictConfig

from harness import check
from harness.interfaces import Capabilities
from harness.problem import Problem
from harness.profile import ModelProfile


def against_profile(config: DictConfig, can: Capabilities, profile: ModelProfile, model_given: bool) -> list[Problem]:
    """What is wrong with the request now that the model's profile is known.

    `model_given`: the user chose a model. Without that, a stored profile decides which model is planned for.
    """
    found = []
    layers = len(profile.layers)
    pipeline = config.mesh.pipeline
    if can.pipeline and pipeline and pipeline > layers and not check.stated(config):
        what = f"needs at least {pipeline} layers, the model has {layers}"
        found.append(Problem(f"mesh.pipeline {pipeline}", what, f"mesh.pipeline={layers}"))
    if profile.skips and not can.skips:
        what = f"has {len(profile.skips)} skips, engine={config.engine.name} takes none"
        found.append(Problem(f"model {profile.model or config.model.name}", what, "engine=gpipe"))
    return found + (stored(config, profile, model_given) if config.profile else [])


def stored(config: DictConfig, profile: ModelProfile, model_given: bool) -> list[Problem]:
    """A profile from a file: is it one of what will run? Planned and simulated can be any."""
    key, dtype = f"profile {config.profile}", config.precision.dtype
    found = of_another_model(config, profile, model_given)
    if config.batch.size != check.batch_size(config, profile):
        count = config.batch.micro_batches * (config.mesh.data or 1)
        what = f"is for micro-batches of {profile.micro_batch} samples, this run has {config.batch.size / count:g}"
        found.append(Problem(key, what, _as_stored(config, profile)))
    if config.mode == "run" and not model_given:
        what = f"is of {_model(profile)}: without model= it is for planning and simulating"
        found.append(Problem(key, what, "mode=simulate, or model=NAME"))
    if config.mode == "run" and profile.dtype != dtype:
        what = f"is for {profile.dtype}, this run has {dtype}"
        found.append(Problem(key, what, f"precision.dtype={profile.dtype}"))
    return found


def of_another_model(config: DictConfig, profile: ModelProfile, model_given: bool) -> list[Problem]:
    """A profile from a file: is it one of the chosen model, by its name? If not, a plan of it helps nobody."""
    name = config.model.name
    if not model_given or profile.model == name or profile.model.startswith(f"{name}_"):
        return []
    what = f"is of {_model(profile)}, the model is {name}"
    return [Problem(f"profile {config.profile}", what, "leave model= out, or profile=")]


def _model(profile: ModelProfile) -> str:
    return profile.model or "a model without a name"


def _as_stored(config: DictConfig, profile: ModelProfile) -> str:
    """How the micro-batches become those of the profile: as many as the batch holds, or another batch."""
    count, rest = divmod(config.batch.size, profile.micro_batch * (config.mesh.data or 1))
    more = f"batch.micro_batches={count}, or " if count and not rest else ""
    return f"{more}batch.size={check.batch_size(config, profile)}"
