"""Profiles of little models: bytes and FLOPs by hand, saved bytes against the uncut model, times against sleeping."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from harness.core.model_profile import ModelProfile, Tied
from harness.measure import profile_model
from harness.measure.count_model import Counts
from harness.measure.layer_chain import WHOLE, Chain
from harness.measure.profile_model import Clock, measure
from harness.nn import dropout
from tests.support import fake_cuda
from tests.support.nets import NETS, Net

FLOAT = 4


def seeded(net: Net) -> Chain:
    torch.manual_seed(0)
    return Chain(net, 4, torch.float32, torch.device("cpu"))


def idle(index: int, phase: str):
    return torch.enable_grad()


def whole_saved_bytes(layers: nn.Sequential, inputs: Tensor) -> int:
    """What autograd keeps of an uncut forward pass: each storage once, without parameters and buffers."""
    state = {t.untyped_storage().data_ptr() for t in (*layers.parameters(), *layers.buffers())}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in state:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = layers(inputs)
    del output
    return sum(saved.values())


@pytest.mark.parametrize("net", NETS)
def test_saved_bytes_are_those_of_the_uncut_model(net):
    chain = seeded(NETS[net])
    counts = Counts(chain)
    with dropout.keyed(0, 0, 0):
        chain.forward(counts)
        assert sum(counts.saved_bytes) == whole_saved_bytes(chain.layers, chain.batch.inputs)
    assert sum(layer.saved_bytes for layer in measure(NETS[net], 4, "float32", "cpu", 1).layers) == sum(
        counts.saved_bytes
    )


@pytest.mark.parametrize("net", NETS)
def test_cut_layers_give_the_gradients_of_the_uncut_model(net):
    chain = seeded(NETS[net])
    parameters = list(chain.layers.parameters())
    with dropout.keyed(0, 0, 0):
        chain.step(idle)
        cut = [parameter.grad.clone() for parameter in parameters]
        chain.layers.zero_grad()
        chain.model.loss(chain.layers(chain.batch.inputs), chain.batch.targets).backward()
        uncut = [parameter.grad.clone() for parameter in parameters]
        chain.layers.zero_grad()
        seen = []
        chain.whole(lambda index, phase: seen.append((index, phase)) or torch.enable_grad())
        whole = [parameter.grad.clone() for parameter in parameters]
        for parameter in parameters:
            parameter.grad.zero_()
        chain.step(idle)
        chain.step(idle)
    assert all(map(torch.equal, cut, uncut)) and all(map(torch.equal, whole, uncut))
    assert seen == [(WHOLE, "forward"), (WHOLE, "backward")]
    assert any(grad.abs().sum() > 0 for grad in cut)
    assert all(map(torch.allclose, [p.grad for p in parameters], [2 * grad for grad in cut]))  # they accumulate


def test_bytes_and_flops_by_hand():
    net = Net(lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2, bias=False)), (4,))
    first, relu, last = (profile := measure(net, 3, "float32", "cpu", repeats=1)).layers
    assert profile.input_bytes == 3 * 4 * FLOAT
    assert [layer.name for layer in profile.layers] == ["0", "1", "2"]
    assert [layer.param_bytes for layer in profile.layers] == [(4 * 8 + 8) * FLOAT, 0, 8 * 2 * FLOAT]
    assert [layer.output_bytes for layer in profile.layers] == [3 * 8 * FLOAT, 3 * 8 * FLOAT, 3 * 2 * FLOAT]
    assert [layer.flops for layer in profile.layers] == [2 * 3 * 4 * 8, 0, 2 * 3 * 8 * 2]
    # the first layer saves its input, ReLU its output: which the last layer saves again, and it counts once
    assert [layer.saved_bytes for layer in profile.layers] == [3 * 4 * FLOAT, 3 * 8 * FLOAT, 0]
    assert first.bytes_moved == (3 * 4 + 4 * 8 + 8 + 3 * 8) * FLOAT
    assert relu.bytes_moved == (3 * 8 + 3 * 8) * FLOAT
    assert last.bytes_moved == (3 * 8 + 8 * 2 + 3 * 2) * FLOAT
    double = measure(net, 3, "float64", "cpu", repeats=1)
    assert [layer.saved_bytes for layer in double.layers] == [3 * 4 * 8, 3 * 8 * 8, 0]
    assert double.input_bytes == 2 * profile.input_bytes


@pytest.mark.parametrize("net", NETS)
def test_flops_are_those_of_torchs_own_counter(net):
    chain = seeded(NETS[net])
    with FlopCounterMode(display=False) as counter:
        chain.layers(chain.batch.inputs)
    profile = measure(NETS[net], 4, "float32", "cpu", repeats=1)
    assert profile.sum("flops", 0, len(profile.layers) - 1) == counter.get_total_flops() > 0


def test_each_round_is_progress():
    said: list[str] = []
    measure(NETS["images"], 4, "float32", "cpu", repeats=2, say=said.append)
    assert len(said) == len(set(said)) == 3


def test_skips_tuples_and_buffers():
    profile = measure(NETS["images"], 4, "float32", "cpu", repeats=1)
    (skip,) = profile.skips
    assert (skip.source, skip.target, skip.name, skip.bytes) == (4, 11, "shortcut", 4 * 8 * 16 * 16 * FLOAT)
    join = profile.layers[11]
    assert join.output_bytes == 2 * skip.bytes
    assert join.bytes_moved == 4 * skip.bytes
    assert profile.layers[7].buffer_bytes == (8 + 8) * FLOAT + 8  # mean, variance, and a counter of int64
    cells = measure(NETS["pairs"], 4, "float32", "cpu", repeats=1)
    assert [layer.output_bytes for layer in cells.layers] == [96, 3 * 96, 3 * 96, 3 * 96, 3 * 96]
    assert all(layer.backward_s > 0 for layer in cells.layers)


def test_integer_inputs_and_tied_weights():
    profile = measure(NETS["text"], 4, "float32", "cpu", repeats=1)
    assert profile.input_bytes == 4 * 5 * 8
    shared = (Tied("0.weight", 11 * 6 * FLOAT),)
    assert [layer.tied for layer in profile.layers] == [shared, (), (), (), (), shared]
    assert profile.layers[5].param_bytes == 11 * 6 * FLOAT
    assert profile.layers[0].backward_s > 0


def test_a_tie_is_between_layers():
    """The first and the last layer are one and share all that it has; the other uses its own one twice."""
    outer, inner = nn.Linear(4, 4), nn.Linear(4, 4)
    net = Net(lambda: nn.Sequential(outer, nn.Sequential(inner, nn.Tanh(), inner), outer), (4,))
    profile = measure(net, 2, "float32", "cpu", repeats=1)
    tied = (Tied("0.weight", 4 * 4 * FLOAT), Tied("0.bias", 4 * FLOAT))
    assert [layer.tied for layer in profile.layers] == [tied, (), tied]
    assert profile.parameter_bytes(0, 2) == 2 * (4 * 4 + 4) * FLOAT


def test_a_layer_without_gradients_takes_no_backward_time():
    flatten, linear, *_ = measure(NETS["flat first"], 4, "float32", "cpu", repeats=1).layers
    assert flatten.backward_s == 0
    assert flatten.forward_s > 0 and linear.backward_s > 0


class Slow(torch.autograd.Function):
    """Sleeps 10 ms forward and 25 ms backward."""

    @staticmethod
    def forward(ctx, x):
        time.sleep(0.010)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        time.sleep(0.025)
        return grad * 2


class Sleeper(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Slow.apply(x)


def test_times_belong_to_their_layer_and_direction():
    profile = measure(
        Net(lambda: nn.Sequential(nn.Linear(2, 2), Sleeper(), nn.Linear(2, 2)), (2,)), 1, "float32", "cpu"
    )
    before, slow, after = profile.layers
    assert slow.forward_s >= 0.010
    assert slow.backward_s >= 0.025
    assert slow.forward_s < slow.backward_s
    assert max(before.forward_s, before.backward_s, after.forward_s, after.backward_s) < 0.010


class SleepsBySamples(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.020 * len(x))
        return x


def test_what_fewer_samples_take_too_is_fixed():
    def layers():
        return nn.Sequential(nn.Linear(2, 2), Sleeper(), SleepsBySamples(), nn.Linear(2, 2))

    profile = measure(Net(layers, (2,)), 4, "float32", "cpu", 3, halves=True)
    _, asleep, by_samples, _ = profile.layers
    assert asleep.forward_fixed > 0.6 and asleep.backward_fixed > 0.6
    assert by_samples.forward_fixed < 0.2
    assert by_samples.shared_by(2)[0] == pytest.approx(0.040, rel=0.3)
    assert asleep.shared_by(4)[0] == pytest.approx(0.010, rel=0.3)


@pytest.mark.parametrize("samples", [1, 2])
def test_layers_that_cannot_take_fewer_samples_share_evenly(samples):
    """A batch norm of single samples has no variance."""

    def layers():
        norm = nn.BatchNorm1d(8) if samples == 2 else nn.Identity()
        return nn.Sequential(nn.Linear(2, 8), norm, nn.Linear(8, 2))

    profile = measure(Net(layers, (2,)), samples, "float32", "cpu", 1, halves=True)
    assert {(layer.forward_fixed, layer.backward_fixed) for layer in profile.layers} == {(0.0, 0.0)}
    assert all(layer.forward_s > 0 for layer in profile.layers)


def test_fixed_parts_are_found_again_and_their_errors_do_not_add_up():
    fixed, each = [2.0, 0.0, 1.0], [1.0, 3.0, 0.0]

    def seconds(samples: int) -> list[float]:
        return [one + samples * other for one, other in zip(fixed, each, strict=True)]

    parts = profile_model.fixed_parts(seconds(8), seconds(2), 2 / 8)
    assert parts == pytest.approx([2 / 10, 0, 1])
    noisy = profile_model.fixed_parts([10.0, 10.0, 10.0, 10.0], [5.5, 4.5, 5.5, 4.5], 1 / 2)
    assert noisy == pytest.approx([0] * 4), "half of them seem to have some, none of all has"
    assert profile_model.fixed_parts([0.0], [0.0], 1 / 2) == [0.0]
    assert profile_model.fixed_parts([1.0], [3.0], 1 / 2) == [1.0], "no more than all"


class SlowAtFirst(nn.Module):
    """Sleeps in its first two calls (the count and the warm-up), and once more later."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        time.sleep(0.03 if self.calls in (1, 2, 4) else 0)
        return x


def test_the_median_leaves_out_the_warm_up_and_one_outlier(monkeypatch):
    monkeypatch.setattr(profile_model, "SHORT_S", 0.0)
    (layer,) = measure(Net(lambda: nn.Sequential(SlowAtFirst()), (2,)), 1, "float32", "cpu", repeats=3).layers
    assert layer.forward_s < 0.01
    (layer,) = measure(Net(lambda: nn.Sequential(SlowAtFirst()), (2,)), 1, "float32", "cpu", repeats=2).layers
    assert layer.forward_s > 0.01  # the median of two is their mean: the outlier was really there


@pytest.mark.parametrize(
    ("seconds", "whole_s", "left"),
    [
        ([3.0, 1.0, 8.0], 9.0, [1.95, 0.1, 6.95]),  # 1.05 less each, but a tenth is kept
        ([3.0, 2.0, 8.0], 10.0, [2.0, 1.0, 7.0]),
        ([3.0, 0.0, 8.0], 9.0, [2.0, 0.0, 7.0]),  # one without a backward pass has none
        ([3.0, 2.0], 5.5, [3.0, 2.0]),
        ([3.0, 2.0], 0.0, [3.0, 2.0]),  # never run as one task
        ([3.0, 2.0], 0.2, [3.0, 2.0]),
        ([0.0, 0.0], 0.0, [0.0, 0.0]),
    ],
)
def test_what_cuts_take_is_left_out(seconds, whole_s, left):
    assert profile_model.without_cuts(seconds, whole_s) == pytest.approx(left)


class Cut(nn.Linear):
    """What it takes to call it by itself is 5 ms: it is not the first one of its pass."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.005 if x.grad_fn is None else 0)
        return super().forward(x)


def test_layers_take_what_they_take_in_a_stage():
    """Four layers in a chain take as long as one call: each of them a quarter."""
    net = Net(lambda: nn.Sequential(*(Cut(2, 2) for _ in range(4))), (2,))
    found = measure(net, 1, "float32", "cpu", repeats=2).layers
    assert 0.005 <= sum(layer.forward_s for layer in found) < 0.015, "not the 20 ms of four calls"
    assert max(layer.forward_s for layer in found) < 0.005


class Hands:
    """A clock of which each look is the next of the given pairs: what the thread has computed, what has passed."""

    def __init__(self, *pairs: tuple[float, float]) -> None:
        self.own = iter([own for own, _ in pairs])
        self.passed = iter([passed for _, passed in pairs])

    def thread_time(self) -> float:
        return next(self.own)

    def perf_counter(self) -> float:
        return next(self.passed)


@pytest.mark.parametrize(
    ("passes", "slowed"),
    [
        ([(1, 1), (1, 1), (1, 1)], 1.0),
        ([(1, 2), (1, 2), (1, 2)], 2.0),  # another program has the core every other moment
        ([(1, 1), (1.5, 1.5), (1.4, 1.4)], 1.4),  # something else has the memory for a while
        ([(1, 1), (1, 1), (1, 9)], 1.0),  # once, which the median leaves out
        ([(2, 1), (2, 1), (2, 1)], 1.0),
    ],
)
def test_what_slows_down_the_measurement(monkeypatch, passes, slowed):
    """The first pass warms up. Each has two layers, which share its seconds (computed, passed) equally."""
    clock, looks, own, passed = Clock(torch.device("cpu")), [], 0.0, 0.0
    for computed, lasted in [(50, 90), *passes]:
        for _ in range(2):
            looks.append((own, passed))
            own, passed = own + computed / 2, passed + lasted / 2
            looks.append((own, passed))
    monkeypatch.setattr(profile_model, "time", Hands(*looks))
    for _ in range(1 + len(passes)):
        clock.new_repeat()
        for layer in range(2):
            with clock(layer, "forward"):
                pass
    assert clock.slowed() == pytest.approx(slowed)


def test_a_pass_that_waits_for_its_core_is_slowed():
    assert measure(Net(lambda: nn.Sequential(Sleeper()), (2,)), 1, "float32", "cpu", repeats=2).slowed > 2
    assert measure(Net(lambda: nn.Sequential(nn.Linear(2, 2)), (2,)), 1, "float32", "cpu", repeats=1).slowed >= 1


def test_passes_without_cuts_hide_no_waiting(monkeypatch):
    """Two layers that compute for half of their seconds, and five passes of both as one task after each pass."""
    clock, looks, own, passed = Clock(torch.device("cpu")), [], 0.0, 0.0
    for _ in range(3 * (2 + 5)):
        looks.append((own, passed))
        own, passed = own + 1, passed + 2
        looks.append((own, passed))
    monkeypatch.setattr(profile_model, "time", Hands(*looks))
    for _ in range(3):
        clock.new_repeat()
        for index in (0, 1, *[WHOLE] * 5):
            with clock(index, "forward"):
                pass
    assert clock.slowed() == pytest.approx(2.0)


@pytest.mark.parametrize(("quiet_s", "slowed"), [(1e-6, True), (100.0, False)])
def test_a_machine_on_which_known_work_takes_longer_slows_layers_down(quiet_s, slowed):
    """Also where no thread waits for a core: neighbors of a virtual machine fill its caches."""
    net = Net(lambda: nn.Sequential(nn.Linear(2, 2)), (2,))
    found = measure(net, 1, "float32", "cpu", repeats=3, reference_s=quiet_s)
    assert (found.slowed > 100) == slowed


def test_the_rounds_in_which_the_machine_was_quickest_count(monkeypatch):
    """A warm-up of 9 s, and rounds of 1, 5, 5 and 1.2 s: known work after the second one took twice as long."""
    clock, looks, now = Clock(torch.device("cpu")), [], 0.0
    for lasted in (9.0, 1.0, 5.0, 5.0, 1.2):
        looks += [(now, now), (now + lasted, now + lasted)]
        now += lasted
    monkeypatch.setattr(profile_model, "time", Hands(*looks))
    for _ in range(5):
        clock.new_repeat()
        with clock(0, "forward"):
            pass
    assert clock.keep_quickest([1.0, 1.0, 1.1, 2.0, 1.1, 1.1], 2) == pytest.approx(1.1)
    assert clock.seconds(0, "forward") == pytest.approx(1.1) and clock.slowed() == pytest.approx(1.1)


@pytest.mark.parametrize(
    ("paces", "enough"),
    [
        ([1.0, 1.1, 1.0], True),
        ([1.0, 1.1, 1.2], False),
        ([1.2, 1.0, 1.1, 1.0], True),
        ([2.0] * 6, False),
        ([2.0] * 7, True),
    ],
)
def test_there_are_more_rounds_where_the_machine_is_slow(paces, enough):
    assert profile_model._enough(paces, 2) == enough


class Holding(nn.Module):
    """Keeps Python's lock, as layers of many short operations do."""

    def forward(self, x: Tensor) -> Tensor:
        end = time.thread_time() + 0.004
        while time.thread_time() < end:
            pass
        return x * 1.0


@pytest.mark.usefixtures("computation")
def test_layers_that_keep_the_interpreter_take_longer_on_two_threads():
    net = Net(lambda: nn.Sequential(nn.Linear(2, 2), Holding()), (2,))
    assert measure(net, 1, "float32", "cpu", repeats=1).lock_share == 0
    assert measure(net, 1, "float32", "cpu", repeats=1, twice=True).lock_share > 0.5


class Witness(nn.Module):
    """Writes down how it is called."""

    seen: list[tuple[int, bool, bool]]

    def forward(self, x: Tensor) -> Tensor:
        Witness.seen.append((torch.get_num_threads(), self.training, dropout._state.key is not None))
        return x


def test_one_thread_in_training_with_keyed_dropout_and_nothing_left_changed():
    Witness.seen = []
    before, generator = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(2)
    try:
        profile = measure(Net(lambda: nn.Sequential(Witness(), nn.Linear(2, 2)), (2,)), 1, "float32", "cpu", repeats=2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    passes = 1 + 3 * (  # the count
        1 + profile_model.MOST_PASSES
    )  # the warm-up and two rounds, each with and without cuts
    passes += 1  # how the memory grows
    assert Witness.seen == [(1, True, True)] * passes
    assert torch.equal(torch.get_rng_state(), generator)
    assert profile.times == "measured"
    assert profile.source.endswith(f", 1 thread, torch {torch.__version__}")
    assert (profile.model, profile.micro_batch, profile.dtype) == ("net", 1, "float32")
    assert ModelProfile.from_json(profile.to_json()) == profile


def test_growth_of_the_memory_in_a_backward_pass():
    """Of a linear layer the new gradients of its weight, bias and input; a convolution reorders its weight
    inside the kernel, and one in float64 writes out its input's patches."""
    linear = measure(Net(lambda: nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), (64,)), 8, "float32", "cpu", 1)
    weight, rows = (64 + 1) * 64 * FLOAT, 8 * 64 * FLOAT
    assert [layer.backward_bytes for layer in linear.layers] == [weight, weight + rows]

    def of_convolutions(dtype: str) -> int:
        def layers() -> nn.Sequential:
            return nn.Sequential(nn.Conv2d(3, 64, 3), nn.Conv2d(64, 64, 3), nn.Flatten(), nn.Linear(64 * 4 * 4, 2))

        return measure(Net(layers, (3, 8, 8)), 2, dtype, "cpu", 1).layers[1].backward_bytes

    weight, rows = 64 * 64 * 9 * FLOAT, 2 * 64 * 6 * 6 * FLOAT
    assert of_convolutions("float32") > 1.5 * (weight + rows)
    assert of_convolutions("float64") > 2 * (weight + rows) + 64 * 9 * 16 * 2 * FLOAT


def test_autocast_computes_in_the_smaller_format():
    net = Net(lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8)), (4,))
    profile = measure(net, 2, "float32", "cpu", repeats=1, autocast="bfloat16")
    assert [layer.output_bytes for layer in profile.layers] == [2 * 8 * 2, 2 * 8 * 2]
    assert profile.layers[0].param_bytes == (4 * 8 + 8) * FLOAT
    assert all(layer.backward_s > 0 for layer in profile.layers)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"micro_batch": 0}, "micro_batch 0"),
        ({"repeats": 0}, "repeats 0"),
        ({"dtype": "float8"}, "precision.dtype float8.*float32, float64, bfloat16"),
        ({"dtype": "nn"}, "precision.dtype nn"),
    ],
)
def test_impossible_arguments(changes, what):
    arguments = {"micro_batch": 2, "dtype": "float32", "device": "cpu"} | changes
    with pytest.raises(ValueError, match=what):
        measure(NETS["pairs"], **arguments)


@pytest.mark.parametrize(("issue_s", "kernel_s", "slower_s"), [(0.001, 0.004, 0.004), (0.006, 0.004, 0.006)])
def test_on_a_gpu_the_slower_of_host_and_device_counts(monkeypatch, issue_s, kernel_s, slower_s):
    """The device begins when the host is through, so that what it takes for a layer has no waiting in it."""
    cuda, host_s, slept = fake_cuda.install(monkeypatch), [0.0], []
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    hands = SimpleNamespace(perf_counter=lambda: host_s[0], thread_time=lambda: host_s[0])
    monkeypatch.setattr(profile_model, "time", hands)
    clock = Clock(torch.device("cuda:0"))
    for number in range(clock.warm_ups + 2):
        clock.new_repeat()
        for layer in range(2):
            with clock(layer, "forward"):
                host_s[0] += issue_s
                cuda.time_s += kernel_s if number >= clock.warm_ups else 1.0
    assert [clock.seconds(layer, "forward") for layer in range(3)] == pytest.approx([slower_s, slower_s, 0.0])
    assert clock.seconds(0, "backward") == 0.0
    assert len(slept) == clock.warm_ups + 1 and all(cycles > 2 * issue_s * 1e9 for cycles in slept)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("net", NETS)
def test_on_a_gpu(net):
    """The same bytes as on the CPU but for what kernels save, and times from events."""
    here, there = (measure(NETS[net], 4, "float32", device, repeats=2) for device in ("cpu", "cuda:0"))
    assert [layer.output_bytes for layer in there.layers] == [layer.output_bytes for layer in here.layers]
    assert [layer.flops for layer in there.layers] == [layer.flops for layer in here.layers]
    assert there.sum("forward_s", 0, len(there.layers) - 1) > 0
    assert torch.cuda.get_device_name(0) in there.source
