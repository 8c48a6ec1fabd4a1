"""Entries of benchmarks that give turns to sessions of their own, with the model and the plan that run.py would make.

For all but the race itself: that one is `mode=race` (analysis/bench/race.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from analysis.bench.results import DEVICES
from analysis.bench.worker import Entry
from harness.checks import mesh, request
from harness.cli.compose import compose
from harness.config import cluster_config, registry
from harness.core.model_profile import ModelProfile
from harness.core.problem import refuse
from harness.host import devices
from harness.host.machine import Machine
from harness.interfaces import Engine, Model, OptimizerSpec, SessionSpec
from harness.launch import forked_ranks
from harness.measure.profile_model import measure
from harness.planning import draft as planning_draft

T = TypeVar("T")
Row = dict[str, Any]


def profiled(keys: Sequence[str]) -> ModelProfile:
    """The times of the layers with micro-batches as the keys have them, of one thread."""
    config = compose([*keys, "engine=single"])
    device = devices.torch_names(devices.detect().kind, 1)[0]
    model: Model = registry.build("model", config.model)
    samples = config.batch.size // config.batch.micro_batches
    return apart(lambda: measure(model, samples, "float32", device, repeats=9), device)


def apart(work: Callable[[], T], device: str) -> T:
    """Run `work` in its own process, so that later forks of this one find neither threads nor CUDA in use."""
    return forked_ranks.run_on_ranks(1, work, [device])


def prepared(overrides: Sequence[str], profile: ModelProfile, here: Machine, count: int = DEVICES) -> Entry:
    """Plan for `count` devices as run.py does. Raises CannotRun for what the engine refuses."""
    detected = devices.detect()
    config = compose(
        [*overrides, "optimizer.lr=0.01", *([f"cluster.devices={count}"] if detected.kind == "cpu" else [])]
    )
    engine: Engine = registry.build("engine", config.engine)
    names = devices.torch_names(detected.kind, count)
    cluster = cluster_config.build(cluster_config.from_group(config.cluster), here)
    mesh.fill(config, engine.capabilities, count)
    tensor = config.mesh.tensor or 1  # a device's share of a micro-batch is as large as the others' micro-batches
    config.batch.micro_batches //= (config.mesh.data or 1) * min(tensor, config.batch.micro_batches)
    profile = profile.for_samples(mesh.micro_batch(config))
    refuse(request.request(config, engine.capabilities, cluster))
    draft = planning_draft.draft(config, engine, registry.build("planner", config.planner), profile, cluster)
    spec = SessionSpec(names, OptimizerSpec(**config.optimizer), seed=config.seed)
    return Entry(engine, registry.build("model", config.model), draft.plan, spec, profile)
