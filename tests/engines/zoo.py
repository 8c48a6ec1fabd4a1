"""Every model of the zoo, as small as it goes: what all engines must train equal."""

from __future__ import annotations

from typing import Any

from omegaconf import OmegaConf

from harness.config import registry
from harness.interfaces import Model

SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "unet": ("unet", {"convs": 1, "channels": 2, "size": 64}),
    "amoebanet": ("amoebanet", {"layers": 3, "channels": 8, "size": 64}),
    "gpt": ("gpt", {"layers": 2, "hidden": 8, "heads": 2, "sequence": 6, "vocabulary": 11}),
    "gpt with dropout, untied": ("gpt", {
        "layers": 2, "hidden": 8, "heads": 2, "sequence": 6, "vocabulary": 11, "tied": False, "dropout": 0.2,
        "attention_dropout": 0.2,
    }),
    "llama": ("llama", {
        "layers": 2, "width": 16, "heads": 4, "kv_heads": 2, "hidden": 12, "sequence": 6, "vocabulary": 11,
    }),
    "resnet": ("resnet", {"blocks": [1, 2], "channels": 2, "size": 17}),
    "resnet, elementary layers": ("resnet", {"blocks": [1, 2], "channels": 2, "size": 17, "cut": "layer"}),
    "densenet": ("densenet", {"blocks": [2, 1], "growth": 2, "size": 17}),
    "inception": ("inception", {"divisor": 16, "size": 107}),
    "vgg": ("vgg", {"channels": [2, 4], "dense": 4, "size": 16}),
    "mlp": ("mlp", {}),
}  # fmt: skip
"""By a name for tests: the plug-in and its keys."""

HEAVY = ("amoebanet", "inception")
"""Those that take seconds: the fast tier has them once, the full tier in a few cases."""


def model(name: str) -> Model:
    """A model of `SIZES`."""
    plugin, keys = SIZES[name]
    found: Model = registry.build("model", OmegaConf.create({"name": plugin, **keys}))
    return found
