"""Check a request against the model's profile."""

from __future__ import annotations

from omegaconf import DictConfig

from harness.checks import mesh
from harness.config import registry
from harness.core.model_profile import ModelProfile
from harness.core.problem import LEAVE_OUT, Fix, Problem
from harness.interfaces import Capabilities


def against_profile(
    config: DictConfig, can: Capabilities, profile: ModelProfile, devices: int, model_given: bool
) -> list[Problem]:
    """Return the problems of a request that the model's profile shows, on a cluster of so many devices.

    `model_given`: the user chose a model. Without that, a stored profile decides which model is planned for.
    """
    found = unsplit(config, can, profile, devices)
    layers = len(profile.layers)
    pipeline = config.mesh.pipeline
    if not found and can.pipeline and pipeline and pipeline > layers and not mesh.given_balance(config):
        message = f"needs at least {pipeline} layers, the model has {layers}"
        found.append(Problem("mesh.pipeline", pipeline, message, ({"mesh.pipeline": layers},)))
    if profile.skips and not can.skips:
        message = f"has {len(profile.skips)} skips, engine={config.engine.name} takes none"
        found.append(Problem("model", profile.model or config.model.name, message, ({"engine": "gpipe"},)))
    return found + (stored(config, profile, model_given) if config.profile else [])


def unsplit(config: DictConfig, can: Capabilities, profile: ModelProfile, devices: int) -> list[Problem]:
    """Check a model that cannot be split into layers: it takes no pipeline, whether or not the user says its size."""
    balance = mesh.given_balance(config)
    if not profile.unsplit or mesh.resolve(config, can, devices, layers=devices).pipeline == 1 == max(1, len(balance)):
        return []
    message = f"cannot be split into stages: {profile.unsplit.text}"
    one_stage: Fix = {"mesh.pipeline": 1} | ({"planner": "balance"} if balance else {})
    single: Fix = {"engine": "single"} | (one_stage if config.mesh.pipeline or balance else {})
    fixes = [one_stage, single] if can.data else [single, one_stage]
    if profile.by_value and not can.by_value:
        fixes.remove(one_stage)
    return [Problem("model", _model(profile), message, tuple(fixes), "engine=ddp, or engine=fsdp")]


def stored(config: DictConfig, profile: ModelProfile, model_given: bool) -> list[Problem]:
    """Check a profile from a file against the run; planning and simulating work with any profile."""
    file, dtype = config.profile, config.precision.dtype
    found = check_same_model(config, profile, model_given)
    if config.batch.size != mesh.batch_size(config, profile):
        count = config.batch.micro_batches * (config.mesh.data or 1)
        message = f"is for micro-batches of {profile.micro_batch} samples, this run has {config.batch.size / count:g}"
        found.append(Problem("profile", file, message, _as_stored(config, profile)))
    if config.mode == "run" and not model_given:
        message = f"is of {_model(profile)}: without model= it is for planning and simulating"
        found.append(Problem("profile", file, message, ({"mode": "simulate"},), "model=NAME"))
    if config.mode == "run" and profile.dtype != dtype:
        message = f"is for {profile.dtype}, this run has {dtype}"
        found.append(Problem("profile", file, message, ({"precision.dtype": profile.dtype},)))
    return found


def check_same_model(config: DictConfig, profile: ModelProfile, model_given: bool) -> list[Problem]:
    """Check that a profile from a file is of the chosen model, by its name."""
    name = config.model.name
    if registry.is_user_model("model", config.model):
        return []  # a worker makes the model, and compares
    if not model_given or profile.model == name or profile.model.startswith(f"{name}_"):
        return []
    message = f"is of {_model(profile)}, the model is {name}"
    fixes: list[Fix] = [{"model": LEAVE_OUT}, {"profile": LEAVE_OUT}]
    if config.mode == "run":
        del fixes[0]  # without a model the profile is for planning
    return [Problem("profile", config.profile, message, tuple(fixes))]


def _model(profile: ModelProfile) -> str:
    return profile.model or "a model without a name"


def _as_stored(config: DictConfig, profile: ModelProfile) -> tuple[Fix, ...]:
    """Micro-batches of the profile's size: as many as the batch holds, or another batch."""
    count, rest = divmod(config.batch.size, profile.micro_batch * (config.mesh.data or 1))
    other: Fix = {"batch.size": mesh.batch_size(config, profile)}
    return ({"batch.micro_batches": count}, other) if count and not rest else (other,)
