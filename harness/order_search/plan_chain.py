"""From a plan to the chain that an order is searched for, with the simulator's times and bytes; and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from harness.core.cluster import Cluster
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import ModelProfile
from harness.core.op import Op
from harness.core.plan import Plan
from harness.core.problem import Problem, ProblemError
from harness.order_search.bounds import lower_bound
from harness.order_search.chain import Chain, Message, Orders, evaluate, fits, tasks_of
from harness.order_search.list_scheduling import least_memory
from harness.order_search.search import CLOSE, ONE_BY_ONE, SECONDS, START, Found, search
from harness.schedule import Schedule, collect_queues, plan_order
from harness.schedule.action_file import Action, Actions
from harness.schedule.families import FAMILIES
from harness.schedule.transfers import Transfer, with_messages
from harness.simulator import lower, simulate
from harness.simulator.memory_timeline import Kept, kept

FOUND = "search"


def chain_of(
    plan: Plan, profile: ModelProfile, cluster: Cluster, memory: MemoryModel, transfers: Sequence[Transfer]
) -> Chain:
    """Return the chain of a plan: tasks and messages take what the simulator says they do with nothing else under way.

    What a device keeps beyond its tasks counts against its memory: weights, gradients, optimizer, buffers, and one
    message of each kind that waits.
    """
    schedule = _one_micro_batch(plan, transfers)
    one = replace(plan, micro_batches=1)
    lowered = lower(schedule, one, profile, cluster, memory)[0]
    seconds = {str(op): lowered.uncontended_s(node) for node, op in enumerate(lowered.graph.ops)}
    copies = [op for op in schedule.ops() if op.kind == "copy" and op.forward and op.peer is not None]
    messages = tuple(Message(op.peer or 0, op.stage, seconds[str(op)]) for op in copies)
    stages = range(len(plan.stages))
    held = kept(schedule, plan, profile, memory)
    bytes_ = [(sizes, received) for sizes, received in zip(held.stages, held.received, strict=True)]
    return Chain(
        tuple(stage.device for stage in plan.stages),
        plan.micro_batches,
        tuple(seconds[f"{j}F0"] for j in stages),
        tuple(seconds[f"{j}B0"] for j in stages),
        tuple(seconds[f"{j}W0"] for j in stages),
        messages,
        tuple(sizes.saved + sizes.outputs + received for sizes, received in bytes_),
        tuple(sizes.delayed for sizes, _ in bytes_),
        tuple(max(sizes.working, sizes.inputs_working) for sizes, _ in bytes_),
        tuple(sizes.checkpoint + sizes.outputs + received for sizes, received in bytes_),
        _limits(plan, _available(cluster, memory), held),
    )


def _available(cluster: Cluster, memory: MemoryModel) -> int | None:
    """The bytes of a device that a run may use; None where they are not known."""
    total = cluster.device.memory_bytes
    return memory.available_bytes(total) if total else None


def _limits(plan: Plan, available: int | None, held: Kept) -> tuple[int | None, ...]:
    if available is None:
        return ()
    left = {device: available - resident for device, resident in held.resident.items()}
    for number, stage in enumerate(plan.stages):
        left[stage.device] -= held.received[number] + held.gradients[number]
    return tuple(left[device] for device in range(max(left) + 1))


def _one_micro_batch(plan: Plan, transfers: Sequence[Transfer]) -> Schedule:
    devices = [stage.device for stage in plan.stages]
    tasks = [Op(j, "F", 0) for j in range(len(devices))]
    for j in reversed(range(len(devices))):
        tasks += [Op(j, "B", 0), Op(j, "W", 0)]
    rows = [[op for op in tasks if devices[op.stage] == device] for device in range(max(devices) + 1)]
    return Schedule(collect_queues(with_messages(rows, devices, transfers)), tuple(devices))


@dataclass(frozen=True)
class Judge:
    """What orders are judged by: `layers`, `transfers` and `schedule` are what the engine makes of a plan.

    Without `recomputes` no stage is recomputed.
    """

    cluster: Cluster
    memory: MemoryModel
    layers: Callable[[Plan], ModelProfile]
    transfers: Callable[[Plan], Sequence[Transfer]]
    schedule: Callable[[Plan], Schedule]
    recomputes: bool = True

    def chain(self, plan: Plan) -> Chain:
        """Return the chain of a plan (`chain_of`)."""
        chain = chain_of(plan, self.layers(plan), self.cluster, self.memory, self.transfers(plan))
        return chain if self.recomputes else replace(chain, checkpoint_bytes=())

    def simulated(self, plan: Plan, orders: Orders) -> Ordered:
        """Return a plan with an order, as the simulator sees it."""
        ordered = plan_order.with_order(plan, _actions(orders))
        figures = simulate(self.schedule(ordered), ordered, self.layers(plan), self.cluster, self.memory).figures
        peak, available = max(figures["peak_memory_bytes"]), _available(self.cluster, self.memory)
        missing = 0 if available is None else max(0, peak - available)
        return Ordered(ordered, orders, figures["step_time_s"], peak, missing)


@dataclass(frozen=True)
class Ordered:
    """A plan with an order: seconds of a step, bytes of the fullest device, and those that it does not have."""

    plan: Plan
    orders: Orders
    step_s: float
    peak_bytes: int
    missing_bytes: int

    @property
    def rank(self) -> tuple[int, float, int]:
        """Less is better: first all must fit, then the time counts."""
        return self.missing_bytes, self.step_s, self.peak_bytes

    def is_better(self, other: Ordered) -> bool:
        """Whether it needs fewer bytes that are missing, or as many and less time."""
        if self.missing_bytes != other.missing_bytes:
            return self.missing_bytes < other.missing_bytes
        return self.step_s < other.step_s * (1 - CLOSE)


def searched(plan: Plan, judge: Judge, seconds: float = SECONDS, start: Orders | None = None) -> Ordered:
    """Return the plan with the fastest order that was found, and what is known of it among the plan's predictions.

    What the search finds, the published orders and the one to `start` with, if there is one, are simulated, and the
    fastest of those that fit is taken: a chain counts memory a little too high, so it may say of an order that fits
    that it does not. Stages are recomputed only where memory binds. Raises ProblemError where no order fits.
    """
    chain = judge.chain(plan)
    known = families(chain)
    nothing, found = None, None
    try:
        found = of_chain(chain, known, seconds, start)
    except ProblemError as error:
        nothing = error
    orders = ({FOUND: found.orders} if found else {ONE_BY_ONE: least_memory(chain)}) | known
    orders |= {START: start} if start else {}
    simulated = {name: judge.simulated(plan, one) for name, one in orders.items()}
    tried = {name: one for name, one in simulated.items() if not one.missing_bytes}
    published = min(known.keys() & tried.keys(), key=lambda name: tried[name].rank, default=None)
    best = min(tried, key=lambda name: tried[name].rank, default=None)
    if best is None:
        hint = "more devices, smaller micro-batches"
        raise nothing or ProblemError(Problem("engine.schedule", "search", "finds no order that fits", hint=hint))
    chain_s = evaluate(chain, orders[best]).step_s
    bound_s = min(chain_s, found.bound_s if found else lower_bound(chain))
    method = f"the published {best}" if best in known else best
    figures = {
        "searched_by": found.method if found and best == FOUND else method,
        "search_bound_s": bound_s,
        "search_gap": 1 - bound_s / chain_s if chain_s else 0.0,
        "best_family": published,
        "best_family_s": tried[published].step_s if published else None,
    }
    known_figures = {key: value for key, value in figures.items() if value is not None}
    ordered = tried[best]
    return replace(ordered, plan=replace(ordered.plan, predicted=plan.predicted | known_figures))


def of_chain(chain: Chain, known: dict[str, Orders], seconds: float, start: Orders | None) -> Found:
    """Search without recomputation and, where memory binds, with it: its bound then holds for both. Raises ProblemError
    where nothing fits."""
    found, whole = None, None if start and any(task[0] == "R" for row in start for task in row) else start
    with suppress(ProblemError):
        found = search(replace(chain, checkpoint_bytes=()), known, seconds / 2, whole)
    if found is None or _binds(chain, found):
        again = search(chain, known, seconds / 2, start)
        found = again if found is None or again.step_s < found.step_s else found
    if chain.checkpoint_bytes and not _keeps_all(chain):
        found = replace(found, bound_s=min(found.bound_s, lower_bound(chain)))
    return found


def _keeps_all(chain: Chain) -> bool:
    """Whether devices have memory for all that their stages ever keep: no order then gains by a recomputation."""
    kept = [0] * chain.width
    for j, device in enumerate(chain.devices):
        each = chain.of(chain.saved_bytes, j) + chain.of(chain.delayed_bytes, j)
        kept[device] += chain.micro_batches * each + chain.of(chain.working_bytes, j)
    return all(size <= chain.limit(device) for device, size in enumerate(kept))


def _actions(orders: Orders) -> Actions:
    return Actions(tuple(tuple(Action(j, kind, i) for kind, j, i in row) for row in orders))


def _binds(chain: Chain, found: Found) -> bool:
    """Whether the limits keep the search from the best published order."""
    free = replace(chain, limits=(), checkpoint_bytes=())
    best_s = min((evaluate(free, orders).step_s for orders in families(chain).values()), default=found.step_s)
    return best_s < found.step_s or not fits(chain, evaluate(chain, found.orders))


def families(chain: Chain) -> dict[str, Orders]:
    """Return the orders of the published families that have these stages on these devices."""
    found = {}
    width, chunks = chain.width, chain.stages // chain.width
    for name, family in FAMILIES.items():
        if family.placement(width, chunks) == chain.devices and not family.refuses(chain.micro_batches, width):
            queues = family.build(chain.micro_batches, width, chunks, ()).by_queue()
            found[name] = [tasks_of(queues[device, "compute"]) for device in range(width)]
    return found
