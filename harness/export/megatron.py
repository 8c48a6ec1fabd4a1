"""Megatron-LM's flags as a Bash array, for release core 0.19.

    source FILE && torchrun --nproc-per-node 8 pretrain_gpt.py "${PLAN[@]}" ...

The file has what the plan decides: sizes of the model, data and optimizer stay the user's. There is no flag for the
data parallel size, it follows from the number of processes; where ranks of a pipeline are neighbours, as here, is a
flag of its own. The last layer norm is where Megatron-LM has it: with the
last transformer layer.
"""

from __future__ import annotations

import re

from harness.core.problem import Fix, Problem
from harness.export import transformer
from harness.export.planned import (
    Planned,
    refused_passes,
    refused_shards,
    refused_strategies,
)

NAME = "Megatron-LM"
DEEPSPEED_BF16: Fix = {"engine": "deepspeed", "precision": "bf16"}
MODELS: tuple[str, ...] = ("gpt", "llama")


def refused(planned: Planned) -> list[Problem]:
    found = transformer.refused(planned, NAME, MODELS) or _refused_cuts(planned)
    found += refused_passes(planned, NAME, ("1f1b", "interleaved1f1b"))
    found += refused_shards(planned, NAME, most=1)
    if planned.config.engine.get("offload"):
        message = f"is DeepSpeed's, {NAME} has another"
        found.append(Problem("engine.offload", True, message, ({"engine.offload": False},)))
    return [*found, *refused_strategies(planned), *_refused_precision(planned)]


def note(planned: Planned) -> str:
    """How a program uses the file."""
    return f'source FILE && torchrun --nproc-per-node {planned.plan.mesh.size} pretrain_gpt.py "${{PLAN[@]}}" ...'


def text(planned: Planned) -> str:
    mesh = planned.plan.mesh
    lines = [
        f"# The plan of Regatta for {NAME}, core 0.19: {note(planned).replace('FILE', 'this file')}",
        f"# {mesh.size} processes: data {mesh.data} x pipeline {mesh.pipeline} x tensor {mesh.tensor}",
        "PLAN=(",
        *(f"    {flag}" for flag in flags(planned)),
        ")",
    ]
    return "\n".join(lines) + "\n"


def flags(planned: Planned) -> list[str]:
    """Each with its value, quoted for a shell."""
    plan, size, dtype = planned.plan, planned.profile.micro_batch, planned.config.precision.dtype
    found = [
        f"--num-layers {sum(transformer.blocks(planned))}",
        f"--tensor-model-parallel-size {plan.mesh.tensor}",
        f"--pipeline-model-parallel-size {plan.mesh.pipeline}",
        *_layout(planned),
        *["--use-tp-pp-dp-mapping"] * (plan.mesh.pipeline > 1 and plan.mesh.data > 1),
        f"--micro-batch-size {size}",
        f"--global-batch-size {size * plan.micro_batches * plan.mesh.data}",
    ]
    if plan.recompute == "always":
        together = 1 if plan.mesh.tensor > 1 else max(transformer.blocks(planned))
        found += ["--recompute-granularity full", "--recompute-method uniform", f"--recompute-num-layers {together}"]
    if not planned.config.model.tied:
        found.append("--untie-embeddings-and-output-weights")
    if planned.zero == 1:
        found.append("--use-distributed-optimizer")
    return found + {"bfloat16": ["--bf16"], "float16": ["--fp16"]}.get(dtype, [])


def _layout(planned: Planned) -> list[str]:
    """What says how many layers each stage has, if they are not as many in each of one stage a device."""
    stages, counts = transformer.roles(planned), transformer.blocks(planned)
    even = len(set(counts)) == 1 and stages[-1].endswith("nL")
    if even and planned.stages_per_device == 1:
        return []
    if even:
        return [f"--num-layers-per-virtual-pipeline-stage {counts[0]}"]
    layout = "|".join(re.sub("E+", "E", stage).replace("n", "") for stage in stages)
    return [f"--pipeline-model-parallel-layout '{layout}'"]


def _refused_cuts(planned: Planned) -> list[Problem]:
    """The embedding and the positions are one layer there, and a stage cannot have the last norm alone."""
    stages = transformer.roles(planned)
    apart = next((role for role in ("E", "n") if any(set(stage) == {role} for stage in stages[1:])), "")
    split = len([stage for stage in stages if "E" in stage]) > 1
    if not (split or apart):
        return []
    what = "the embedding and the positions" if split else "the last norm, in a stage of its own"
    message = f"cuts off {what}, which {NAME} cannot"
    even = transformer.even_balance(planned)
    fixes: tuple[Fix, ...] = ({"planner": "given", "planner.balance": even},) if even else ()
    hint = "" if even else f"fewer stages: there are {len(stages)}"
    return [Problem("planner", planned.config.planner.name, message, fixes, hint)]


def _refused_precision(planned: Planned) -> list[Problem]:
    precision = planned.config.precision
    fix: Fix = {"precision": "fp32"}
    if precision.autocast:
        message = f"is torch.autocast, {NAME} casts the weights, too, and keeps float32 copies, as DeepSpeed does"
        like_it: Fix = {"precision": "bf16"} if planned.engine == "deepspeed" else DEEPSPEED_BF16
        return [Problem("precision.autocast", precision.autocast, message, (like_it, fix))]
    if precision.dtype == "float64":
        return [Problem("precision.dtype", "float64", f"is none of {NAME}'s", (fix,))]
    if precision.dtype != "float32" and planned.engine != "deepspeed":
        message = f"keeps weights and optimizer state in it, {NAME} keeps float32 copies"
        return [Problem("precision.dtype", precision.dtype, message, (fix, {"engine": "deepspeed"}))]
    return []
