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
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from torch import Tensor, nn

from harness.runtime.training_state import (
    counter,
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

    def load(self, whole: dict[str, Any]) -> None:
        """The inverse of `save`, from the state of the whole model."""
        with self._gathered(0):
            self.stage.load_state_dict({name: whole["model"][name] for name in self.stage.state_dict()})
        if not self.flat:
            load_optimizer_state(self.named, [self.optimizer], whole["optimizer"])
            return
        self._begin(whole["optimizer"])
        for name, parameter in self.named.items():
            if parameter.requires_grad:
                moments = {key: value for key, value in whole["optimizer"].get(name, {}).items() if value.dim()}
                self._set(parameter, whole["model"][name], moments)

    def _set(self, parameter: nn.Parameter, weight: Tensor, moments: dict[str, Tensor]) -> None:
        """Set a parameter. With ZeRO 3 the shards are set: DeepSpeed's own way fails if the tensor does not divide
        evenly."""
        if self.scattered:
            safe_set_local_fp32_param(parameter, self._shard(parameter, weight))
            for key, value in moments.items():
                safe_set_local_optimizer_state(parameter, self._shard(parameter, value), key)
            return
        safe_set_full_fp32_param(parameter, weight)
        for key, value in moments.items():
            safe_set_full_optimizer_state(parameter, value, key)

    def _masters(self) -> dict[str, Tensor]:
        """The float32 copies of weights in a shorter format: what these forget, the next steps build on."""
        found = {}
        for name, parameter in self.stage.named_parameters(remove_duplicate=False):
            if parameter.requires_grad and parameter.dtype != torch.float32:
                whole: Tensor = safe_get_full_fp32_param(parameter)
                found[name] = whole.detach().cpu().clone().view(getattr(parameter, "ds_shape", parameter.shape))
        return found

    @staticmethod
    def _shard(parameter: nn.Parameter, whole: Tensor) -> Tensor:
        """Return this rank's part of a tensor, padded with zeros at the end."""
        shard: Tensor = parameter.ds_tensor  # type: ignore[attr-defined]
        size, ranks = shard.numel(), dist.get_world_size()
        padded = torch.cat([whole.flatten(), whole.new_zeros(size * ranks - whole.numel())])
        return padded.view(ranks, size)[dist.get_rank()]

    def _moments(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the optimizer state of one parameter. Step counters are the same for all."""
        state: dict[str, Any] = next(iter(self.optimizer.state.values()), {})
        found = {}
        for key, kept in state.items():
            value = kept if isinstance(kept, Tensor) else torch.tensor(float(kept))  # its own Adam counts in int
            whole = safe_get_full_optimizer_state(parameter, key) if value.dim() else value
            shape = getattr(parameter, "ds_shape", parameter.shape) if value.dim() else value.shape
            found[key] = whole.detach().cpu().clone().view(shape)
        return found

    def _begin(self, saved: dict[str, Any]) -> None:
        """An optimizer makes its state in its first step: have it there before."""
        example: dict[str, Tensor] = next(iter(saved.values()), {})
        for shard in self.flat:
            self.optimizer.state[shard] = {
                key: torch.zeros_like(shard) if value.dim() else self._count(value, shard)
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
