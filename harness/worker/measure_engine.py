"""Measures what an engine takes on this machine beyond kernels and messages, by training chains of tiny layers.

    chain            |F   F   |        |  B        B    |
    simulated        |==|         measured  |========|            tasks that take longer than their kernels do
    4 layers         |F|  12 layers  |F  |  of 6 weights |F    |  by how much, for each task, layer and weight

The layers take next to no time, so that what is left is the engine's own: its Python between two operations, hooks of
layers and weights, the wake-up of a process. CPU devices only: the host of a GPU is ahead of it.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from omegaconf import DictConfig, OmegaConf
from scipy.optimize import nnls
from torch import Tensor, nn
from torch.nn import functional

from harness.config import cluster_config, registry
from harness.config.cluster_config import ClusterConfig
from harness.core.cluster import Cluster, EngineCosts, Held, TaskCost
from harness.core.model_profile import ModelProfile
from harness.core.op import COMPUTE
from harness.core.problem import CannotRun
from harness.core.trace import Trace
from harness.host import machine
from harness.interfaces import Batch, Engine, OptimizerSpec, Planner, Session, SessionSpec
from harness.launch import forked_ranks
from harness.measure import profile_model
from harness.planning import draft as planning_draft
from harness.planning.draft import Draft
from harness.schedule.step_parts import parts_s

CHAINS = ((4, 1, 16), (12, 1, 16), (4, 6, 16), (4, 1, 384))
"""Layers of a chain, matmuls of each layer, with two weights each, and their width."""
DEVICES = 2
SAMPLES, MICRO_BATCHES = 2, 4
"""Samples of a micro-batch, and micro-batches of a step on each replica."""
WARM_UP, STEPS = 4, 12
QUICK = 0.25
"""Of the steps the quickest count: this quantile of their times. Others use the machine, too."""
SMALLEST_S = 1e-6
"""Shorter ops count as one of this time."""
REPEATS = 3
"""Rounds of the profile of a chain."""
ROUNDS = 6
"""How often costs are corrected by what a simulation with them takes."""
Say = Callable[[str], None]


class TinyChain:
    """A model of `depth` equal layers, each of so many matmuls, which compute next to nothing."""

    name, task = "chain", "classification"

    def __init__(self, depth: int, matmuls: int, width: int) -> None:
        self.depth, self.matmuls, self.width = depth, matmuls, width
        self.input_shape: tuple[int, ...] = (width,)
        self.classes = width

    def layers(self) -> nn.Sequential:
        """The layers, freshly initialized."""
        width = self.width
        return nn.Sequential(
            *(nn.Sequential(*(nn.Linear(width, width) for _ in range(self.matmuls))) for _ in range(self.depth))
        )

    def sample(self, n: int) -> Batch:
        """Random vectors and classes."""
        return Batch(torch.randn(n, self.width), torch.randint(self.width, (n,)))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The sum of the cross entropies."""
        return functional.cross_entropy(output, target, reduction="sum")


class Seen(NamedTuple):
    """A chain that was trained: what was planned, and the median over its devices of what ops of each kind took."""

    draft: Draft
    took_s: dict[str, float]
    host_s: float


def measure(config: DictConfig, say: Say = lambda text: None) -> EngineCosts:
    """Measure the engine that `config` names, as its defaults are, with the run's optimizer.

    Returns costs without ops where it cannot train such chains here."""
    chosen = _config(config)
    nothing = EngineCosts(config.engine.name, config.optimizer.name)
    engine: Engine = registry.build("engine", chosen.engine)
    try:
        seen = [_seen(chosen, engine, TinyChain(*chain), say) for chain in CHAINS]
    except CannotRun as error:
        say(f"engine={config.engine.name} does not train a small chain here: {error}")
        return nothing
    return fitted(chosen, engine, seen)


def _config(config: DictConfig) -> DictConfig:
    """The run's configuration, for a small chain and the engine's defaults."""
    name = config.engine.name
    planners = getattr(registry.schemas()["engine", name], "PLANNERS", ("balance",))
    own = {
        "mode": "run",
        "engine": _defaults("engine", name),
        "planner": _defaults("planner", planners[0]),
        "mesh": dict.fromkeys(config.mesh),
        "memory": "auto",
        "optimizer": config.optimizer,
        "precision": {**config.precision, "dtype": "float32", "autocast": None},
        "batch": {**config.batch, "micro_batches": MICRO_BATCHES},
        "cluster": OmegaConf.structured(ClusterConfig(name="local", device="cpu", devices=DEVICES)),
    }
    return OmegaConf.create(own)


def _defaults(group: str, name: str) -> Any:
    return OmegaConf.structured(registry.schemas()[group, name])


def _seen(config: DictConfig, engine: Engine, model: TinyChain, say: Say) -> Seen:
    """Train a chain, and look at the trace."""
    say(f"training {model.depth} layers of {model.matmuls} matmuls with engine={config.engine.name}")
    threads = not engine.capabilities.multi_process
    quiet_s = machine.reference_s("cpu")
    profile = profile_model.measure(model, SAMPLES, "float32", "cpu", REPEATS, reference_s=quiet_s, twice=threads)
    draft = _draft(config, engine, profile, _cluster(config))
    names = ("cpu",) * DEVICES
    opened = engine.session(model, draft.plan, SessionSpec(names, OptimizerSpec(**config.optimizer)))
    step_s, trace = _trained(engine, opened, draft, model, names)
    return _looked_at(draft, step_s, trace)


def _cluster(config: DictConfig) -> Cluster:
    return cluster_config.build(cluster_config.from_group(config.cluster), machine.stored("cpu"))


def _draft(config: DictConfig, engine: Engine, profile: ModelProfile, cluster: Cluster) -> Draft:
    config = config.copy()
    wanted = planning_draft.mesh(config, engine, profile, cluster)
    config.batch.size = SAMPLES * MICRO_BATCHES * wanted.data
    planner: Planner = registry.build("planner", config.planner)
    return planning_draft.draft(config, engine, planner, profile, cluster)


def _trained(
    engine: Engine, opened: AbstractContextManager[Session], draft: Draft, model: TinyChain, names: Sequence[str]
) -> tuple[list[float], Trace]:
    """The seconds of the steps, and their trace."""
    torch.manual_seed(0)
    batch = model.sample(draft.samples)

    def train(session: Session) -> tuple[list[float], Trace]:
        taken_s = [session.step(batch).step_time_s for _ in range(WARM_UP + STEPS)]
        return taken_s[WARM_UP:], session.trace()

    if engine.capabilities.multi_process:
        mesh = draft.plan.mesh
        return forked_ranks.run_session_on_ranks(opened, train, mesh.size, names, engine.capabilities.mpi)
    with opened as session:
        return train(session)


def _looked_at(draft: Draft, step_s: Sequence[float], trace: Trace) -> Seen:
    """What the ops of a run took in its quicker steps; without a trace all that a step took longer is the host's."""
    if not trace.spans:
        longer_s = _quick(step_s) - draft.simulation.figures["step_time_s"]
        return Seen(draft, {}, max(0.0, longer_s) / _tasks(draft))
    kept = range(max(0, len(trace.steps) - STEPS), len(trace.steps))
    steps = [trace.only(number) for number in kept]
    took = [took_s(one) for one in steps]
    kinds = {kind for one in took for kind in one}
    parts = [found for one in steps if (found := parts_s(one, draft.schedule))]
    host_s = _quick([one["host"] for one in parts])
    return Seen(
        draft, {kind: _quick([one[kind] for one in took if kind in one]) for kind in kinds}, host_s / _tasks(draft)
    )


def _quick(seconds: Sequence[float]) -> float:
    return sorted(seconds)[int(QUICK * len(seconds))]


def took_s(step: Trace) -> dict[str, float]:
    """The mean time of the ops of each kind in a step: tasks, the optimizer, and calls of collectives."""
    found: dict[str, list[float]] = defaultdict(list)
    for span in step.spans:
        if span.queue == "compute" and span.parsed.kind in COMPUTE:
            found[span.parsed.kind].append(span.end_s - span.start_s)
    return {kind: statistics.mean(seconds) for kind, seconds in found.items()}


def _tasks(draft: Draft) -> float:
    """How many tasks a device has in a step."""
    queues = [queue for queue in draft.schedule.queues if queue.name == "compute"]
    return sum(op.kind in COMPUTE for queue in queues for op in queue.ops) / max(1, len({q.device for q in queues}))


def fitted(config: DictConfig, engine: Engine, seen: Sequence[Seen]) -> EngineCosts:
    """Costs with which the simulated ops take as long as they did.

    What an op takes longer is shared among itself, its layers and its weights by least squares of the relative errors.
    Devices that share cores make each other's costs longer, so they are corrected by simulations with them.
    """
    kinds = sorted({kind for one in seen for kind in one.took_s})
    host_s = statistics.median(one.host_s for one in seen)
    wanted = {kind: [one.took_s.get(kind, 0.0) for one in seen] for kind in kinds}
    extra = {
        kind: [
            max(0.0, took - took_s(one.draft.simulation.trace).get(kind, 0.0))
            for one, took in zip(seen, wanted[kind], strict=True)
        ]
        for kind in kinds
    }
    costs = EngineCosts(config.engine.name, config.optimizer.name, _shared(extra, wanted, seen), host_s)
    for _ in range(ROUNDS):
        found = [took_s(_again(config, engine, one.draft, costs).simulation.trace) for one in seen]
        for kind in kinds:
            rest = [took - one.get(kind, 0.0) for one, took in zip(found, wanted[kind], strict=True)]
            extra[kind] = [max(0.0, before + more / 2) for before, more in zip(extra[kind], rest, strict=True)]
        costs = replace(costs, ops=_shared(extra, wanted, seen))
    return costs


def _again(config: DictConfig, engine: Engine, draft: Draft, costs: EngineCosts) -> Draft:
    """The same step, simulated with costs."""
    layout = planning_draft.Layout(draft.plan, draft.profile, replace(draft.cluster, engines=(costs,)), draft.memory)
    return planning_draft.drafted(config, engine, layout)


def _shared(
    extra: Mapping[str, Sequence[float]], took: Mapping[str, Sequence[float]], seen: Sequence[Seen]
) -> tuple[TaskCost, ...]:
    """Costs of each kind, none of them below 0: base_s + layers * layer_s + ... = what it takes longer; errors count
    as parts of what it takes."""
    rows = [[1.0, *_held(one.draft)] for one in seen]
    found = []
    for kind, seconds in extra.items():
        scale = [1 / max(one, SMALLEST_S) for one in took[kind]]
        left = [[value * by for value in row] for row, by in zip(rows, scale, strict=True)]
        costs = nnls(left, [one * by for one, by in zip(seconds, scale, strict=True)])[0]
        found.append(TaskCost(kind, *map(float, costs)))
    return tuple(found)


def _held(draft: Draft) -> Held:
    """What the mean stage holds."""
    stages = draft.plan.stages
    held = [draft.profile.held(stage.first, stage.last) for stage in stages]
    return Held(*(sum(values) / len(stages) for values in zip(*held, strict=True)))
