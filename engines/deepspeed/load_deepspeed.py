"""Loads DeepSpeed for ranks that have met already, without what it would compile."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from engines.deepspeed import BUCKET, jit_build
from engines.deepspeed.collective_tracer import CollectiveTracer
from harness.core.plan import Plan
from harness.interfaces import OptimizerSpec, SessionSpec
from harness.runtime.collectives import new_group
from harness.runtime.device_clock import TimePoint
from harness.runtime.training_state import make_optimizer

if TYPE_CHECKING:
    from engines.deepspeed.engine import Config

RENAMED = r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated"
"""The warning of torch 2.13 at each of ZeRO's collectives, because DeepSpeed calls them by deprecated names."""


def load(zero: int) -> ModuleType:
    """The library, imported, and what ZeRO imports later. In a process that forks ranks this happens once for all."""
    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed

        if zero:
            importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    # Otherwise init_distributed compiles a shared-memory all-reduce for CPUs: half a minute, fatal without a compiler.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", RENAMED, FutureWarning)
    return deepspeed


def settings(micro_batches: int, replicas: int, zero: int, dtype: str, elements: int, offload: bool) -> dict[str, Any]:
    """DeepSpeed's configuration. It counts samples only to report a speed, so a micro-batch is 1 of them here.

    Nothing is clipped (by default it is, at 1.0). No bucket is larger than the `elements` of all trained parameters,
    since it would be allocated for nothing.
    """
    even = 2 * replicas  # DeepSpeed wants such a multiple
    bucket = min(even * (elements // even + 1), BUCKET)
    sharding: dict[str, Any] = {
        "stage": zero,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
        "stage3_param_persistence_threshold": 0,
    }
    found: dict[str, Any] = {
        "train_batch_size": micro_batches * replicas,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": sharding,
        "bf16": {"enabled": dtype == "bfloat16"},
        "fp16": {"enabled": dtype == "float16"},
        "pipeline": {"use_reentrant": False},
    }
    if offload:
        sharding["offload_optimizer"] = {"device": "cpu"}
    return found


def join(deepspeed: ModuleType, device: torch.device, replicas: int, now: Callable[[], TimePoint]) -> CollectiveTracer:
    """Have DeepSpeed use the group that the ranks have met in, and open others as the harness does; what the replicas
    tell each other from now on."""
    deepspeed.init_distributed(dist_backend="nccl" if device.type == "cuda" else "gloo", auto_mpi_discovery=False)
    backend = sys.modules["deepspeed.comm.comm"].cdb
    backend.new_group = new_group
    return CollectiveTracer(backend, replicas, now)


def optimizer(module: nn.Module, spec: OptimizerSpec, offload: bool) -> torch.optim.Optimizer:
    """Return torch's optimizer; with `offload` DeepSpeed's Adam on the CPU, which compiles an op once."""
    if not offload:
        return make_optimizer(module.parameters(), spec)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    decoupled = {"adam": False, "adamw": True}[spec.name]
    with jit_build.alone("cpu_adam"):
        made: torch.optim.Optimizer = DeepSpeedCPUAdam(
            module.parameters(),
            lr=spec.lr,
            betas=spec.betas,
            weight_decay=spec.weight_decay,
            adamw_mode=decoupled,
        )
    return made


def engine(
    deepspeed: ModuleType, module: nn.Module, optimizer: Any, config: Config, plan: Plan, spec: SessionSpec
) -> Any:
    """DeepSpeed's own engine around a module."""
    elements = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    settings_ = settings(plan.micro_batches, plan.mesh.data, config.zero, spec.dtype, elements, config.offload)
    with contextlib.redirect_stdout(None):
        return deepspeed.initialize(model=module, optimizer=optimizer, config=settings_)[0]
