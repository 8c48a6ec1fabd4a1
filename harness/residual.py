"""The sum at the end of a residual branch, as a module of its own: an engine that splits layers has to know it."""

from __future__ import annotations

from torch import Tensor, nn


class Sum(nn.Module):
    """What went past a branch, plus what comes out of it."""

    def forward(self, past: Tensor, branch: Tensor) -> Tensor:
        return past + branch
