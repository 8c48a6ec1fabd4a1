"""The state of a module that DeepSpeed trains, by the names of the whole model, wherever its shards lie."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import zero
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from torch import Tensor, nn

from harness.runtime.state_shards import Blocks, flat_blocks
from harness.runtime.training_state import (
    copies,
    counter,
    kept_by_optimizers,
    load_optimizer_state,
    model_state,
    optimizer_state,
    optimizer_tensors,
)

FLAT = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat", "fp32_groups_flat_partition")
"""Attributes of DeepSpeed's optimizers (ZeRO 1 and 2, ZeRO 3, bfloat16 in a pipeline) with this rank's shards in
float32."""


class State:
    """`named` are the stage's parameters by their first names; `optimizer` is torch's, which DeepSpeed's drives.

    Every method is collective over the replicas.
    """

    def __init__(
        self, engine: Any, stage: nn.Module, named: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer
    ) -> None:
        self.stage, self.named, self.optimizer, self.around = stage, named, optimizer, engine.optimizer
        self.flat = [shard for name in FLAT for shard in getattr(engine.optimizer, name, ())]
        self.scattered = engine.zero_optimization_stage() == 3
        self.parameters = dict(stage.named_parameters(remove_duplicate=False))

    def held(self) -> list[Tensor]:
        """Return the tensors on this rank's device; for sharded parameters, the shards."""
        parameters = [getattr(parameter, "ds_tensor", parameter) for parameter in self.stage.parameters()]
        state = [*parameters, *self.stage.buffers(), *self.flat, *optimizer_tensors([self.optimizer])]
        if self.scattered:  # ZeRO 3 has buffers for its gradients from the beginning
            around = self.around
            state += [bucket.buffer for bucket in around.ipg_buckets.values()]
            state += [] if around.grad_partitions_flat_buffer is None else [around.grad_partitions_flat_buffer]
        return state

    def save(self) -> dict[str, Any]:
        """{"model": ..., "optimizer": ...}; weights in float32 where DeepSpeed steps such a copy of them."""
        with self._gathered(None):
            model = model_state(self.stage)
        if not self.flat:
            return {"model": model, "optimizer": optimizer_state(self.named, [self.optimizer])}
        model |= self._masters()
        moments = {name: self._moments(parameter) for name, parameter in self.named.items() if parameter.requires_grad}
        return {"model": model, "optimizer": {name: found for name, found in moments.items() if found}}

    def own(self) -> dict[str, Any]:
        """What `save` returns, of the tensors that this rank has: of those that ZeRO cuts, flat parts of them."""
        model = self.stage.state_dict()
        if not self.flat:
            return {"model": model, "optimizer": kept_by_optimizers(self.named, [self.optimizer])}
        model |= {name: self._weight(parameter) for name, parameter in self.parameters.items()}
        counters, moments = self._kept()
        optimizer = {
            name: counters | {key: self._part(parameter, key) for key in moments}
            for name, parameter in self.named.items()
            if parameter.requires_grad and (counters or moments)
        }
        return {"model": model, "optimizer": optimizer}

    def blocks(self, parameter: nn.Parameter, own: Tensor) -> Tensor | Blocks:
        """Return a tensor of `own` with its place in the whole one."""
        if not self.flat or not (self.scattered or parameter.requires_grad):
            return own
        shape = getattr(parameter, "ds_shape", parameter.shape)
        if self.scattered:
            start = dist.get_rank() * parameter.ds_tensor.numel()  # type: ignore[attr-defined]
        else:
            mapping = parameter._hp_mapping  # type: ignore[attr-defined]
            start = mapping.lp_fragment_address.start if mapping else 0
        return flat_blocks(own, shape, start)

    def load(self, whole: dict[str, Any]) -> None:
        """The inverse of `save`, from the state of the whole model, or of this rank's blocks of it."""
        model = {name: whole["model"][name] for name in self.stage.state_dict()}
        cut = any(isinstance(value, Blocks) for value in model.values())
        if cut:
            uncut = {name: value for name, value in model.items() if not isinstance(value, Blocks)}
            self.stage.load_state_dict(uncut, strict=False)
        else:
            with self._gathered(0):
                self.stage.load_state_dict(model)
        if not self.flat:
            load_optimizer_state(self.named, [self.optimizer], whole["optimizer"])
            return
        saved = {name: whole["optimizer"][name] for name in self.named if name in whole["optimizer"]}
        self._begin(saved)
        names = {parameter: name for name, parameter in self.parameters.items()}
        for name, parameter in self.named.items():
            if parameter.requires_grad:
                moments = {key: value for key, value in saved.get(name, {}).items() if _is_moment(value)}
                self._set(parameter, model[names[parameter]], moments)
        if cut:
            self._renew()

    def _set(self, parameter: nn.Parameter, weight: Any, moments: dict[str, Any]) -> None:
        """Set a parameter. With ZeRO 3 the shards are set: DeepSpeed's own way fails if the tensor does not divide
        evenly."""
        if self.scattered:
            safe_set_local_fp32_param(parameter, self._shard(parameter, weight))
            for key, value in moments.items():
                safe_set_local_optimizer_state(parameter, self._shard(parameter, value), key)
            return
        if isinstance(weight, Blocks):
            self._part(parameter, None).copy_(weight.own)
            for key, value in moments.items():
                self._part(parameter, key).copy_(value.own)
            return
        safe_set_full_fp32_param(parameter, weight)
        for key, value in moments.items():
            safe_set_full_optimizer_state(parameter, value, key)

    def _renew(self) -> None:
        """Have the weights that layers compute with follow their float32 copies, in all ranks."""
        if not self.scattered:
            self.around.update_lp_params()
            return
        for parameter in self.named.values():
            if parameter.requires_grad:
                parameter.ds_tensor.copy_(safe_get_local_fp32_param(parameter))  # type: ignore[attr-defined]
        if kept := self.around.persistent_parameters:  # of few elements: whole in each rank
            kept[0].partition(kept)
            kept[0].all_gather(kept)

    def _weight(self, parameter: nn.Parameter) -> Tensor:
        if parameter.requires_grad:
            return self._part(parameter, None)
        return self._without_padding(parameter, parameter.ds_tensor) if self.scattered else parameter.detach()  # type: ignore[attr-defined]

    def _part(self, parameter: nn.Parameter, key: str | None) -> Tensor:
        """Return this rank's part of a parameter in float32, or of its optimizer state, flat."""
        if self.scattered:
            part = safe_get_local_optimizer_state(parameter, key) if key else safe_get_local_fp32_param(parameter)
            return self._without_padding(parameter, part)
        mapping = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is None:
            return parameter.new_empty(0, dtype=torch.float32)
        fragment: Tensor = mapping.get_hp_fragment(key)
        return fragment.detach()

    @staticmethod
    def _without_padding(parameter: nn.Parameter, part: Tensor) -> Tensor:
        size, shape = part.numel(), parameter.ds_shape  # type: ignore[attr-defined]
        return part.detach()[: max(0, shape.numel() - dist.get_rank() * size)]

    def _kept(self) -> tuple[dict[str, Tensor], list[str]]:
        """Return the optimizer's counters, which are the same for all parameters, and the keys of its moments."""
        state: dict[str, Any] = next(iter(self.optimizer.state.values()), {})
        values = {key: kept if isinstance(kept, Tensor) else torch.tensor(float(kept)) for key, kept in state.items()}
        counters = {key: value for key, value in values.items() if not value.dim()}  # its own Adam counts in int
        return counters, [key for key in values if key not in counters]

    def _masters(self) -> dict[str, Tensor]:
        """The float32 copies of weights in a shorter format: what these forget, the next steps build on."""
        found = {}
        for name, parameter in self.stage.named_parameters(remove_duplicate=False):
            if parameter.requires_grad and parameter.dtype != torch.float32:
                whole: Tensor = safe_get_full_fp32_param(parameter)
                found[name] = whole.detach().cpu().clone().view(getattr(parameter, "ds_shape", parameter.shape))
        return found

    @staticmethod
    def _shard(parameter: nn.Parameter, whole: Any) -> Tensor:
        """Return this rank's part of a tensor, padded with zeros at the end."""
        shard: Tensor = parameter.ds_tensor  # type: ignore[attr-defined]
        size, ranks = shard.numel(), dist.get_world_size()
        if isinstance(whole, Blocks):
            return torch.cat([whole.own, whole.own.new_zeros(size - whole.own.numel())])
        padded = torch.cat([whole.flatten(), whole.new_zeros(size * ranks - whole.numel())])
        return padded.view(ranks, size)[dist.get_rank()]

    def _moments(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the optimizer state of one parameter."""
        counters, moments = self._kept()
        shape = getattr(parameter, "ds_shape", parameter.shape)
        whole = {key: safe_get_full_optimizer_state(parameter, key).view(shape) for key in moments}
        return copies(counters | whole)

    def _begin(self, saved: dict[str, Any]) -> None:
        """An optimizer makes its state in its first step: have it there before."""
        example: dict[str, Any] = next(iter(saved.values()), {})
        for shard in self.flat:
            self.optimizer.state[shard] = {
                key: torch.zeros_like(shard) if _is_moment(value) else self._count(value, shard)
                for key, value in example.items()
            }
        if hasattr(self.around, "_lazy_init_hp_params_optimizer_state"):
            self.around._hp_optimizer_states_linked = False
            if example:  # else DeepSpeed does it in its first step, when there is something
                self.around._lazy_init_hp_params_optimizer_state()

    def _count(self, steps: Tensor, shard: Tensor) -> Any:
        """A counter as the optimizer keeps it: DeepSpeed's own Adam an int, torch's a tensor."""
        own = type(self.optimizer).__name__ == "DeepSpeedCPUAdam"
        return int(steps) if own else counter(steps, shard, self.optimizer)

    def _gathered(self, modifier: int | None) -> AbstractContextManager[object]:
        """Within it the weights are whole; what rank `modifier` has changed counts."""
        if not self.scattered:
            return nullcontext()
        context: AbstractContextManager[object] = zero.GatheredParameters(list(self.stage.parameters()), modifier)
        return context


def _is_moment(value: Any) -> bool:
    """Whether it is more than a counter."""
    return isinstance(value, Blocks) or bool(value.dim())
