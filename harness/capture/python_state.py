"""What a forward pass changes in Python, where no torch function sees it: numbers in attributes, random generators."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from torch import nn

NUMBERS = (int, float)
OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that torch does not know of."""
    return {name: value for name, value in vars(module).items() if name not in OF_EVERY_MODULE}


def numbers_changed(before: dict[str, Any], after: dict[str, Any]) -> dict[str, float]:
    """The numbers among the attributes of a module that are others than before; none if other attributes are, too."""
    changed = {name: value for name, value in after.items() if value is not before.get(name)}
    plain = all(type(value) in NUMBERS and type(before.get(name, value)) in NUMBERS for name, value in changed.items())
    return changed if plain else {}


def generators() -> tuple[Any, ...]:
    """The states of Python's and NumPy's global generators of random numbers."""
    numbers: dict[str, Any] = np.random.get_state(legacy=False)["state"]
    return random.getstate(), numbers["key"].tobytes(), numbers["pos"]
