"""The search against brute force, the bounds against both, the evaluation against the simulator."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest

from analysis.order_search.chains import COUNT, drawn
from harness.core.cluster import Cluster
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.op import Op
from harness.core.plan import Mesh, Plan, Stage
from harness.core.problem import ProblemError
from harness.order_search import integer_program
from harness.order_search.bounds import lower_bound
from harness.order_search.chain import Chain, Message, Orders, evaluate, fits, peak
from harness.order_search.list_scheduling import least_memory, one_at_a_time, rules, scheduled
from harness.order_search.local_search import improved
from harness.order_search.plan_chain import families
from harness.order_search.search import search
from harness.schedule import Schedule, collect_queues
from harness.schedule.transfers import transfers, with_messages
from harness.simulator import simulate
from tests.harness.order_search import brute_force

FEW = tuple(range(0, COUNT, 10))
"""Of the random chains those of the fast and the full tier; the fast one has the first five."""
TINY = [drawn(seed, (2,), (2, 2)) for seed in range(12)]


def schedule_of(chain: Chain, orders: Orders) -> Schedule:
    boundaries = transfers([0] * (chain.stages - 1), (), portals=True)
    ops = [[Op(j, "B" if kind == "I" else kind, i) for kind, j, i in row] for row in orders]  # type: ignore[arg-type]
    return Schedule(collect_queues(with_messages(ops, chain.devices, boundaries)), chain.devices)


@pytest.mark.parametrize("seed", range(8))
def test_it_takes_as_long_as_the_simulator_says(seed: int) -> None:
    chain = replace(drawn(seed), limits=())
    plan = Plan(Mesh(), tuple(Stage(j, j, d) for j, d in enumerate(chain.devices)), chain.micro_batches)
    profile = ModelProfile((LayerProfile(),) * chain.stages)
    for orders in list(families(chain).values()):
        schedule = schedule_of(chain, orders)
        split = {(op.stage, op.micro_batch) for op in schedule.ops() if op.kind == "W"}
        seconds = {}
        for op in schedule.ops():
            kind = {"B": "I" if (op.stage, op.micro_batch) in split else "B"}.get(op.kind, op.kind)
            message = next((m.seconds for m in chain.messages if {m.source, m.target} == {op.stage, op.peer}), 0.0)
            seconds[str(op)] = message if op.kind == "copy" else chain.task_s.get((kind, op.stage), 0.0)
        done = simulate(schedule, plan, profile, Cluster(devices_per_node=9), MemoryModel(), durations=seconds)
        assert evaluate(chain, orders).step_s == pytest.approx(done.figures["step_time_s"])


@pytest.mark.parametrize("chain", TINY, ids=str)
def test_it_finds_what_brute_force_finds(chain: Chain) -> None:
    best_s = brute_force.best(chain)
    found = search(chain)
    assert brute_force.valid(chain, found.orders)
    assert found.step_s == pytest.approx(evaluate(chain, found.orders).step_s)
    assert lower_bound(chain) <= best_s + 1e-9
    assert found.bound_s <= best_s + 1e-9
    assert found.step_s == pytest.approx(best_s)


def heavy(seed: int) -> Chain:
    """A tiny chain whose W may keep more than its F, and whose limits may let in no halves."""
    draw = random.Random(seed)
    forward_s, input_s, weight_s = (tuple(float(draw.randint(1, 6)) for _ in range(2)) for _ in range(3))
    saved, delayed, working = (tuple(draw.randint(*of) for _ in range(2)) for of in ((2, 6), (0, 9), (0, 3)))
    limits = tuple(saved[j] + working[j] + draw.randint(0, saved[j] + delayed[j]) for j in range(2))
    messages = (Message(0, 1, float(draw.randint(0, 3))),)
    return Chain((0, 1), 2, forward_s, input_s, weight_s, messages, saved, delayed, working, (), limits)


@pytest.mark.parametrize("seed", range(12))
def test_the_integer_program_knows_when_halves_do_not_fit(seed: int) -> None:
    """Its bound is the least time, and what it finds takes that and fits."""
    chain = heavy(seed)
    best_s, known_s = brute_force.best(chain), evaluate(chain, one_at_a_time(chain)).step_s
    bound_s, orders = integer_program.solved(chain, known_s, 5.0)
    assert bound_s == pytest.approx(best_s, rel=1e-5)
    assert orders is None or brute_force.valid(chain, orders)
    assert min(known_s, evaluate(chain, orders).step_s if orders else known_s) == pytest.approx(best_s)


SOLVED = {
    "two stages on each device": (
        Chain((0, 1, 1, 0), 4, (8, 6, 2, 9), (3, 6, 1, 1), (6, 4, 6, 1),
              (Message(1, 2, 1), Message(2, 3, 1), Message(0, 3, 4)),
              (10, 6, 3, 6), (1, 8, 0, 1), (8, 0, 7, 11), (), (27, 16)), 174.0),
    "four stages, eight micro-batches": (
        Chain((0, 1, 2, 3), 8, (8, 7, 5, 5), (2, 5, 1, 3), (3, 6, 6, 1),
              (Message(0, 1, 10), Message(1, 2, 1), Message(2, 3, 1)),
              (7, 2, 10, 9), (2, 1, 1, 3), (7, 1, 7, 0), (), (17, 4, 20, 13)), 483.0),
}  # fmt: skip


@pytest.mark.parametrize(("chain", "best_s"), SOLVED.values(), ids=list(SOLVED))
@pytest.mark.usefixtures("computation")
def test_what_another_search_has_proven(chain: Chain, best_s: float) -> None:
    """Another program has tried all orders, with what is worse than another left out."""
    found = search(chain, families(chain))
    assert brute_force.valid(chain, found.orders)
    assert found.step_s == pytest.approx(best_s)
    assert found.proven


@pytest.mark.parametrize("known_s", [178.0, 180.0, 190.0])
def test_the_solver_finds_the_order_that_there_is(known_s: float) -> None:
    """The presolve of HiGHS says of one of these programs that it has no solution."""
    chain, best_s = SOLVED["two stages on each device"]
    bound_s, orders = integer_program.solved(chain, known_s, 5.0)
    assert orders is not None
    assert evaluate(chain, orders).step_s == pytest.approx(best_s)
    assert bound_s == pytest.approx(best_s, rel=1e-5)


@pytest.mark.parametrize("placement", [(0, 1, 2, 3, 3, 2, 1, 0), (0, 1) * 3], ids=["v", "loop"])
def test_the_least_memory_is_found_where_part_of_the_stages_are_recomputed(placement: tuple[int, ...]) -> None:
    """Stages of a device keep checkpoints, but for the last one, which needs more with one."""
    n = len(placement)
    saved, working = tuple(7 + j % 4 for j in range(n)), tuple(j % 3 for j in range(n))
    some = (1.0,) * n
    chain = Chain(placement, 3, some, some, some, (), saved, (), working, (2,) * n)
    sets = [frozenset(j for j in range(n) if chosen[j]) for chosen in product((False, True), repeat=n)]
    peaks = [[peak(chain, row) for row in one_at_a_time(chain, again)] for again in sets]
    least = tuple(min(of_device) for of_device in zip(*peaks, strict=True))
    assert tuple(peak(chain, row) for row in least_memory(chain)) == least
    limited = replace(chain, limits=least)
    found = search(limited, seconds=2.0)
    assert brute_force.valid(limited, found.orders)


@pytest.mark.parametrize("chain", TINY[:4], ids=str)
@pytest.mark.usefixtures("computation")
def test_the_unit_of_times_and_bytes_is_no_matter(chain: Chain, capfd: pytest.CaptureFixture[str]) -> None:
    """The integer program's tolerances are absolute: microseconds and gigabytes are what they are in a plan."""
    seconds, size = 1e-5, 10**8

    def times(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(seconds * one for one in values)

    def sizes(values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(size * one for one in values)

    scaled = replace(
        chain,
        forward_s=times(chain.forward_s), input_s=times(chain.input_s), weight_s=times(chain.weight_s),
        messages=tuple(replace(one, seconds=seconds * one.seconds) for one in chain.messages),
        saved_bytes=sizes(chain.saved_bytes), delayed_bytes=sizes(chain.delayed_bytes),
        working_bytes=sizes(chain.working_bytes), checkpoint_bytes=sizes(chain.checkpoint_bytes),
        limits=tuple(None if one is None else size * one for one in chain.limits),
    )  # fmt: skip
    plain, found = search(chain), search(scaled)
    assert found.step_s == pytest.approx(seconds * plain.step_s, rel=1e-6)
    assert found.bound_s == pytest.approx(seconds * plain.bound_s, rel=1e-6)
    assert capfd.readouterr().out == "", "the solver prints nothing"


@pytest.mark.parametrize("seed", FEW)
def test_random_chains(seed: int) -> None:
    never_worse(seed)


@pytest.mark.parametrize("seed", sorted(set(range(COUNT)) - set(FEW)))
def test_more_random_chains(seed: int) -> None:
    never_worse(seed, seconds=4.0)


def never_worse(seed: int, seconds: float = 2.0) -> None:
    """Never worse than the best family that fits, within the limits, the same each time; never below the bound."""
    chain = drawn(seed)
    known = families(chain)
    found = search(chain, known, seconds=seconds)
    assert brute_force.valid(chain, found.orders)
    assert found.bound_s <= found.step_s + 1e-9
    for orders in known.values():
        one = evaluate(chain, orders)
        assert not fits(chain, one) or found.step_s <= one.step_s + 1e-9


@pytest.mark.usefixtures("computation")
def test_the_result_is_the_same_again() -> None:
    chain = drawn(2)
    assert search(chain, families(chain)).orders == search(chain, families(chain)).orders


def test_too_little_memory_is_refused_with_the_bytes() -> None:
    chain = replace(drawn(1), limits=(1, 1))
    with pytest.raises(ProblemError, match="has 1 B left for activations, one micro-batch at a time needs"):
        search(chain)


def test_recomputation_where_memory_binds() -> None:
    """Three micro-batches in flight fit only if stage 0 keeps checkpoints: that is faster than one at a time."""
    chain = Chain((0, 1), 6, (2, 2), (2, 2), (2, 2), (), (10, 10), (), (), (1, 1), (13, 40))
    found = search(chain)
    assert any(kind == "R" for row in found.orders for kind, _, _ in row)
    assert brute_force.valid(chain, found.orders)
    assert found.step_s < search(replace(chain, checkpoint_bytes=())).step_s


def test_rules_make_valid_orders_on_a_v() -> None:
    chain = Chain((0, 1, 1, 0), 4, (1, 2, 1, 3), (2, 1, 1, 1), (1, 1, 2, 1), (Message(0, 1, 0.5),))
    made = [orders for rule in rules(chain) if (orders := scheduled(chain, rule))]
    assert len(made) > 10
    assert all(brute_force.valid(chain, orders) for orders in made)
    assert min(evaluate(chain, orders).step_s for orders in made) >= lower_bound(chain)


def test_local_search_gets_out_of_a_bad_start() -> None:
    chain = replace(drawn(3), limits=())
    start = one_at_a_time(chain)
    before = evaluate(chain, start).step_s
    step_s, orders = improved(chain, start, 3000, 0, 0.0, float("inf"))
    assert step_s < 0.8 * before
    assert evaluate(chain, orders).step_s == step_s


def test_memory_of_an_order() -> None:
    chain = Chain((0,), 2, (1,), (1,), (1,), (), (10,), (3,), (5,), (2,))
    assert peak(chain, [("F", 0, 0), ("B", 0, 0), ("F", 0, 1), ("B", 0, 1)]) == 15
    assert peak(chain, [("F", 0, 0), ("F", 0, 1), ("B", 0, 0), ("B", 0, 1)]) == 25
    assert peak(chain, [("F", 0, 0), ("I", 0, 0), ("F", 0, 1), ("W", 0, 0), ("B", 0, 1)]) == 23
    assert peak(chain, [("F", 0, 0), ("F", 0, 1), ("R", 0, 0), ("B", 0, 0), ("B", 0, 1)]) == 27


def test_a_deadlock_takes_for_ever() -> None:
    chain = Chain((0, 1), 2, (1, 1), (1, 1), (1, 1))
    rows: Orders = [
        [("F", 0, 0), ("B", 0, 0), ("F", 0, 1), ("B", 0, 1)],
        [("F", 1, 0), ("F", 1, 1), ("B", 1, 0), ("B", 1, 1)],
    ]
    assert evaluate(chain, rows).step_s == float("inf")
