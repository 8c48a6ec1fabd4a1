"""The choice of mode=tune against a simulation of every point of a small space, one by one."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from harness.cli.compose import compose
from harness.config import cluster_config, registry
from harness.config.cluster_config import ClusterConfig
from harness.core.problem import CannotRun, NoPlan, ProblemError
from harness.planning import draft as planning_draft
from tests.harness.planning.tune.nets import FLAT, LAYERS, Bench, net, tuned

SPACES: dict[str, list[dict[str, Any]]] = {
    "single": [{"engine.checkpoint": one} for one in ("never", "except_last", "always")],
    "gpipe": [
        {"engine.checkpoint": one, "planner.by": by}
        for one in ("never", "except_last", "always")
        for by in ("time", "memory")
    ],
    "fsdp": [
        {"engine.reshard_after_forward": one, "engine.reduce_each": other}
        for one in ("true", "false")
        for other in ("true", "false")
    ],
    "deepspeed": [{"engine.zero": zero, "engine.checkpoint": one} for zero in range(4) for one in ("never", "always")],
    "torch_pipelining": [{"engine.schedule": one} for one in ("gpipe", "1f1b", "interleaved1f1b", "zbv")],
}
BATCH = 4


def simulated_one_by_one(engine: str, memory_gb: float) -> list[float]:
    """Seconds of the step of each point that fits: settings x meshes of at most four devices x micro-batches."""
    found = []
    for settings, data, pipeline, count in itertools.product(SPACES[engine], (1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 4)):
        if data * pipeline > 4 or BATCH % (data * count):
            continue
        typed = [*FLAT, f"engine={engine}", f"batch.size={BATCH}", f"mesh.data={data}", f"mesh.pipeline={pipeline}",
                 "cluster.nodes=1", f"cluster.memory_gb={memory_gb}", f"batch.micro_batches={count}",
                 *(f"{key}={value}" for key, value in settings.items())]  # fmt: skip
        try:
            bench = Bench(*typed)
            bench.cluster = cluster_config.build(ClusterConfig(**bench.config.cluster))
            can = bench.engine.capabilities
            if (data > 1 and not can.data) or (pipeline > 1 and not can.pipeline):
                continue
            profile = net(LAYERS, BATCH // (data * count), 10**7)
            draft = planning_draft.draft(bench.config, bench.engine, bench.planner, profile, bench.cluster)
        except (CannotRun, NoPlan, ProblemError):
            continue
        if bench.fits(draft):
            found.append(draft.plan.predicted["step_time_s"])
    return found


@pytest.mark.usefixtures("computation", "at_length")
@pytest.mark.parametrize(("engine", "memory_gb"), [*((engine, 0.2) for engine in SPACES), ("deepspeed", 1)])
def test_the_choice_is_the_best_of_all_points(engine: str, memory_gb: float, tmp_path: Path) -> None:
    points = simulated_one_by_one(engine, memory_gb)
    typed = [f"engine={engine}", f"batch.size={BATCH}", "cluster.nodes=1", f"cluster.memory_gb={memory_gb}"]
    if not points:
        with pytest.raises(CannotRun):
            tuned(tmp_path, *typed, size=10**7)
        return
    found = tuned(tmp_path, *typed, size=10**7)
    assert found.kinds[0].step_time_s == pytest.approx(min(points), rel=1e-9)


@pytest.mark.usefixtures("computation")
def test_the_command_of_the_best_is_simulated_to_the_same_step(tmp_path: Path) -> None:
    found = tuned(tmp_path, "engine=deepspeed", "batch.size=4", "cluster.nodes=1", size=10**7)
    config = compose(list(found.kinds[0].overrides))
    assert config.mode == "simulate"
    engine = registry.build("engine", config.engine)
    planner = registry.build("planner", config.planner)
    cluster = cluster_config.build(ClusterConfig(**config.cluster))
    profile = net(LAYERS, found.kinds[0].micro_batch, 10**7)
    draft = planning_draft.draft(config, engine, planner, profile, cluster)
    assert draft.plan.predicted["step_time_s"] == pytest.approx(found.kinds[0].step_time_s)
