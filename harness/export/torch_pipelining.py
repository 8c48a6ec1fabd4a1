"""A script for torchrun that trains as planned, with torch.distributed.pipelining (torch 2.13).

It is `harness.export.pipeline_script` with the plan in it. The model, its batches and its loss are made as in a run, by
its function `network`: of a model of this project, of the user's file, of Hugging Face.
"""

from __future__ import annotations

import pprint
import re
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from harness.core.problem import Problem
from harness.export.planned import (
    TORCH_SCHEDULES,
    Planned,
    refused_few,
    refused_halves,
    refused_passes,
    refused_shards,
    refused_tensor,
    torch_schedule,
)

NAME = "torch.distributed.pipelining"
MODELS: tuple[str, ...] = ()
SCRIPT = Path(__file__).with_name("pipeline_script.py")
PLAN = re.compile(r"# The plan begins here\.\n(.*?)# The plan ends here\.\n", re.DOTALL)


def refused(planned: Planned) -> list[Problem]:
    found = refused_tensor(planned, NAME)
    found += refused_passes(planned, NAME, tuple(TORCH_SCHEDULES)) or refused_few(planned, NAME)
    found += refused_shards(planned, NAME)
    found += refused_halves(planned, f"{NAME} then recomputes nothing")
    if planned.config.precision.grad_scaler:
        message = "scales losses, the script does not"
        found.append(Problem("precision.grad_scaler", True, message, ({"precision": "mixed"}, {"precision": "fp32"})))
    return found


def note(planned: Planned) -> str:
    """How to run the file."""
    return f"torchrun --nproc-per-node {planned.plan.mesh.size} FILE"


def text(planned: Planned) -> str:
    """The script, with the plan in the place of the template's."""
    plan, config = planned.plan, planned.config
    values: dict[str, Any] = {
        "STAGES": [(stage.first, stage.last, stage.device) for stage in plan.stages],
        "SCHEDULE": torch_schedule(planned),
        "DATA, PIPELINE, MICRO_BATCHES, BATCH": (
            plan.mesh.data,
            plan.mesh.pipeline,
            plan.micro_batches,
            planned.profile.micro_batch * plan.micro_batches * plan.mesh.data,
        ),
        "RECOMPUTE": plan.recompute == "always",
        "DTYPE": config.precision.dtype,
        "AUTOCAST": config.precision.autocast,
        "OPTIMIZER": OmegaConf.to_container(config.optimizer),
        "SEED, STEPS": (config.seed, config.warmup + config.steps),
        "CHOSEN": {name: OmegaConf.to_container(config[name], resolve=True) for name in ("model", "data")},
    }
    lines = [f"{name} = {pprint.pformat(value, width=110, sort_dicts=False)}\n" for name, value in values.items()]
    template = SCRIPT.read_text(encoding="utf-8")
    block = PLAN.search(template)
    assert block
    return template[: block.start()] + "# The plan.\n" + "".join(lines) + template[block.end() :]
