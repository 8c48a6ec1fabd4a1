"""Plans to export, made in this process from layers that are made up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from harness.cli.compose import compose
from harness.config import cluster_config, registry
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.problem import Problem
from harness.export.planned import Planned
from harness.planning import draft as planning_draft

FLAT = ("cluster=flat", "cluster.devices=8", "cluster.memory_gb=16", "mode=plan")
LAYER = LayerProfile("l", 1e-3, 2e-3, 1e9, 1e6, param_bytes=4000, output_bytes=10_000, saved_bytes=20_000)


def names(model: str, blocks: int = 8) -> list[str]:
    """The layers of a transformer of this project, or of any other model."""
    if model not in ("gpt", "llama"):
        return [f"conv_{number}" for number in range(blocks + 4)]
    first = ["embedding", "position"] if model == "gpt" else ["embedding"]
    return [*first, *(f"block_{number}" for number in range(blocks)), "norm", "head"]


def planned(*overrides: str, layers: Sequence[str] = ()) -> Planned:
    """The plan of `run.py OVERRIDES` for a model whose layers are all the same."""
    config = compose([*FLAT, *overrides])
    cluster = cluster_config.build(cluster_config.from_group(config.cluster))
    engine, planner = registry.build("engine", config.engine), registry.build("planner", config.planner)
    size = config.batch.size // (config.batch.micro_batches * (config.mesh.data or 1))
    every = layers or names(config.model.name)
    profile = ModelProfile(
        tuple(replace(LAYER, name=name) for name in every), "net", size, dtype=config.precision.dtype,
        input_bytes=100, source="measured on X", times="measured",
    )  # fmt: skip
    draft = planning_draft.draft(config, engine, planner, profile, cluster)
    return Planned(config, draft.plan, profile, draft.schedule)


def keys(problems: Sequence[Problem]) -> list[str]:
    """Key and value of each."""
    return [problem.subject for problem in problems]
