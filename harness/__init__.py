"""What scripts and notebooks import: `from harness import race, plan, simulate`, and what a module is trained on,
`from harness import Classifier, LanguageModel, Regression, Custom`; `annotate` marks layers for torch.profiler.

Importing this package alone does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.library import plan, race, simulate
    from harness.measure.torch_trace import annotate
    from harness.user_model.wrappers import Classifier, Custom, LanguageModel, Regression

__all__ = ["Classifier", "Custom", "LanguageModel", "Regression", "annotate", "plan", "race", "simulate"]

_MODULES = dict.fromkeys(("Classifier", "Custom", "LanguageModel", "Regression"), "harness.user_model.wrappers")
_MODULES |= dict.fromkeys(("plan", "race", "simulate"), "harness.library")
_MODULES["annotate"] = "harness.measure.torch_trace"
"""The module of each name."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
