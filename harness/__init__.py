"""`from harness import Classifier, LanguageModel, Regression, Custom`: what a module of the user's is trained on.

Importing this package alone does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.user_model.wrappers import Classifier, Custom, LanguageModel, Regression

__all__ = ["Classifier", "Custom", "LanguageModel", "Regression"]

_MODULES = dict.fromkeys(__all__, "harness.user_model.wrappers")
"""The module of each name."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
