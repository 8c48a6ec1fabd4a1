"""DeepSpeed's JSON (`deepspeed.initialize(config=FILE)`), for release 0.19.

DeepSpeed reads batch, accumulation, ZeRO and precision from it. Of a pipeline it reads the recomputation; the cuts are
those of `PipelineModule(num_stages=..., partition_method=...)` in the user's program: the file has both, as DeepSpeed's
own section "pipeline" calls them, and a plan with other cuts is refused. The optimizer stays the user's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

from harness.config.registry import ROOT
from harness.core.deepspeed_partition import partition_balanced
from harness.core.problem import Fix, Problem
from harness.export.planned import CHECKPOINT, Planned, refused_passes, refused_tensor

NAME = "DeepSpeed"
MODELS: tuple[str, ...] = ()
ENGINES = ("deepspeed", "ddp", "single")
"""Engines whose scheme DeepSpeed has: replicas with ZeRO 0 to 3, 1F1B pipelines."""
SCHEME: Fix = {"engine": "deepspeed", "planner": "deepspeed"}


def refused(planned: Planned) -> list[Problem]:
    scheme = refused_passes(planned, NAME, ("1f1b",), _scheme(planned)) or _refused_engine(planned)
    found = [*refused_tensor(planned, NAME), *scheme, *_refused_checkpoint(planned)]
    if not any("planner" in fix for problem in scheme for fix in problem.fixes):  # else the cuts will be others
        found += _refused_cuts(planned)
    return [*found, *_refused_precision(planned)]


def _scheme(planned: Planned, **keys: Any) -> Fix:
    """DeepSpeed's scheme, in a number format that it has there."""
    dtype: Fix = {"precision": "fp32"} if planned.config.precision.dtype == "float64" else {}
    return SCHEME | {key.replace("_", "."): value for key, value in keys.items()} | dtype


def note(planned: Planned) -> str:
    """How a program uses the file."""
    count, data, method = len(planned.plan.stages), planned.plan.mesh.data, _method(planned)
    if count == 1:
        return "deepspeed.initialize(model=..., optimizer=..., config=FILE)"
    stages = f"num_stages={count}"
    if data > 1:  # its own order of ranks has those of a pipeline far apart
        stages = f"topology=ProcessTopology(axes=['data', 'pipe'], dims=[{data}, {count}])"
    return f"deepspeed.initialize(model=PipelineModule(layers, {stages}, partition_method={method!r}), ...)"


def text(planned: Planned) -> str:
    return json.dumps(settings(planned), indent=2) + "\n"


def settings(planned: Planned) -> dict[str, Any]:
    """The file's content."""
    plan, precision = planned.plan, planned.config.precision
    found: dict[str, Any] = {
        "train_batch_size": planned.profile.micro_batch * plan.micro_batches * plan.mesh.data,
        "train_micro_batch_size_per_gpu": planned.profile.micro_batch,
        "gradient_accumulation_steps": plan.micro_batches,
        "zero_optimization": {"stage": planned.zero},
    }
    if planned.config.engine.get("offload"):
        found["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    if precision.dtype in ("bfloat16", "float16"):
        found[{"bfloat16": "bf16", "float16": "fp16"}[precision.dtype]] = {"enabled": True}
    if precision.autocast:
        found["torch_autocast"] = {"enabled": True, "dtype": precision.autocast}
    if len(plan.stages) > 1:
        found["pipeline"] = {"stages": len(plan.stages), "partition": _method(planned)}
        if plan.recompute == "always":
            found["pipeline"]["activation_checkpoint_interval"] = max(plan.balance)
    return found


def invalid(planned: Planned, file: str) -> list[Problem]:
    """What DeepSpeed's own class says against the file; nothing where DeepSpeed is not installed."""
    if find_spec("deepspeed") is None:
        return []
    command = [sys.executable, "-m", "harness.export.deepspeed_config", str(planned.plan.mesh.data)]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, input=text(planned), env=environment, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return []
    last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    return [Problem("export", file, f"is refused by DeepSpeed: {last}")]


def _refused_engine(planned: Planned) -> list[Problem]:
    if planned.engine in ENGINES:
        return []
    fix = _scheme(planned, engine_zero=3) if planned.engine == "fsdp" else _scheme(planned)
    return [Problem("engine", planned.engine, f"is a scheme of another library than {NAME}", (fix,))]


def _refused_checkpoint(planned: Planned) -> list[Problem]:
    if planned.plan.recompute != "always" or len(planned.plan.stages) > 1:
        return []
    message = f"recomputes without a pipeline, {NAME}'s file can ask for that in pipelines only"
    return [Problem(CHECKPOINT, planned.plan.recompute, message, ({CHECKPOINT: "never"},))]


def _refused_cuts(planned: Planned) -> list[Problem]:
    plan = planned.plan
    if len(plan.stages) == 1 or _method(planned):
        return []
    given = "+".join(map(str, plan.balance))
    message = f"makes stages of {given} layers, {NAME}'s partition methods make others"
    fixes: tuple[Fix, ...] = ({"planner": "deepspeed"}, {"planner": "uniform"})
    return [Problem("planner", planned.config.planner.name, message, fixes)]


def _refused_precision(planned: Planned) -> list[Problem]:
    dtype = planned.config.precision.dtype
    if dtype == "float64" and planned.engine in ("ddp", "single"):
        message = f"is none of {NAME}'s without a pipeline"
        return [Problem("precision.dtype", dtype, message, ({"precision": "fp32"},))]
    if dtype not in ("bfloat16", "float16") or planned.engine == "deepspeed":
        return []
    message = f"keeps weights and optimizer state in it, {NAME} keeps float32 copies"
    fixes: tuple[Fix, ...] = ({"precision": "fp32"}, {"engine": "deepspeed", "engine.zero": 1})
    return [Problem("precision.dtype", dtype, message, fixes)]


def _method(planned: Planned) -> str | None:
    """The partition method of `PipelineModule` that makes the plan's stages; None where there is none."""
    balance, layers = list(planned.plan.balance), planned.profile.layers
    if balance == partition_balanced([layer.trained_bytes for layer in layers], len(balance)):
        return "parameters"
    size, rest = divmod(len(layers), len(balance))
    return "uniform" if balance == [size + (stage < rest) for stage in range(len(balance))] else None
