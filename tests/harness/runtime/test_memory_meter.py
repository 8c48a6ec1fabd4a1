"""The meter against torch.profiler's allocator events, against a brute force, and across threads."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from harness.launch import forked_ranks
from harness.runtime.memory_meter import Meter
from tests.support.allocator import allocator_peak_bytes
from tests.tiers import examples

FLOAT = 4


def block(inside: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inside, out, 3, padding=1, bias=False), nn.InstanceNorm2d(out), nn.LeakyReLU(0.01))


class Recomputed(nn.Module):
    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


def convolutions() -> nn.Sequential:
    return nn.Sequential(
        block(3, 16), block(16, 16), nn.MaxPool2d(2), block(16, 32), block(32, 32),
        nn.Upsample(scale_factor=2), block(32, 16), nn.Conv2d(16, 1, 1),
    )  # fmt: skip


def recomputed(reentrant: bool) -> nn.Sequential:
    middle = nn.Sequential(nn.MaxPool2d(2), block(16, 32), block(32, 32), nn.Upsample(scale_factor=2))
    return nn.Sequential(
        block(3, 16), Recomputed(middle, reentrant), Recomputed(block(32, 16), reentrant), nn.Conv2d(16, 1, 1)
    )


def perceptron() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, 10)
    )


def in_place() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(16, 32, 3, 2), nn.BatchNorm2d(32), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


IMAGES, ROWS = (2, 3, 64, 64), (64, 256)
NETS = {
    "convolutions": (convolutions, IMAGES),
    "checkpoint": (lambda: recomputed(False), IMAGES),
    "checkpoint, reentrant": (lambda: recomputed(True), IMAGES),
    "perceptron": (perceptron, ROWS),
    "in place": (in_place, IMAGES),
}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("net", NETS)
def test_agrees_with_the_profiler_on_a_training_step(net, optimizer):
    make, shape = NETS[net]
    torch.manual_seed(0)
    model, inputs = make(), torch.randn(shape)
    steps = optimizer(model.parameters(), lr=0.1)

    def step() -> None:
        steps.zero_grad()
        model(inputs).square().mean().backward()
        steps.step()

    step()
    steps.zero_grad()
    meter = Meter()
    with meter:
        step()
    steps.zero_grad()
    assert meter.live_bytes == 0
    assert meter.peak_bytes == pytest.approx(allocator_peak_bytes(step), rel=0.005)


def test_workspaces_inside_a_kernel_count():
    convolution, inputs = nn.Conv2d(16, 16, 3, padding=1), torch.randn(2, 16, 64, 64)
    with torch.no_grad(), Meter() as meter:
        output = convolution(inputs)
    assert meter.live_bytes == output.nbytes
    assert meter.peak_bytes == allocator_peak_bytes(lambda: convolution(inputs.requires_grad_()))
    assert meter.peak_bytes > output.nbytes  # it reorders its operands


def test_backward_is_seen():
    model, inputs = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), torch.randn(2, 8)
    meter = Meter()
    meter.add_static(model.parameters())
    weights = (8 * 16 + 16 + 16 * 4 + 4) * FLOAT
    assert meter.live_bytes == meter.peak_bytes == weights
    with meter:
        loss = model(inputs).sum()
        saved = meter.live_bytes
        loss.backward()
    assert saved == weights + (2 * 16 + 1) * FLOAT  # tanh saves its output, which the second layer saves too; the loss
    del loss
    assert meter.live_bytes == 2 * weights  # the gradients
    model.zero_grad()
    assert meter.live_bytes == weights


def test_optimizer_state_is_seen():
    layer = nn.Linear(32, 32)
    weights = (32 * 32 + 32) * FLOAT
    adam = torch.optim.Adam(layer.parameters())
    layer(torch.ones(1, 32)).sum().backward()
    with Meter() as meter:
        adam.step()
    layer.zero_grad()
    assert meter.live_bytes == pytest.approx(2 * weights, abs=2 * FLOAT)  # two moments, and the step counters


def test_views_and_in_place_results_count_once():
    with Meter() as meter:
        x = torch.zeros(10, 10)
        views = [x.view(100), x[2:5], x.t(), x.detach(), x.expand(3, 10, 10)]
        x.add_(1).mul_(2)
        torch.add(x, 1, out=x)
        assert meter.live_bytes == 400
        del x
        assert meter.live_bytes == 400  # the views hold it
        views.clear()
        assert meter.live_bytes == 0
    assert meter.peak_bytes == pytest.approx(400, abs=16)  # a scalar operand is a small tensor for a moment


def test_tensors_from_outside_do_not_count():
    outside = torch.zeros(10)
    with Meter() as meter:
        inside = [outside.view(2, 5), outside.add_(1)]
        assert meter.live_bytes == 0
    assert len(inside) == 2


def test_python_data_and_growing_storages_count():
    with Meter() as meter:
        x = torch.tensor([1.0, 2.0, 3.0])
        assert meter.live_bytes == 3 * FLOAT
        x.resize_(100)
        assert meter.live_bytes == 100 * FLOAT
    del x
    assert meter.live_bytes == 0


def test_static_tensors_count_once_until_they_are_freed():
    weight = nn.Parameter(torch.zeros(10))
    meter = Meter()
    meter.add_static([weight, weight[2:], torch.zeros(5)])
    meter.add_static([weight])
    assert meter.live_bytes == 40
    assert meter.peak_bytes == 60
    meter.reset_peak()
    assert meter.peak_bytes == 40
    del weight
    assert meter.live_bytes == 0


def test_of_a_sharded_tensor_the_own_shard_counts():
    """A weight of 11 rows in two ranks, its gradient and Adam's work: as much as for a plain one of 6 rows."""

    def stepped(weight: nn.Parameter) -> tuple[int, int, int]:
        static, meter = Meter(), Meter()
        static.add_static([weight, weight.detach()])
        with meter:
            weight.grad = torch.ones_like(weight)
            adam = torch.optim.Adam([weight])
            adam.step()
        return static.live_bytes, meter.live_bytes, meter.peak_bytes

    def run() -> list[tuple[int, int, int]]:
        whole = torch.ones(11, 64)
        sharded = distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Shard(0)])
        return [stepped(nn.Parameter(tensor)) for tensor in (sharded, whole[:6].clone())]

    sharded, plain = forked_ranks.run_on_ranks(2, run, ("cpu",) * 2)
    shard = 6 * 64 * FLOAT
    assert plain[:2] == (shard, 3 * shard + FLOAT)  # the gradient, two moments, a counter of steps
    assert sharded == plain


def test_a_storage_freed_by_another_thread_leaves_the_meter_that_added_it():
    here, there = Meter(), Meter()
    with here:
        box = [torch.zeros(100)]
    with there:
        kept = torch.zeros(10)
    thread = threading.Thread(target=lambda: [there.__enter__(), box.clear(), there.__exit__(None, None, None)])
    thread.start()
    thread.join()
    assert (here.live_bytes, here.peak_bytes) == (0, 400)
    assert (there.live_bytes, there.peak_bytes) == (kept.nbytes, 40)


def test_each_thread_is_counted_by_the_meter_that_it_entered():
    """Four workers, two for each device, at work at once; each keeps one tensor of every round."""
    meters, kept, barrier = [Meter(), Meter()], [], threading.Barrier(4)

    def work(meter: Meter) -> None:
        barrier.wait()
        for size in range(1, 101):
            with meter:
                kept.append(torch.ones(size).mul(2))

    workers = [threading.Thread(target=work, args=(meter,)) for meter in meters for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [meter.live_bytes for meter in meters] == [2 * 5050 * FLOAT] * 2
    with torch.no_grad():
        torch.ones(1000)  # after the meters: nobody counts it
    kept.clear()
    assert [meter.live_bytes for meter in meters] == [0, 0]


def test_backward_in_a_worker_frees_and_counts_there():
    """The inner graph of one task: forward and backward in a thread, its input from another device."""
    layer, meter, other = nn.Linear(64, 64, bias=False), Meter(), Meter()
    with other:
        arrived = torch.randn(8, 64)

    def task() -> None:
        with meter:
            leaf = arrived.detach().requires_grad_()
            out = layer(leaf)
            torch.autograd.backward(out, torch.ones_like(out))

    thread = threading.Thread(target=task)
    thread.start()
    thread.join()
    assert meter.live_bytes == 64 * 64 * FLOAT  # the weight's gradient is what is left
    assert other.live_bytes == 8 * 64 * FLOAT


def test_an_error_leaves_nothing_over():
    meter = Meter()
    with pytest.raises(RuntimeError, match="shape"), meter:
        torch.ones(2, 3).add(1) @ torch.ones(2, 3)
    assert not torch._C._autograd._profiler_enabled()
    gc.collect()
    live = meter.live_bytes
    kept = torch.ones(50)  # no longer watched
    assert meter.live_bytes == live
    with meter:
        kept = kept + 1
    assert meter.live_bytes == live + 200


def test_counts_tensors_under_another_profiler():
    """Only workspaces are missing then."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]), Meter() as meter:
        kept = torch.ones(10) + 1
    assert meter.live_bytes == kept.nbytes


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["new", "view", "in place", "sum", "split", "drop"]), st.integers(0, 9)), max_size=40
)


@settings(max_examples=examples(60), deadline=None)
@given(ACTIONS)
def test_live_bytes_are_those_of_the_storages_that_python_holds(actions):
    """A random program; the brute force looks at every tensor that it still holds."""
    held: list[Tensor] = []
    meter, highest = Meter(), 0
    with meter:
        for kind, number in actions:
            chosen = held[number % len(held)] if held else torch.zeros(3)
            if kind == "new":
                held.append(torch.zeros(number + 1))
            elif kind == "view":
                held.append(chosen.view(-1)[: number + 1])
            elif kind == "in place":
                held.append(chosen.add_(1))
            elif kind == "sum":
                held.append(chosen + 1)
            elif kind == "split":
                held.extend(torch.cat([chosen, chosen]).chunk(2))
            elif held:
                held.pop(number % len(held))
            del chosen
            live = sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held}.values())
            highest = max(highest, live)
            assert meter.live_bytes == live
    assert meter.peak_bytes >= highest
