"""Mixtures of experts whose products have shapes that do not depend on the routing, in every number format.

The implementations of Transformers either look at the routing in Python, which no tensor without memory allows, or take
16-bit numbers alone.

    tokens (t, h)  ->  sorted by expert (t k, h)  ->  each expert's rows times its weights  ->  sum over k (t, h)
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import flop_registry, register_flop_formula

NAME = "regatta"
"""The implementation's name in a configuration."""
DEFAULT = "grouped_mm"
"""Transformers' own."""
OPS = torch.ops.transformers


def use(module: nn.Module) -> None:
    """Let the networks of Transformers in a module compute their experts so, if they have any and their configuration
    has the implementation by default; torch learns the FLOPs of the products."""
    transformers: Any = sys.modules.get("transformers.modeling_utils")
    networks = [one for one in module.modules() if transformers and isinstance(one, transformers.PreTrainedModel)]
    for network in networks:
        if network._can_set_experts_implementation() and network.config._experts_implementation == DEFAULT:
            _register()
            network.set_experts_implementation(NAME)


def _register() -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, experts)
    if OPS.grouped_mm_fallback not in flop_registry:
        register_flop_formula(OPS.grouped_mm_fallback)(_flops)
        register_flop_formula(OPS.grouped_mm_fallback_backward)(_backward_flops)


def experts(module: Any, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """Returns the sum over each token's k experts, by their shares: tokens (t, h), experts (t, k), shares (t, k)."""
    tokens, k = chosen.shape
    order = chosen.flatten().argsort(stable=True)
    ends = functional.one_hot(chosen.flatten(), module.num_experts).sum(0).cumsum(0)
    sorted_by = chosen.flatten()[order]

    def product(value: Tensor, name: str) -> Tensor:
        weight: Tensor = getattr(module, name)
        made = _grouped(value, weight if module.is_transposed else weight.transpose(1, 2), ends)
        return made + getattr(module, f"{name}_bias")[sorted_by] if module.has_bias else made

    inner = product(hidden[order // k], "gate_up_proj" if module.has_gate else "up_proj")
    outer = product(module._apply_gate(inner) if module.has_gate else module.act_fn(inner), "down_proj")
    if module.has_post_expert_norm:
        outer = module.post_expert_norm(outer)
    weighted = (outer * shares.flatten()[order, None])[order.argsort()]
    return weighted.view(tokens, k, -1).sum(1).to(hidden.dtype)


def _grouped(value: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Rows up to ends[0] times weights[0], up to ends[1] times weights[1], ...: (n, a), (e, a, b) -> (n, b)."""
    value = value.to(weights.dtype)
    if weights.dtype == torch.bfloat16:
        return functional.grouped_mm(value, weights, offs=ends.to(torch.int32))
    made: Tensor = OPS.grouped_mm_fallback(value, weights, ends)
    return made


def _flops(value: torch.Size, weights: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * value[0] * weights[1] * weights[2]


def _backward_flops(value: torch.Size, weights: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * _flops(value, weights)
