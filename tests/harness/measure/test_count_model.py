"""Counted profiles: equal to measured ones but for times, and to U-Net's numbers written down elsewhere."""

from __future__ import annotations

import csv
import gzip
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from harness.capture import split_or_whole
from harness.cli.compose import compose
from harness.config import cluster_config, registry
from harness.config.cluster_config import ClusterConfig
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import ModelProfile
from harness.core.plan import Plan
from harness.interfaces import Batch
from harness.measure.count_model import NotCounted, count
from harness.measure.profile_model import measure
from harness.nn import dropout
from harness.schedule.builders.single import single
from harness.simulator import simulate
from harness.simulator.layer_times import analytic
from models.unet.config import Config
from models.unet.unet import build
from tests.support.nets import NETS, Net
from tests.support.profiles import without_times

ROOT = Path(__file__).parents[3]
FIXTURES = ROOT / "tests" / "fixtures"
FLOAT = 4


def buffers() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.2), nn.AvgPool2d(2))


class Scaled(nn.Linear):
    """By tensors that torch does not know to be the layer's: an attribute, one in a list, a module in a list."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.factor, self.listed = torch.full((width,), 2.0), [torch.ones(width, requires_grad=True)]
        self.modules_listed = [nn.Linear(width, width)]

    def forward(self, x: Tensor) -> Tensor:
        return self.modules_listed[0](super().forward(x) * self.factor + self.listed[0])


def scaled() -> nn.Sequential:
    return nn.Sequential(Scaled(4), nn.ReLU(), Scaled(4))


def unet(**keys: object) -> object:
    return build(Config(**keys))  # type: ignore[arg-type]


MODELS = {
    **NETS,
    "batch norm": Net(buffers, (3, 16, 16)),
    "plain attributes": Net(scaled, (4,)),
    "unet": unet(convs=2, channels=4, size=64),
    "odd unet": unet(convs=1, channels=2, size=70, dropout=0.0),
}


@pytest.mark.parametrize("name", MODELS)
def test_counted_is_measured_without_times(name):
    counted = count(MODELS[name], 4, "float32")
    assert without_times(counted) == without_times(measure(MODELS[name], 4, "float32", "cpu", repeats=1))
    assert all(layer.forward_s == layer.backward_s == 0 for layer in counted.layers)
    assert counted.sum("kernels", 0, len(counted.layers) - 1) > 0
    assert counted.source == f"counted on the meta device, torch {torch.__version__}"
    assert ModelProfile.from_json(counted.to_json()) == counted


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_other_formats(dtype):
    counted = count(MODELS["unet"], 2, dtype)
    assert without_times(counted) == without_times(measure(MODELS["unet"], 2, dtype, "cpu", repeats=1))
    assert counted.dtype == dtype
    assert counted.input_bytes == 2 * 3 * 64 * 64 * {"float64": 8, "bfloat16": 2}[dtype]


@pytest.mark.parametrize("name", ["unet", "text", "attention"])
def test_autocast(name):
    counted = count(MODELS[name], 2, "float32", autocast="bfloat16")
    assert without_times(counted) == without_times(measure(MODELS[name], 2, "float32", "cpu", 1, autocast="bfloat16"))
    assert (counted.dtype, counted.autocast) == ("float32", "bfloat16")
    plain = count(MODELS[name], 2, "float32")
    end = len(plain.layers) - 1
    assert plain.autocast is None
    assert counted.sum("kernels", 0, end) > plain.sum("kernels", 0, end)  # casts are kernels, too
    assert counted.sum("flops", 0, end) == plain.sum("flops", 0, end)


def test_work_in_a_unet_by_hand():
    """Convolution, dropout, norm and relu of the first block; stash; join."""
    counted = count(unet(convs=1, channels=2, size=64), 4, "float32")
    conv, drop, norm, relu, stash, _ = counted.layers[:6]
    image, inner, weight = 4 * 3 * 64**2 * FLOAT, 4 * 2 * 64**2 * FLOAT, 2 * 3 * 9 * FLOAT
    assert (conv.kernels, conv.bytes_moved, conv.elementwise_bytes) == (1, image + weight + inner, 0)
    # random numbers, compare, convert, scale: 4 x 2 of them, 1 byte each where compared; then times x
    mask = 4 * 2 * (4 + (4 + 1) + (1 + 4) + (4 + 4) + 4)
    assert (drop.kernels, drop.bytes_moved) == (5, 2 * inner + mask)
    assert (norm.kernels, norm.bytes_moved) == (1, 2 * inner + 2 * 4 * 2 * FLOAT)  # mean and deviation
    assert (relu.kernels, relu.bytes_moved, relu.elementwise_bytes) == (1, 2 * inner, 2 * inner)
    assert (stash.kernels, stash.bytes_moved, stash.output_bytes) == (0, 0, inner)
    join = counted.layers[counted.skips[0].target]
    assert (join.kernels, join.bytes_moved) == (1, 2 * 2 * inner)


def parsed(name: str) -> list[dict[str, str]]:
    with gzip.open(FIXTURES / f"{name}.csv.gz", "rt") as file:
        return list(csv.DictReader(file))


@pytest.mark.usefixtures("computation")
@pytest.mark.parametrize(("convs", "channels"), [(5, 64), (6, 72), (48, 160)])
def test_every_layer_of_a_unet(convs, channels):
    """Against numbers that were written down without this model; (48, 160) has 63 GB of weights."""
    n = 2
    profile = count(unet(convs=convs, channels=channels, size=192), n, "float32")
    rows = parsed(profile.model)
    assert profile.model == f"unet_{convs}_{channels}_192"
    assert [layer.name for layer in profile.layers] == [row["layer"] for row in rows]
    assert [layer.param_bytes for layer in profile.layers] == [FLOAT * int(row["params"]) for row in rows]
    assert [layer.flops for layer in profile.layers] == [2 * n * int(row["fwd_macs_per_sample"]) for row in rows]
    floats = n * FLOAT
    assert [profile.boundary_bytes(index) for index in range(len(rows))] == [
        floats * int(row["in_elems_per_sample"]) for row in rows
    ]
    assert [layer.output_bytes for layer in profile.layers] == [
        floats * int(row["out_elems_per_sample"]) for row in rows
    ]
    alive = [sum(s.bytes for s in profile.skips if s.source <= i < s.target) for i in range(len(rows))]
    assert alive == [floats * int(row["live_skip_elems_after_layer"]) for row in rows]
    touched = {s.source: f"stash{k}:{s.bytes // floats}" for k, s in enumerate(profile.skips)}
    touched |= {s.target: f"pop{k}:{s.bytes // floats}" for k, s in enumerate(profile.skips)}
    assert [touched.get(i, "") for i in range(len(rows))] == [row["skip"] for row in rows]


@pytest.mark.usefixtures("computation")
def test_a_p40_trains_a_unet_as_published():
    """torchgpipe's Table 4, Naive-1: 28.500 samples/s with batch 40; and its benchmark of ResNet-101: 95.862 with batch
    118. Efficiencies are calibrated on both; so if counting changes, those of conf/cluster/p40x8.yaml must change,
    too."""
    cluster = cluster_config.build(ClusterConfig(**compose(["cluster=p40x8"]).cluster))
    resnet = registry.build("model", compose(["model=resnet101_layers"]).model)
    for model, batch, published in ((unet(convs=5, channels=64, size=192), 40, 28.500), (resnet, 118, 95.862)):
        profile = analytic(count(model, batch, "float32"), cluster.device)
        done = simulate(single(1), Plan.contiguous([len(profile.layers)]), profile, cluster, MemoryModel())
        assert batch / done.figures["step_time_s"] == pytest.approx(published, rel=2e-4)


def test_nothing_is_left_changed():
    torch.manual_seed(3)
    state = torch.get_rng_state()
    count(MODELS["unet"], 2, "float32")
    count(MODELS["batch norm"], 2, "float32")
    assert torch.equal(torch.get_rng_state(), state)
    assert dropout._state.key is None
    assert type(torch.ones(2)) is Tensor and torch.ones(2).sum().item() == 2


def test_counting_does_what_training_does():
    """Layers are in training mode, and draw keyed masks."""
    seen = []

    class Witness(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append((self.training, dropout._state.key, x.requires_grad))
            return x

    count(Net(lambda: nn.Sequential(nn.Linear(2, 2), Witness()), (2,)), 1, "float32")
    assert seen == [(True, (0, 0, 0), True)]


class RealTable(nn.Module):
    """Holds a buffer with numbers in it, made from a list."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.tensor([1.0, 2.0], device="cpu"))
        self.alone = torch.tensor([3.0, 4.0], device="cpu")

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table + self.alone


def test_layers_may_hold_real_tensors():
    net = Net(lambda: nn.Sequential(nn.Linear(2, 2), RealTable()), (2,))
    assert without_times(count(net, 3, "float32")) == without_times(measure(net, 3, "float32", "cpu", 1))


class Broken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum().item() > 0 else -x


def test_what_cannot_be_counted_names_the_layer():
    with pytest.raises(NotCounted, match=r"\(in layer 1 \(1\), on a micro-batch of 3\)"):
        count(Net(lambda: nn.Sequential(nn.Identity(), Broken()), (2,)), 3, "float32")
    with pytest.raises(NotCounted, match="fits; it trains as it is, in one stage: engine=single, ddp"):
        count(Net(lambda: split_or_whole(Broken(), (torch.ones(4, 2),)), (2,)), 3, "float32")
    assert dropout._state.key is None and type(torch.ones(2)) is Tensor


@pytest.mark.parametrize(("n", "dtype", "what"), [(0, "float32", "micro_batch 0"), (1, "float8", "dtype float8.*64")])
def test_impossible_arguments(n, dtype, what):
    with pytest.raises(ValueError, match=what):
        count(MODELS["unet"], n, dtype)


def test_samples_may_be_real():
    """A model may draw its samples anywhere."""
    net = Net(lambda: nn.Sequential(nn.Linear(2, 2)), (2,))
    net.sample = lambda n: Batch(torch.zeros(n, 2, device="cpu"), torch.zeros(n, device="cpu"))  # type: ignore
    assert count(net, 3, "float32").input_bytes == 3 * 2 * FLOAT


@pytest.mark.usefixtures("commands")
def test_measuring_does_not_import_a_compiler():
    """torch's compiler takes a second to import, longer than a small profile."""
    program = (
        "import sys; from harness.measure.profile_model import measure; from models.unet.config import Config;"
        "from models.unet.unet import build;"
        "measure(build(Config(convs=1, channels=2, size=64)), 1, 'float32', 'cpu', 1);"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)
