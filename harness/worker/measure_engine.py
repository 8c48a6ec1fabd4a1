"""Measures what an engine takes on this machine beyond kernels and messages, by training chains of tiny layers.

    chain            |F   F   |        |  B        B    |
    simulated        |==|         measured  |========|            tasks that take longer than their kernels do
    4 layers         |F|  12 layers  |F  |  of 6 weights |F    |  by how much, for each task, layer and weight

The layers take next to no time, so that what is left is the engine's own: its Python between two operations, hooks of
layers and weights, the wake-up of a process. CPU devices only: the host of a GPU is ahead of it.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import NamedTuple

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
from harness.core.problem import CannotRun, ProblemError
from harness.core.trace import Trace
from harness.host.machine import Machine
from harness.interfaces import Batch, Engine, OptimizerSpec, Planner, Session, SessionSpec
from harness.launch import forked_ranks
from harness.launch.process_group import is_first_rank
from harness.measure import profile_model
from harness.measure.reference_work import Pace
from harness.planning import draft as planning_draft
from harness.planning.draft import Draft, optimizer_kind
from harness.schedule.step_parts import parts_s
from harness.simulator.op_durations import TaskCosts

CHAINS = (
    ((4, 1, 16), 2),
    ((12, 1, 16), 8),
    ((4, 6, 16), 4),
    ((4, 1, 1024), 4),
    ((4, 1, 16, 4), 4),
    ((12, 1, 128, 1, 128), 2),
    ((4, 2, 128, 0, 1024), 2),
)
"""Layers of a chain, matmuls of each layer, with two weights each, their width, batch norms after them, and rows of a
sample (0: it is one vector); and the micro-batches of a step on each replica. The last one has kernels of
milliseconds and activations that no cache holds: they take longer where other devices compute at the same time. The
one before it has batch norms of images' size with work between them, so that ranks that exchange sums wait for one
another. The
wide ones' weights are larger than a core's cache: smaller ones would be in it when a layer is profiled, and not when
the engine trains, so that reading them would count as the engine's time."""
DEVICES, SAMPLES = 2, 2
"""Devices, and samples of a micro-batch."""
WARM_UP, FEWEST, MOST = 4, 8, 24
"""Steps before those that are measured, and the numbers of these."""
SECONDS = 1.0
"""Measured steps of a chain are so many as a simulation without the engine's costs does in this time."""
QUICK = 0.25
"""Of the steps this share counts, the quickest ones: others use the machine, too."""
SMALLEST_S = 1e-6
"""Shorter ops count as one of this time."""
UNIT_S = 1e-3
"""The time with which it is tried how much a step takes longer."""
REPEATS = 3
"""Rounds of the profile of a chain."""
ROUNDS = 6
"""How often costs are corrected by what a simulation with them takes."""
HALVES = ("I", "W")
"""Kinds of the halves of a backward pass."""
Say = Callable[[str], None]


class TinyChain:
    """A model of `depth` equal layers, each of so many matmuls and batch norms, which compute next to nothing; with
    `rows` each sample has so many vectors, and each layer an activation function."""

    name, task = "chain", "classification"

    def __init__(self, depth: int, matmuls: int, width: int, norms: int = 0, rows: int = 0) -> None:
        self.depth, self.matmuls, self.width, self.norms, self.rows = depth, matmuls, width, norms, rows
        self.input_shape: tuple[int, ...] = (rows, width) if rows else (width,)
        self.classes = width

    def layers(self) -> nn.Sequential:
        """The layers, freshly initialized."""
        return nn.Sequential(*(self._layer() for _ in range(self.depth)))

    def _layer(self) -> nn.Sequential:
        matmuls = [nn.Linear(self.width, self.width) for _ in range(self.matmuls)]
        norms = [nn.BatchNorm1d(self.rows or self.width) for _ in range(self.norms)]
        return nn.Sequential(*matmuls, *norms, *([nn.GELU()] if self.rows else []))

    def sample(self, n: int) -> Batch:
        """Random vectors and classes."""
        return Batch(torch.randn(n, *self.input_shape), torch.randint(self.width, (n,)))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The sum of the cross entropies."""
        return functional.cross_entropy(output.mean(1) if self.rows else output, target, reduction="sum")


class Seen(NamedTuple):
    """A chain that was trained: what was planned, and means over its devices and quicker steps: seconds of a step, of
    an op of each kind (a call of a collective), and of those in which the host kept a device waiting. `slowed` is by
    how much other programs slowed it down."""

    draft: Draft
    step_s: float
    took_s: dict[str, float]
    host_s: float
    slowed: float = 1.0


def measure(config: DictConfig, here: Machine, say: Say = lambda text: None) -> EngineCosts:
    """Measure the engine that `config` names, as its defaults are, with the run's optimizer, on a machine whose speed
    is known. Where it cannot train such chains the result says why."""
    name, optimizer = config.engine.name, optimizer_kind(config)
    try:
        engine: Engine = registry.build("engine", registry.defaults("engine", name))
        halves = in_halves(engine, name)
        seen, split = _of_chains(config, engine, halves, here, say)
        costs = fitted(config, engine, seen)
    except (CannotRun, ProblemError) as error:
        return EngineCosts(
            name, optimizer, why=f"it cannot train a small chain of layers: {' '.join(str(error).split())}"
        )
    return with_halves(config, halves, split, costs) if halves and split else costs


def in_halves(engine: Engine, name: str) -> Engine | None:
    """The engine with a schedule whose backward passes come in halves; None if it has none."""
    if not engine.capabilities.halves:
        return None
    node = registry.defaults("engine", name)
    node.schedule = engine.capabilities.halves
    halves: Engine = registry.build("engine", node)
    return halves


def _of_chains(
    config: DictConfig, engine: Engine, halves: Engine | None, here: Machine, say: Say
) -> tuple[list[Seen], list[Seen]]:
    """The chains, and those with backward passes in halves; none of these where one cannot be trained so."""
    seen: list[Seen] = []
    split: list[Seen] = []
    for chain, count in CHAINS:
        model, own = TinyChain(*chain), _config(config, count)
        profile = _profiled(model, engine, here)
        seen.append(_seen(own, engine, model, profile, here, say))
        try:
            split += [_seen(own, halves, model, profile, here, say)] if halves else []
        except (CannotRun, ProblemError) as error:
            say(f"halves of backward passes are taken for halves of whole ones: {' '.join(str(error).split())}")
            halves, split = None, []
    return seen, split


def _config(config: DictConfig, micro_batches: int) -> DictConfig:
    """The run's configuration, for a small chain and the engine's defaults."""
    name = config.engine.name
    own = {
        "mode": "run",
        "engine": registry.defaults("engine", name),
        "planner": registry.defaults("planner", (*registry.planners(name), "balance")[0]),
        "mesh": dict.fromkeys(config.mesh),
        "memory": "auto",
        "optimizer": config.optimizer,
        "precision": {**config.precision, "dtype": "float32", "autocast": None, "compile": False},
        "batch": {**config.batch, "micro_batches": micro_batches},
        "cluster": OmegaConf.structured(ClusterConfig(name="local", device="cpu", devices=DEVICES)),
    }
    return OmegaConf.create(own)


def _profiled(model: TinyChain, engine: Engine, here: Machine) -> ModelProfile:
    return profile_model.measure(
        model,
        SAMPLES,
        "float32",
        "cpu",
        REPEATS,
        reference_s=here.reference_s,
        twice=not engine.capabilities.multi_process,
        halves=engine.capabilities.tensor,
    )


def _seen(config: DictConfig, engine: Engine, model: TinyChain, profile: ModelProfile, here: Machine, say: Say) -> Seen:
    """Train a chain, and look at the trace."""
    say(f"training {model.depth} layers of {model.matmuls} matmuls with engine={config.engine.name}")
    draft = _draft(config, engine, profile, cluster_config.build(cluster_config.from_group(config.cluster), here))
    names = ("cpu",) * DEVICES
    opened = engine.session(model, draft.plan, SessionSpec(names, OptimizerSpec(**config.optimizer)))
    pace = Pace(here.reference_s)
    before = pace.look()
    step_s, trace = _trained(engine, opened, draft, model, names, say)
    return _looked_at(draft, step_s, trace)._replace(slowed=max(profile.slowed, min(before, pace.look())))


def _draft(config: DictConfig, engine: Engine, profile: ModelProfile, cluster: Cluster) -> Draft:
    config = config.copy()
    wanted = planning_draft.mesh(config, engine, profile, cluster)
    config.batch.size = SAMPLES * config.batch.micro_batches * wanted.data
    planner: Planner = registry.build("planner", config.planner)
    return planning_draft.draft(config, engine, planner, profile, cluster)


def _trained(
    engine: Engine,
    opened: AbstractContextManager[Session],
    draft: Draft,
    model: TinyChain,
    names: Sequence[str],
    say: Say,
) -> tuple[list[float], Trace]:
    """The seconds of the steps, and their trace."""
    torch.manual_seed(0)
    batch = model.sample(draft.samples)
    count = WARM_UP + _steps(draft)

    def train(session: Session) -> tuple[list[float], Trace]:
        taken_s = []
        for number in range(count):
            taken_s.append(session.step(batch).step_time_s)
            if is_first_rank():
                say(f"step {number + 1} of {count}: {taken_s[-1]:.4f} s")
        return taken_s[WARM_UP:], session.trace()

    if engine.capabilities.multi_process:
        mesh = draft.plan.mesh
        return forked_ranks.run_session_on_ranks(opened, train, mesh.size, names, engine.capabilities.mpi)
    with opened as session:
        return train(session)


def _steps(draft: Draft) -> int:
    """How many steps are measured: of short ones more, which cost little and scatter more."""
    return min(MOST, max(FEWEST, int(SECONDS / draft.simulation.figures["step_time_s"])))


def _looked_at(draft: Draft, step_s: Sequence[float], trace: Trace) -> Seen:
    """What a run took in its quicker steps; without a trace that is the seconds of a step alone."""
    quick = sorted(range(len(step_s)), key=step_s.__getitem__)[: max(1, int(QUICK * len(step_s)))]
    mean_s = statistics.mean(step_s[number] for number in quick)
    if not trace.spans:
        return Seen(draft, mean_s, {}, 0.0)
    first = len(trace.steps) - len(step_s)
    steps = [trace.only(first + number) for number in quick]
    took = [took_s(one, draft) for one in steps]
    parts = [found for one in steps if (found := parts_s(one, draft.schedule))]
    mean = {
        kind: statistics.mean(one[kind] for one in took if kind in one) for kind in {k for one in took for k in one}
    }
    return Seen(draft, mean_s, mean, statistics.mean(one["host"] for one in parts))


def took_s(step: Trace, draft: Draft) -> dict[str, float]:
    """The mean time of the ops of each kind in a step: tasks, the optimizer, and each call of collectives; of the
    halves of a backward pass those of stages that have both."""
    ops = draft.schedule.ops()
    calls = {str(op): op.calls for op in ops if op.kind == "collective"}
    split = {(op.stage, op.micro_batch) for op in ops if op.kind == "W"}
    costs = _costs(draft)
    seconds: dict[str, float] = defaultdict(float)
    count: Counter[str] = Counter()
    for span in step.spans:
        op, kind = span.parsed, str(span.parsed.kind)
        if (op.stage, op.micro_batch) in split and op.kind in ("B", "W"):
            kind = {"B": "I"}.get(kind, kind)
            if not costs.has_halves(op.stage):
                continue
        if kind == "collective" or (span.queue == "compute" and op.kind in COMPUTE):
            seconds[kind] += span.end_s - span.start_s
            count[kind] += calls.get(span.op, 1)
    return {kind: total / count[kind] for kind, total in seconds.items()}


def _costs(draft: Draft) -> TaskCosts:
    return TaskCosts(draft.plan, draft.profile, draft.cluster, draft.memory)


def _tasks(draft: Draft) -> float:
    """How many tasks a device has in a step."""
    queues = [queue for queue in draft.schedule.queues if queue.name == "compute"]
    return sum(op.kind in COMPUTE for queue in queues for op in queue.ops) / max(1, len({q.device for q in queues}))


def fitted(config: DictConfig, engine: Engine, seen: Sequence[Seen]) -> EngineCosts:
    """Costs with which the simulated ops take as long as they did; where there is no trace, the simulated steps.

    What an op takes longer is shared among itself and what its stage holds, by least squares of the relative errors.
    Devices that share cores make each other's costs longer, so they are corrected by simulations with them.
    """
    kinds = sorted({kind for one in seen for kind in one.took_s} - {*HALVES})
    costs = EngineCosts(config.engine.name, optimizer_kind(config), slowed=max(one.slowed for one in seen))
    if not kinds:
        return _of_steps(config, engine, seen, costs)
    host_s, step_s = nnls([[_tasks(one.draft), 1.0] for one in seen], [one.host_s for one in seen])[0]
    costs = replace(costs, host_s=float(host_s), step_s=float(step_s))
    return _with_ops(config, engine, seen, costs, kinds)


def with_halves(config: DictConfig, engine: Engine, seen: Sequence[Seen], costs: EngineCosts) -> EngineCosts:
    """Costs with those of the halves of a backward pass, of an `engine` that has been `seen` to split them."""
    kinds = sorted({kind for one in seen for kind in one.took_s if kind in HALVES})
    slowed = max(costs.slowed, *(one.slowed for one in seen))
    return _with_ops(config, engine, seen, replace(costs, slowed=slowed), kinds)


def _with_ops(
    config: DictConfig, engine: Engine, seen: Sequence[Seen], costs: EngineCosts, kinds: Sequence[str]
) -> EngineCosts:
    """Costs with those of ops of some kinds, such that simulated ones take as long as they did."""
    wanted = {kind: [one.took_s.get(kind, 0.0) for one in seen] for kind in kinds}
    extra: dict[str, list[float]] = {kind: [0.0] * len(seen) for kind in kinds}
    known = costs.ops
    for number in range(ROUNDS):
        again = [_again(config, engine, one.draft, costs) for one in seen]
        found = [took_s(one.simulation.trace, one) for one in again]
        for kind in kinds:
            rest = [took - one.get(kind, 0.0) for one, took in zip(found, wanted[kind], strict=True)]
            share = 0.5 if number else 1.0
            extra[kind] = [max(0.0, before + share * more) for before, more in zip(extra[kind], rest, strict=True)]
        costs = replace(costs, ops=(*known, *_shared(extra, wanted, seen)))
    return costs


def _of_steps(config: DictConfig, engine: Engine, seen: Sequence[Seen], costs: EngineCosts) -> EngineCosts:
    """What the host takes for each task and for each step, so that simulated steps take as long as the real ones."""
    plain = [one.draft.simulation.figures["step_time_s"] for one in seen]
    units = (replace(costs, host_s=UNIT_S), replace(costs, step_s=UNIT_S))
    rows = [
        [(_again(config, engine, one.draft, unit).simulation.figures["step_time_s"] - alone) / UNIT_S for unit in units]
        for one, alone in zip(seen, plain, strict=True)
    ]
    longer_s = [max(0.0, one.step_s - alone) for one, alone in zip(seen, plain, strict=True)]
    host_s, step_s = nnls(rows, longer_s)[0]
    return replace(costs, host_s=float(host_s), step_s=float(step_s))


def _again(config: DictConfig, engine: Engine, draft: Draft, costs: EngineCosts) -> Draft:
    """The same step, simulated with costs."""
    layout = planning_draft.Layout(draft.plan, draft.profile, replace(draft.cluster, engines=(costs,)), draft.memory)
    return planning_draft.drafted(config, engine, layout)


def _shared(
    extra: Mapping[str, Sequence[float]], took: Mapping[str, Sequence[float]], seen: Sequence[Seen]
) -> tuple[TaskCost, ...]:
    """Costs of each kind, none of them below 0: base_s + layers * layer_s + ... + kernels' time * share = what it takes
    longer; errors count as parts of what it takes."""
    found = []
    for kind, seconds in extra.items():
        rows = [[1.0, *_held(one.draft), _kernels_s(one.draft, kind)] for one in seen]
        scale = [1 / max(one, SMALLEST_S) for one in took[kind]]
        left = [[value * by for value in row] for row, by in zip(rows, scale, strict=True)]
        left = [row[:1] for row in left] if kind == "collective" else left
        costs = nnls(left, [one * by for one, by in zip(seconds, scale, strict=True)])[0]
        found.append(TaskCost(kind, *map(float, costs)))
    return tuple(found)


def _held(draft: Draft) -> Held:
    """What the mean stage holds."""
    stages = draft.plan.stages
    held = [draft.profile.held(stage.first, stage.last) for stage in stages]
    return Held(*(sum(values) / len(stages) for values in zip(*held, strict=True)))


def _kernels_s(draft: Draft, kind: str) -> float:
    """What the kernels of a task take in the mean stage by the profile; 0 for the optimizer, and where one
    device computes."""
    if draft.plan.mesh.size == 1:
        return 0.0
    costs = _costs(draft)
    stages = range(len(draft.plan.stages))
    counted = [stage for stage in stages if kind not in HALVES or costs.has_halves(stage)]
    each = costs.kernels_s.get(kind)
    return sum(each[stage] for stage in counted) / max(1, len(counted)) if each else 0.0
