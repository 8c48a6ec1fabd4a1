"""One rank's updates are torch's, bit for bit: on the device or in buckets from the host, in any buckets and chunks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from engines.myelin import optimizers
from engines.myelin.buckets import chunks
from harness.core.op import Op
from harness.interfaces import OptimizerSpec
from harness.runtime.training_state import copies
from tests.engines.myelin.updating import (
    ADAMW,
    ELEMENTS,
    OPTIMIZERS,
    SHAPES,
    Stepper,
    assert_same,
    gradients,
    parameters,
    plain,
)

STORES = [(False, 16, 1), (True, 1, 1), (True, 2, 3), (True, 13, 2), (True, 40, 0), (True, 1000, 4)]
"""(offload, bsize, k)"""


@given(st.integers(0, 40), st.integers(1, 12), st.integers(0, 4))
def test_chunks_cover_all_elements_in_order(elements: int, bsize: int, k: int) -> None:
    found = chunks(elements, bsize, k)
    halves = [half for chunk in found for half in chunk.halves]
    assert [n for one in halves for n in range(one.start, one.stop)] == list(range(elements))
    numbers = list(dict.fromkeys(one.part[:-1] for one in halves))
    sizes = [sum(one.stop - one.start for one in halves if one.part[:-1] == name) for name in numbers]
    assert all(size == bsize for size in sizes[:-1])
    assert [name.partition("/")[2] for name in numbers] == [f"bucket{n}" for n in range(len(numbers))]
    assert all(one.part[-1] == "ab"[one.place] for one in halves)
    assert all(one.stop - one.start <= (bsize - bsize // 2, bsize // 2)[one.place] for one in halves), "there is room"
    wanted = math.ceil(math.ceil(elements / bsize) / max(k, 1)) if k else min(elements, 1)
    assert len(found) == wanted
    assert all(half.part.startswith(f"{chunk.part}/") for chunk in found for half in chunk.halves)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda one: f"{one.name} {one.momentum} {one.weight_decay}")
@pytest.mark.parametrize(("offload", "bsize", "k"), STORES)
def test_updates_are_those_of_torch(dtype: str, optimizer: OptimizerSpec, offload: bool, bsize: int, k: int) -> None:
    steps = [[gradients(10 * n + m, dtype) for m in range(2)] for n in range(4)]
    stepper = Stepper(parameters(dtype), optimizer, dtype, offload=offload, bsize=bsize, k=k)
    assert [stepper.step(*step) for step in steps] == [0] * 4
    weights, state = plain(optimizer, steps, dtype)
    assert_same({name: p.detach() for name, p in stepper.named.items()}, weights)
    assert_same(stepper.updates.weights(), weights)
    assert_same(stepper.updates.state(), state)


@pytest.mark.parametrize("optimizer", OPTIMIZERS[1:])
def test_pieces_for_the_cache_change_nothing(optimizer: OptimizerSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "PIECE", 7)
    steps = [[gradients(n)] for n in range(3)]
    stepper = Stepper(parameters(), optimizer, bsize=30)
    for step in steps:
        stepper.step(*step)
    assert_same(stepper.updates.weights(), plain(optimizer, steps)[0])


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS[1:])
def test_without_a_gradient_there_is_no_update(optimizer: OptimizerSpec, offload: bool) -> None:
    """As under torch's optimizers: no decay, no momentum, and the step does not count. Frozen parameters never move."""
    absent = [["scale"], [], ["first.weight", "first.bias"], ["scale", "last"]]
    steps = [[gradients(n, without=names)] for n, names in enumerate(absent)]
    stepper = Stepper(parameters(frozen=["embedding"]), optimizer, offload=offload, bsize=20, k=1)
    for step in steps:
        stepper.step(*step)
    weights, state = plain(optimizer, steps, frozen=["embedding"])
    assert_same(stepper.updates.weights(), weights)
    assert_same(stepper.updates.state(), state)
    if optimizer.name != "sgd":
        assert [int(one["step"]) for one in state.values()] == [2, 3, 3, 4, 3]
    assert "embedding" not in state


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_state_moves_there_and_back(optimizer: OptimizerSpec, offload: bool) -> None:
    """Half of the steps by torch, or by other buckets, half of them here: all as if by one."""
    absent = [["scale"], ["scale"], [], []]
    steps = [[gradients(n, without=names)] for n, names in enumerate(absent)]
    first = Stepper(parameters(), optimizer, offload=not offload, bsize=9)
    for step in steps[:2]:
        first.step(*step)
    other = (first.updates.weights(), first.updates.state())
    for model, state in (plain(optimizer, steps[:2]), other):
        stepper = Stepper(parameters(), optimizer, offload=offload, bsize=20)
        stepper.step(gradients(99))
        stepper.updates.load(
            {**model, "buffer": torch.zeros(3)}, {**state, "another stage's": {"step": torch.ones(())}}
        )
        assert_same(stepper.updates.weights(), model)
        assert_same({name: p.detach() for name, p in stepper.named.items()}, model)
        assert_same(stepper.updates.state(), state)
        for step in steps[2:]:
            stepper.step(*step)
        weights, wanted = plain(optimizer, steps)
        assert_same({name: p.detach() for name, p in stepper.named.items()}, weights)
        assert_same(stepper.updates.state(), wanted)


@pytest.mark.parametrize("offload", [False, True])
def test_a_state_is_no_copy(offload: bool) -> None:
    """Ranks write shards of checkpoints as they are."""
    stepper = Stepper(parameters(), ADAMW, offload=offload)
    stepper.step(gradients(0))
    weights, state = stepper.updates.weights(), stepper.updates.state()
    before = copies(state["last"])
    stepper.step(gradients(1))
    assert torch.equal(weights["last"], stepper.updates.weights()["last"])
    assert torch.equal(state["last"]["exp_avg"], stepper.updates.state()["last"]["exp_avg"])
    assert not torch.equal(state["last"]["exp_avg"], before["exp_avg"])
    assert int(state["last"]["step"]) == 1


def test_parameters_and_gradients_are_views_of_two_buffers() -> None:
    before = parameters()
    stepper = Stepper(parameters(), ADAMW)
    weights, grads = stepper.updates.held()[:2]
    assert [p.shape for p in stepper.named.values()] == [torch.Size(shape) for shape in SHAPES.values()]
    assert_same({n: p.detach() for n, p in stepper.named.items()}, {n: p.detach() for n, p in before.items()})
    assert torch.equal(weights, torch.cat([p.detach().flatten() for p in before.values()]))
    stepper.step(gradients(0), gradients(1))
    assert {p.data.untyped_storage().data_ptr() for p in stepper.named.values()} == {
        weights.untyped_storage().data_ptr()
    }
    assert {p.grad.untyped_storage().data_ptr() for p in stepper.named.values()} == {grads.untyped_storage().data_ptr()}
    summed = [(gradients(0)[name] + gradients(1)[name]).flatten() for name in SHAPES]
    torch.testing.assert_close(grads, torch.cat(summed), rtol=0, atol=0)


def test_a_gradient_that_another_has_put_there_counts() -> None:
    """Sums over tied copies give a gradient to a copy that had none."""
    stepper, want = Stepper(parameters(), OPTIMIZERS[0]), gradients(5)
    stepper.updates.begin()
    for name, p in stepper.named.items():
        p.grad = want[name].clone()
    stepper.updates.finish()
    assert_same(stepper.updates.weights(), plain(OPTIMIZERS[0], [[want]])[0])


def test_a_whole_network_trains_as_with_torch() -> None:
    """Modules compute with the views, and a parameter that is used twice gets both gradients."""

    def network() -> nn.Sequential:
        torch.manual_seed(0)
        twice = nn.Linear(5, 5)
        return nn.Sequential(nn.Linear(3, 5), twice, nn.Tanh(), twice, nn.LayerNorm(5), nn.Linear(5, 2)).double()

    inputs = torch.randn(3, 4, 3, dtype=torch.float64)
    other, here = network(), network()
    optimizer = torch.optim.AdamW(other.parameters(), lr=ADAMW.lr, weight_decay=ADAMW.weight_decay)
    stepper = Stepper(dict(here.named_parameters()), ADAMW, "float64", offload=True, bsize=17)
    for batch in inputs:
        optimizer.zero_grad()
        stepper.updates.begin()
        for part in batch.chunk(2):
            other(part).square().sum().backward()
            here(part).square().sum().backward()
        optimizer.step()
        stepper.updates.finish()
    for mine, theirs in zip(here.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_a_trace_has_a_step_for_each_chunk() -> None:
    stepper = Stepper(parameters(), ADAMW, bsize=20, k=4)
    stepper.step(gradients(0))
    assert stepper.ops == [("2step:chunk0", "compute", 0), ("2step:chunk1", "compute", 0)]


@pytest.mark.parametrize(("optimizer", "each"), [(ADAMW, 12), (OPTIMIZERS[1], 8), (OPTIMIZERS[0], 4)])
def test_a_trace_has_every_half_that_visits_the_device(optimizer: OptimizerSpec, each: int) -> None:
    stepper = Stepper(parameters(), optimizer, offload=True, bsize=50, k=2)
    stepper.step(gradients(0))
    wanted = []
    sizes = {"0/bucket0a": 25, "0/bucket0b": 25, "0/bucket1a": 25, "0/bucket1b": 25, "1/bucket2a": 10, "1/bucket2b": 9}
    assert sum(sizes.values()) == ELEMENTS
    for name, size in sizes.items():
        part = f"chunk{name}"
        wanted.append((f"2copy:{part}/in", "copy in", each * size))
        wanted.append((f"2step:{part}", "compute", 0))
        wanted.append((f"2copy:{part}/out", "copy out", each * size))
    assert stepper.ops == wanted
    assert [str(Op.parse(name)) for name, _, _ in wanted] == [name for name, _, _ in wanted]
    marks = [mark for _, start, end in stepper.noted for mark in (start, end)]
    assert marks == sorted(marks), "on a CPU one after the other"


@pytest.mark.parametrize("offload", [False, True])
def test_a_stage_without_parameters_has_nothing_to_do(offload: bool) -> None:
    stepper = Stepper({}, ADAMW, offload=offload)
    assert stepper.step() == 0
    assert stepper.noted == []
    assert stepper.updates.weights() == stepper.updates.state() == {}
    assert sum(tensor.nbytes for tensor in stepper.updates.held()) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda one: f"{one.name} {one.momentum} {one.weight_decay}")
@pytest.mark.parametrize(("offload", "bsize", "k"), STORES)
def test_on_a_gpu_buckets_change_nothing(optimizer: OptimizerSpec, offload: bool, bsize: int, k: int) -> None:
    """Copies on streams of their own wait for what they copy; kept state is in pinned memory of the host."""
    named = {name: nn.Parameter(p.detach().cuda()) for name, p in parameters().items()}
    other = {name: nn.Parameter(p.detach().cuda()) for name, p in parameters().items()}
    stepper, whole = Stepper(named, optimizer, offload=offload, bsize=bsize, k=k), Stepper(other, optimizer)
    for n in range(4):
        wanted = {name: value.cuda() for name, value in gradients(n).items()}
        stepper.step(wanted)
        whole.step(wanted)
    assert stepper.updates.store.master.is_pinned() == offload
    assert_same(stepper.updates.weights(), whole.updates.weights())
    assert_same(stepper.updates.state(), whole.updates.state())
