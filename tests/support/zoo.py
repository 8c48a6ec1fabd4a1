"""Models of the zoo in tests: a preset's configuration, layers without memory, and how many parameters they have."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import torch
from omegaconf import OmegaConf
from torch import nn

from harness.interfaces import Model

PRESETS = Path(__file__).parents[2] / "conf" / "model"
C = TypeVar("C")


def preset_keys(network: str, name: str) -> dict[str, Any]:
    """The keys that conf/model/NAME.yaml gives to a network."""
    keys: Any = OmegaConf.to_container(OmegaConf.load(PRESETS / f"{name}.yaml"))
    assert keys.pop("defaults") == [f"_{network}", "_self_"]
    return {str(key): value for key, value in keys.items()}


def preset(config: type[C], name: str) -> C:
    """The configuration of conf/model/NAME.yaml."""
    return config(**preset_keys(getattr(config, "name"), name))  # noqa: B009


def on_meta(model: Model) -> nn.Sequential:
    """Its layers on the meta device."""
    with torch.device("meta"):
        return model.layers()


def parameters(layers: nn.Module) -> int:
    """The number of its parameters."""
    return sum(parameter.numel() for parameter in layers.parameters())


def filled(model: Model) -> nn.Sequential:
    """Its layers in float64, with biases and norms that are not 0 and 1."""
    layers = model.layers().double()
    for parameter in layers.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layers
