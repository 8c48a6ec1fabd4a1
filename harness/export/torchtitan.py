"""torchtitan's configuration file (`--job.config_file FILE`), for release 0.2.2.

Its Llama is `model=llama`, with modules named tok_embeddings, layers.0, ..., norm, output. A file has what the plan
decides, and the flavor with the model's sizes where torchtitan has one; tokenizer, data and optimizer stay the user's.
Every name is a flag, too: --parallelism.NAME.
"""

from __future__ import annotations

import json
from typing import Any

from harness.core.problem import Fix, Problem
from harness.export import transformer
from harness.export.planned import (
    TORCH_SCHEDULES,
    Planned,
    refused_few,
    refused_halves,
    refused_passes,
    refused_shards,
    refused_strategies,
    torch_schedule,
)

NAME = "torchtitan"
MODELS: tuple[str, ...] = ("llama",)
FLAVORS = {
    "debugmodel": (6, 256, 16, 16, 768, 2048),
    "8B": (32, 4096, 32, 8, 14336, 128256),
    "70B": (80, 8192, 64, 8, 28672, 128256),
    "405B": (126, 16384, 128, 8, 53248, 128256),
}
"""Its llama3 models by the sizes of `SIZES`; all have `ROPE_THETA`."""
SIZES = ("layers", "width", "heads", "kv_heads", "hidden", "vocabulary")
ROPE_THETA = 500_000.0


def refused(planned: Planned) -> list[Problem]:
    found = transformer.refused(planned, NAME, MODELS)
    if not found and planned.config.model.tied:
        found.append(Problem("model.tied", True, f"is not what {NAME}'s Llama has", ({"model.tied": False},)))
    found += refused_passes(planned, NAME, tuple(TORCH_SCHEDULES)) or refused_few(planned, NAME)
    found += refused_halves(planned, f"{NAME} then recomputes a layer again for each group of its weights")
    found += [] if planned.engine == "fsdp" else refused_shards(planned, NAME)
    return [*found, *refused_strategies(planned), *_refused_replicas(planned), *_refused_precision(planned)]


def note(planned: Planned) -> str:
    """How a program uses the file."""
    command = f"torchrun --nproc-per-node {planned.plan.mesh.size} -m torchtitan.train --job.config_file FILE"
    missing = (
        f"none of {NAME}'s flavors has the sizes of this model, as FILE says: register one, add --model.flavor NAME"
    )
    return command if flavor(planned) else f"{command}\n  {missing}"


def text(planned: Planned) -> str:
    lines = [f"# The plan of Regatta for {NAME} 0.2.2; add tokenizer, data and optimizer."]
    if not flavor(planned):
        sizes = ", ".join(f"{key}={planned.config.model[key]}" for key in (*SIZES, "rope_theta"))
        lines += [
            f"# None of its flavors has the sizes of this model ({sizes}):",
            "# register one, and add model.flavor.",
        ]
    for section, values in settings(planned).items():
        lines += ["", f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    return "\n".join(lines) + "\n"


def flavor(planned: Planned) -> str:
    """The flavor that has the sizes of the model; "" where none has."""
    model = planned.config.model
    sizes = tuple(model[key] for key in SIZES)
    return next((name for name, own in FLAVORS.items() if own == sizes and model.rope_theta == ROPE_THETA), "")


def settings(planned: Planned) -> dict[str, dict[str, Any]]:
    """The file's content."""
    plan, size, precision = planned.plan, planned.profile.micro_batch, planned.config.precision
    mesh, shards = plan.mesh, planned.engine == "fsdp"
    parallelism: dict[str, Any] = {
        "data_parallel_replicate_degree": 1 if shards else mesh.data,
        "data_parallel_shard_degree": mesh.data if shards else 1,
        "tensor_parallel_degree": mesh.tensor,
        "pipeline_parallel_degree": mesh.pipeline,
    }
    if shards:
        parallelism["fsdp_reshard_after_forward"] = "always" if planned.config.engine.reshard_after_forward else "never"
    if len(plan.stages) > 1:
        parallelism |= {
            "pipeline_parallel_schedule": torch_schedule(planned),
            "pipeline_parallel_microbatch_size": size,
            "module_fqns_per_model_part": _modules(planned),
        }
    known = flavor(planned)
    return {
        "model": {"name": "llama3", **({"flavor": known} if known else {})},
        "training": {
            "local_batch_size": size * (plan.micro_batches if len(plan.stages) > 1 else 1),
            "global_batch_size": size * plan.micro_batches * mesh.data,
            "seq_len": planned.config.model.sequence,
            "dtype": precision.dtype,
            "mixed_precision_param": precision.autocast or precision.dtype,
        },
        "parallelism": parallelism,
        "activation_checkpoint": {"mode": "full" if plan.recompute == "always" else "none"},
    }


def _modules(planned: Planned) -> list[list[str]]:
    """The modules of each stage, by torchtitan's names."""
    names = {"embedding": "tok_embeddings", "head": "output"}
    layers = [layer.name for layer in planned.profile.layers]
    named = [names.get(name, name.replace("block_", "layers.")) for name in layers]
    return [named[stage.first : stage.last + 1] for stage in planned.plan.stages]


def _refused_replicas(planned: Planned) -> list[Problem]:
    """It has plain replicas (DDP) with no other kind of parallelism only."""
    mesh = planned.plan.mesh
    if mesh.data == 1 or mesh.data == mesh.size:
        return []
    message = f"makes plain replicas of a pipeline or of shards, {NAME} would shard their weights (FSDP)"
    return [Problem("mesh.data", mesh.data, message, ({"mesh.data": 1},))]


def _refused_precision(planned: Planned) -> list[Problem]:
    precision, mesh = planned.config.precision, planned.plan.mesh
    if precision.dtype not in ("float32", "bfloat16"):
        message = f"is not one of {NAME}'s: float32, bfloat16"
        return [Problem("precision.dtype", precision.dtype, message, ({"precision": "fp32"},))]
    if precision.dtype == "bfloat16" and planned.engine == "deepspeed":
        fix: Fix = {"precision": "fp32"}
        return [Problem("precision.dtype", "bfloat16", f"has float32 copies in DeepSpeed, none in {NAME}", (fix,))]
    if precision.autocast and (precision.autocast != "bfloat16" or mesh.data != mesh.size > 1):
        message = f"is none of {NAME}'s mixed precisions: it has bfloat16 with replicas alone, or on one device"
        return [Problem("precision.autocast", precision.autocast, message, ({"precision": "fp32"},))]
    return []
