"""What the user asked for, in his own words."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig


def choices(config: DictConfig, overrides: Sequence[str]) -> dict[str, str]:
    """Engine, model and cluster as the user chose them: unet_5_64 and not unet, which it configures.

    With a stored profile and no model, the model is the profile's.
    """
    chosen = dict(text.split("=", 1) for text in overrides if "=" in text)
    if config.profile:
        chosen.setdefault("model", Path(config.profile).stem)
    return {group: chosen.get(group, config[group].name) for group in ("engine", "model", "cluster")}


def title(config: DictConfig, overrides: Sequence[str]) -> str:
    """The run in a line: engine=gpipe model=unet_5_64 cluster=flat. A profile is made without an engine."""
    chosen = choices(config, overrides)
    if config.mode == "profile":
        del chosen["engine"]
    return " ".join(f"{group}={name}" for group, name in chosen.items() if (group, name) != ("cluster", "local"))


def given(overrides: Sequence[str], key: str) -> bool:
    """Whether the user typed `key`, or one below it: model=unet, model.size=64."""
    return any(text.startswith((f"{key}=", f"{key}.")) for text in overrides)
