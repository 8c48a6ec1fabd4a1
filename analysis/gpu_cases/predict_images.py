"""The step of a published case of a convolutional net by the simulator: counted work, the cluster's file, `ddp`."""

from __future__ import annotations

from functools import cache

from analysis.gpu_cases import predict
from analysis.gpu_cases.image_cases import ImageCase
from harness.cli.compose import compose
from harness.config import registry
from harness.core.model_profile import ModelProfile

CLUSTERS = {"v100": "dgx1_v100", "p100": "dgx1_p100", "a100_40": "dgx_a100_40", "a100_80": "dgx_a100_80"}
MODELS = {
    "resnet50": ("model=resnet50",),
    "resnet152": ("model=resnet50", "model.blocks=[3,8,36,3]"),
    "inception_v3": ("model=inception_v3",),
}
PRECISIONS = {"tf32": ("precision=fp32", "precision.tf32=true")}
"""Of those that are not a choice of `precision`."""


def step_s(case: ImageCase, **changes: float) -> float:
    """Returns the predicted seconds of a step; `changes` are other values of keys of the cluster."""
    words = [
        "mode=plan",
        *_model(case.model, case.precision),
        f"engine={'ddp' if case.devices > 1 else 'single'}",
        f"cluster={CLUSTERS[case.gpu]}",
        f"cluster.devices={case.devices}",
        "optimizer.momentum=0.9",
        f"batch.size={case.batch * case.devices}",
        "batch.micro_batches=1",
        *(f"cluster.{key}={value}" for key, value in changes.items()),
    ]
    config = compose(words)
    engine, planner = registry.build("engine", config.engine), registry.build("planner", config.planner)
    return predict.simulated_s(config, lambda _: _counted(case.model, case.precision, case.batch), engine, planner)


def _model(model: str, precision: str) -> tuple[str, ...]:
    return *MODELS[model], *PRECISIONS.get(precision, (f"precision={precision}",))


@cache
def _counted(model: str, precision: str, batch: int) -> ModelProfile:
    from harness.measure.count_model import count

    config = compose(_model(model, precision))
    return count(registry.build("model", config.model), batch, config.precision.dtype)
