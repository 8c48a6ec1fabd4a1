"""From a plan to the chain that an order is searched for, with the simulator's times and bytes; and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from harness.core.cluster import Cluster
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import ModelProfile
from harness.core.op import Op
from harness.core.plan import Plan
from harness.core.problem import Problem, ProblemError
from harness.order_search.bounds import lower_bound
from harness.order_search.chain import Chain, Message, Orders, evaluate, fits, tasks_of
from harness.order_search.search import SECONDS, Found, search
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
    held = kept(schedule, one, profile, memory)
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


def searched(
    plan: Plan,
    profile: ModelProfile,
    cluster: Cluster,
    memory: MemoryModel,
    transfers: Sequence[Transfer],
    schedule_of: Callable[[Plan], Schedule],
    seconds: float = SECONDS,
) -> Plan:
    """Return the plan with the fastest order that was found, and what is known of it among the plan's predictions.

    `schedule_of` is the schedule of a plan with an order, as the engine runs it. What the search finds and the
    published orders are simulated, and the fastest of those that fit is taken: a chain counts memory a little too high.
    Stages are recomputed only where memory binds. Raises ProblemError where no order fits.
    """
    chain = chain_of(plan, profile, cluster, memory, transfers)
    known = families(chain)
    nothing, found = None, None
    try:
        found = _of_chain(chain, known, seconds)
    except ProblemError as error:
        nothing = error
    orders, available = {FOUND: found.orders} | known if found else known, _available(cluster, memory)
    tried: dict[str, tuple[float, int, Plan]] = {}
    for name, one in orders.items():
        ordered = plan_order.with_order(plan, _actions(one))
        figures = simulate(schedule_of(ordered), ordered, profile, cluster, memory).figures
        if available is None or max(figures["peak_memory_bytes"]) <= available:
            tried[name] = figures["step_time_s"], max(figures["peak_memory_bytes"]), ordered
    published = min(known.keys() & tried.keys(), key=lambda name: tried[name][:2], default=None)
    best = min(tried, key=lambda name: tried[name][:2], default=None)
    if best is None:
        hint = "more devices, smaller micro-batches"
        raise nothing or ProblemError(Problem("engine.schedule", "search", "finds no order that fits", hint=hint))
    chain_s = evaluate(chain, orders[best]).step_s
    bound_s = min(chain_s, found.bound_s if found else lower_bound(chain))
    figures = {
        "searched_by": found.method if found and best == FOUND else f"the published {best}",
        "search_bound_s": bound_s,
        "search_gap": 1 - bound_s / chain_s if chain_s else 0.0,
        "best_family": published,
        "best_family_s": tried[published][0] if published else None,
    }
    known_figures = {key: value for key, value in figures.items() if value is not None}
    return replace(tried[best][2], predicted=plan.predicted | known_figures)


def _of_chain(chain: Chain, known: dict[str, Orders], seconds: float) -> Found:
    """Search without recomputation and, where memory binds, with it. Raises ProblemError where nothing fits."""
    found = None
    with suppress(ProblemError):
        found = search(replace(chain, checkpoint_bytes=()), known, seconds / 2)
    if found is None or _binds(chain, found):
        again = search(chain, known, seconds / 2)
        found = again if found is None or again.step_s < found.step_s else found
    return found


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
