"""Updates on several ranks: sums over replicas, what all must agree on, and sums under way next to updates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.interfaces import OptimizerSpec
from harness.launch import forked_ranks
from harness.runtime.loss_scale import START
from tests.engines.myelin.updating import (
    ADAMW,
    ELEMENTS,
    OPTIMIZERS,
    Gradients,
    Stepper,
    assert_same,
    gradients,
    parameters,
    plain,
)

T = TypeVar("T")


@dataclass(frozen=True)
class Found:
    """Of one rank."""

    weights: dict[str, Tensor]
    state: dict[str, Any]
    ops: list[tuple[str, str, int]]
    times: list[tuple[float, float]]
    sent: list[int]
    scale: float


def on(count: int, work: Callable[[int], T]) -> list[T]:
    """What it returned in each rank."""

    def everywhere() -> list[T]:
        found: list[Any] = [None] * count
        dist.all_gather_object(found, work(dist.get_rank()))
        return found

    return forked_ranks.run_on_ranks(count, everywhere, ("cpu",) * count)


def found(stepper: Stepper, sent: list[int]) -> Found:
    updates, times = stepper.updates, [(start, end) for _, start, end in stepper.noted]
    return Found(updates.weights(), updates.state(), stepper.ops, times, sent, updates.scale)


def replicas(
    optimizer: OptimizerSpec, steps: list[list[Gradients]], dtype: str = "float64", **config: Any
) -> list[Found]:
    """Each step has the gradients of every replica."""

    def work(rank: int) -> Found:
        stepper = Stepper(parameters(dtype), optimizer, dtype, dist.group.WORLD, **config)
        return found(stepper, [stepper.step(step[rank]) for step in steps])

    return on(len(steps[0]), work)


@pytest.mark.parametrize(("offload", "bsize", "k"), [(False, 16, 1), (False, 20, 0), (True, 13, 2), (True, 1000, 4)])
@pytest.mark.parametrize("optimizer", [OPTIMIZERS[1], ADAMW], ids=lambda one: one.name)
def test_gradients_are_summed(optimizer: OptimizerSpec, offload: bool, bsize: int, k: int) -> None:
    """Of two numbers the sum is the same in either order: bit for bit the same updates."""
    steps = [[gradients(10 * n + rank, "float64") for rank in range(2)] for n in range(3)]
    weights, state = plain(optimizer, steps, "float64")
    for one in replicas(optimizer, steps, offload=offload, bsize=bsize, k=k):
        assert_same(one.weights, weights)
        assert_same(one.state, state)
        assert one.sent == [8 * ELEMENTS] * 3


def test_a_gradient_that_one_replica_has_is_everyones() -> None:
    steps = [
        [gradients(1, without=["scale", "last"]), gradients(2, without=["scale"])],
        [gradients(3, without=["first.bias", "embedding"]), gradients(4, without=["first.bias"])],
    ]
    weights, state = plain(ADAMW, steps)
    for one in replicas(ADAMW, steps, "float32", bsize=20):
        assert_same(one.weights, weights)
        assert_same(one.state, state)
    assert {name: int(one["step"]) for name, one in state.items() if name in ("scale", "last", "first.bias")} == {
        "scale": 1, "last": 2, "first.bias": 1,
    }  # fmt: skip


def test_sums_are_in_half_precision() -> None:
    """4096 + 1 is 4096 in float16."""

    def work(rank: int) -> tuple[float, int]:
        named = {"one": nn.Parameter(torch.zeros(1, dtype=torch.float16))}
        stepper = Stepper(named, OptimizerSpec("sgd", lr=1.0), "float16", dist.group.WORLD, loss_scale=1.0)
        sent = stepper.step({"one": torch.tensor([(4096.0, 1.0)[rank]], dtype=torch.float16)})
        return float(stepper.updates.weights()["one"]), sent

    assert on(2, work) == [(-4096.0, 2), (-4096.0, 2)]


def test_a_trace_has_a_sum_for_each_chunk() -> None:
    steps = [[gradients(rank) for rank in range(2)]]
    sizes = [80, ELEMENTS - 80]
    sums = [(f"2collective:all_reduce@data/chunk{c}", "network", 4 * size) for c, size in enumerate(sizes)]
    updates = [(f"2step:chunk{c}", "compute", 0) for c in range(2)]
    for one in replicas(ADAMW, steps, "float32", bsize=20, k=4):
        assert one.ops == [sums[0], updates[0], sums[1], updates[1]]
        first, step, second, _ = one.times
        assert first[1] <= step[0], "a chunk is updated when it has been summed"
        assert first[1] <= second[0], "one sum after the other"
    for one in replicas(ADAMW, steps, "float32", bsize=20, k=0):
        whole = ("2collective:all_reduce@data/chunk0", "compute", 4 * ELEMENTS)
        assert one.ops == [whole, ("2step:chunk0", "compute", 0)]
        assert one.times[0][1] <= one.times[1][0]


def test_a_short_sum_that_overtakes_a_long_one_is_after_it_in_a_trace() -> None:
    size = 2_000_000

    def work(rank: int) -> list[tuple[float, float]]:
        named = {"one": nn.Parameter(torch.ones(size + 1))}
        stepper = Stepper(named, OPTIMIZERS[0], "float32", dist.group.WORLD, bsize=size, k=1)
        stepper.updates.begin()
        named["one"].grad = torch.ones(size + 1)
        stepper.updates.finish()
        assert torch.equal(stepper.updates.weights()["one"], torch.full((size + 1,), 0.8))
        return [(start, end) for op, start, end in stepper.noted if op.kind == "collective"]

    for long, short in on(2, work):
        assert long[0] < long[1] == short[0] <= short[1]


@pytest.mark.usefixtures("computation")
def test_chunks_are_updated_while_others_are_summed() -> None:
    """8 chunks of 2 MB on two ranks: some step begins before the last sum has ended, in one of a few
    tries on a busy machine; with k = 0 none does."""
    size, bsize = 4_000_000, 250_000

    def work(rank: int) -> list[bool]:
        named = {"one": nn.Parameter(torch.zeros(size))}
        overlapped = []
        for k in (*[2] * 6, 0):
            stepper = Stepper(named, ADAMW, "float32", dist.group.WORLD, bsize=bsize, k=k)
            stepper.updates.begin()
            named["one"].grad = torch.ones(size)
            stepper.updates.finish()
            last = max(end for op, _, end in stepper.noted if op.kind == "collective")
            overlapped.append(any(start < last for op, start, _ in stepper.noted if op.kind == "step"))
        return [any(overlapped[:-1]), overlapped[-1]]

    assert on(2, work) == [[True, False]] * 2


# -- float16 -----------------------------------------------------------------------------------------------------------


def half(stepper: Stepper, rank: int, at: int, value: float) -> int:
    """A step in which rank `at` has one gradient of this value, all others zero."""
    wanted: Gradients = {name: torch.zeros_like(p) for name, p in stepper.named.items()}
    if rank == at:
        wanted["last"][0, 0] = value
    return stepper.step(wanted)


@pytest.mark.parametrize(("at", "offload"), [(0, True), (1, False)])
def test_an_overflow_on_one_of_two_replicas_skips_the_step_on_both(at: int, offload: bool) -> None:
    def work(rank: int) -> list[Found]:
        stepper = Stepper(parameters("float16"), ADAMW, "float16", dist.group.WORLD, offload=offload, bsize=20, k=1)
        one, seen = gradients(rank, "float16"), []
        sent = [stepper.step(one)]
        seen.append(found(stepper, sent))
        for value in (float("nan"), 40000.0, 30000.0):  # two of the second may be too much for a sum, of the last not
            half(stepper, rank, at, value)
            seen.append(found(stepper, sent))
        return seen

    for seen in on(2, work):
        good, nan, large, fine = seen
        assert good.scale == START
        assert [one.scale for one in (nan, large, fine)] == [START / 2, START / 4, START / 4]
        for skipped in (nan, large):
            assert_same(skipped.weights, good.weights)
            assert_same(skipped.state, good.state)
            assert skipped.ops == good.ops, "its trace is that of any step"
        assert int(fine.state["last"]["step"]) == 2


def test_columns_of_a_grid_sum_their_own() -> None:
    """Two stages by two replicas in float16: sums of a column, a verdict of all."""
    steps = [[gradients(10 * n + rank, "float16") for rank in range(4)] for n in range(3)]
    steps[1][2]["first.bias"][3] = float("nan")

    def work(rank: int) -> Found:
        columns = [dist.new_group([stage, stage + 2]) for stage in range(2)]
        stepper = Stepper(parameters("float16"), ADAMW, "float16", columns[rank % 2], bsize=20, k=1)
        return found(stepper, [stepper.step(step[rank]) for step in steps])

    grid = on(4, work)
    for stage in range(2):
        alone = Stepper(parameters("float16"), ADAMW, "float16", loss_scale=START)
        for n in (0, 2):
            one, other = steps[n][stage], steps[n][stage + 2]
            alone.updates.scaling.value = START / (1 if n == 0 else 2)
            alone.step({name: one[name] + other[name] for name in one})
        for replica in (grid[stage], grid[stage + 2]):
            assert_same(replica.weights, alone.updates.weights())
            assert_same(replica.state, alone.updates.state())


def test_an_overflow_in_one_stage_skips_the_step_in_all(capfd: pytest.CaptureFixture[str]) -> None:
    """No replicas, other parameters; one stage has none at all."""

    def work(rank: int) -> tuple[float, bool]:
        named = parameters("float16") if rank < 2 else {}
        stepper = Stepper(named, ADAMW, "float16")
        before = stepper.updates.weights()
        if named:
            half(stepper, rank, 1, float("inf"))
        else:
            stepper.step()
        return stepper.updates.scale, all(
            torch.equal(before[name], now) for name, now in stepper.updates.weights().items()
        )

    assert on(3, work) == [(START / 2, True)] * 3
    said = capfd.readouterr().out.splitlines()
    assert len(said) == 1 and said[0].startswith("gradients overflow float16"), "one rank says"


def test_a_scale_that_cannot_fall_is_an_error_of_all() -> None:
    def work(rank: int) -> str:
        stepper = Stepper(parameters("float16"), ADAMW, "float16")
        try:
            for _ in range(20):
                half(stepper, rank, 1, float("inf"))
        except FloatingPointError as error:
            return str(error)
        return ""

    reported = on(2, work)
    assert reported[0] == reported[1] != ""
