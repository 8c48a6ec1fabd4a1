"""Muon for matrices, AdamW for all other weights, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class MuonAndAdamW(torch.optim.Optimizer):
    """torch.optim's Muon updates weights of two dimensions (embeddings among them), AdamW all others.

    Muon's updates are scaled so that their root mean square is AdamW's (Moonlight, arXiv 2502.16982, section 2.2): one
    learning rate and one weight decay are right for both. `momentum` is Muon's; AdamW has its usual betas.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, weight_decay: float, momentum: float) -> None:
        super().__init__(groups, {})
        parameters: list[nn.Parameter] = [one for group in self.param_groups for one in group["params"]]
        matrices = [one for one in parameters if one.ndim == 2]
        others = [one for one in parameters if one.ndim != 2]
        self.parts: list[torch.optim.Optimizer] = []
        if matrices:
            muon = torch.optim.Muon(matrices, lr, weight_decay, momentum, adjust_lr_fn="match_rms_adamw")
            self.parts.append(muon)
        if others:
            self.parts.append(torch.optim.AdamW(others, lr, weight_decay=weight_decay))
        self.param_groups = [group for part in self.parts for group in part.param_groups]
        for part in self.parts:
            part.state = self.state

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all weights that have a gradient."""
        assert closure is None, "gradients are there"
        for part in self.parts:
            part.step()
