"""Small nets and clusters to tune on, and a search among all of them by simulation alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from harness.checks import plan_fits
from harness.cli.compose import compose
from harness.config import cluster_config, registry
from harness.config.cluster_config import ClusterConfig
from harness.core.cluster import Cluster, Device, Link
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.problem import apply
from harness.interfaces import Engine, Planner
from harness.planning import draft as planning_draft
from harness.planning.draft import Draft, Layout
from harness.planning.prepare import Ground
from harness.planning.tune.candidate_search import Tuner
from harness.planning.tune.candidates import Candidate
from harness.planning.tune.result import Tuned
from harness.report.progress import Progress

NODE = Cluster(
    "flat", 2, 4, Device("d", 10**9, memory_bandwidth=1e11), Link(1e-5, 1e-9), Link(2e-5, 4e-9), Link(0, 1e-9)
)
"""Two nodes of four devices."""


def net(forward_s: Sequence[float], micro_batch: int = 1, size: int = 10**6) -> ModelProfile:
    """Layers of so many seconds for a sample, and a launch for a micro-batch; weights of `size` bytes each."""
    layers = tuple(
        LayerProfile(f"l{number}", 1e-4 + one * micro_batch, 2e-4 + 2 * one * micro_batch, param_bytes=size,
                     output_bytes=size // 4 * micro_batch, saved_bytes=size * micro_batch)
        for number, one in enumerate(forward_s)
    )  # fmt: skip
    return ModelProfile(layers, "net", micro_batch, input_bytes=1000 * micro_batch, source="measured on X")


class Bench:
    """One engine and planner on one cluster."""

    def __init__(self, *typed: str, cluster: Cluster = NODE) -> None:
        self.typed = ["mode=tune", "cluster=flat", *typed]
        self.config, self.cluster = compose(self.typed), cluster
        self.engine: Engine = registry.build("engine", self.config.engine)
        self.planner: Planner = registry.build("planner", self.config.planner)

    def layout(self, one: Candidate, profile: ModelProfile) -> Layout:
        return planning_draft.laid_out(*self.of(one), profile, self.cluster)

    def draft(self, one: Candidate, profile: ModelProfile) -> Draft:
        return planning_draft.draft(*self.of(one), profile, self.cluster)

    def of(self, one: Candidate) -> tuple[DictConfig, Engine, Planner]:
        """Configuration, engine and planner of a candidate, as a run of it has them."""
        typed = apply(self.typed, dict(one.settings))
        config = one.config(compose(typed))
        return config, registry.build("engine", config.engine), registry.build("planner", config.planner)

    def fits(self, draft: Draft) -> bool:
        peaks = draft.plan.predicted["peak_memory_bytes"]
        return not plan_fits.check_memory(draft.plan, peaks, draft.cluster, draft.memory)


FLAT = ["cluster=flat", "cluster.nodes=2", "cluster.devices=4", "cluster.memory_gb=1", "cluster.alpha_s=1e-5",
        "cluster.bandwidth_gb_s=1", "cluster.node_bandwidth_gb_s=0.25"]  # fmt: skip
LAYERS = [1e-3, 2e-3, 1e-3, 1e-3, 3e-3, 1e-3, 1e-3, 1e-3]


class Nets(Tuner):
    """A tuner whose profiles nobody has to measure."""

    forward_s = LAYERS
    size = 10**6

    def ground(self, one: Candidate, ahead: Sequence[DictConfig]) -> Ground:
        cluster = cluster_config.build(ClusterConfig(**self.config.cluster))
        return Ground(cluster, net(self.forward_s, one.micro_batch, self.size), "nominal", "made up")


def tuned(folder: Path, *typed: str, forward_s: list[float] = LAYERS, size: int = 10**6) -> Tuned:
    overrides = ["mode=tune", *FLAT, *typed]
    of_these: type[Nets] = type("Nets", (Nets,), {"forward_s": forward_s, "size": size})  # a search for fixes, too
    return of_these(compose(overrides), overrides, folder, Progress()).search()
