"""Times from counted work, by hand; scaling; and which of them the key `costs` takes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.core.cluster import Cluster, Device
from harness.core.model_profile import LayerProfile, ModelProfile, Skip
from harness.core.problem import CannotRun
from harness.core.products import Product
from harness.simulator import layer_times
from harness.simulator.layer_times import (
    COSTS,
    analytic,
    depth,
    has_times,
    price_shares,
    scaled,
    times_warning,
    with_layer_times,
)
from tests.problems import refused, rows

ROOT = Path(__file__).parents[3]

A = Device("A", peak_flops={"float32": 100.0, "bfloat16": 400.0}, memory_bandwidth=10.0, efficiency=0.5, kernel_s=3.0)
B = Device("B", peak_flops={"float32": 50.0}, memory_bandwidth=20.0, efficiency=1.0, kernel_s=0.0)
BARE = Device("bare")

LAYERS = (
    LayerProfile("product", flops=1000, bytes_moved=50, kernels=1, param_bytes=7, saved_bytes=9),
    LayerProfile("thin product", flops=1000, bytes_moved=200, kernels=2),
    LayerProfile("elementwise", bytes_moved=40, elementwise_bytes=40, kernels=1),
    LayerProfile("mixed", flops=1000, bytes_moved=90, elementwise_bytes=40, kernels=3),
    LayerProfile("nothing", kernels=1, output_bytes=5),
)
COUNTED = ModelProfile(LAYERS, "net", 2, skips=(Skip(0, 3, 8, "s"),), source="counted")
ON_A = [3 + 10 / 0.5, 2 * 3 + 20 / 0.5, 3 + 4 / 0.5, 3 * 3 + (10 + 4) / 0.5, 0]
ON_B = [20, 20, 2, 20 + 2, 0]
TIMED = replace(
    COUNTED,
    layers=tuple(replace(layer, forward_s=i + 1.0, backward_s=3.0 * i) for i, layer in enumerate(LAYERS)),
    source="measured on A",
    times="measured",
    device=A,
)


def forward_s(profile: ModelProfile) -> list[float]:
    return [layer.forward_s for layer in profile.layers]


def backward_s(profile: ModelProfile) -> list[float]:
    return [layer.backward_s for layer in profile.layers]


def without_times(profile: ModelProfile) -> ModelProfile:
    layers = tuple(replace(layer, forward_s=0.0, backward_s=0.0) for layer in profile.layers)
    return replace(profile, layers=layers, source="", times="none", device=None)


@pytest.mark.parametrize("profile", [COUNTED, TIMED], ids=["counted", "measured"])
@pytest.mark.parametrize(("device", "seconds"), [(A, ON_A), (B, ON_B)], ids="AB")
def test_times_from_work_by_hand(profile, device, seconds):
    times = analytic(profile, device)
    assert forward_s(times) == pytest.approx(seconds)
    assert backward_s(times) == pytest.approx([2 * s for s in seconds])
    assert without_times(times) == without_times(profile)
    assert times.device == device


def test_the_source_says_what_was_taken():
    p40 = Device("Tesla P40", peak_flops={"float32": 11.76e12}, memory_bandwidth=346e9, efficiency=0.7, kernel_s=1e-5)
    source = "analytic on Tesla P40 from counted work: 11.76 TFLOP/s float32, 346 GB/s, 10 us a kernel, efficiency 0.7"
    assert analytic(COUNTED, p40).source == analytic(TIMED, p40).source == source


def test_products_compute_in_the_autocast_format():
    (layer, *_) = analytic(replace(COUNTED, autocast="bfloat16"), A).layers
    assert layer.forward_s == 3 + max(1000 / 400, 50 / 10) / 0.5
    with pytest.raises(CannotRun, match=r"cluster\.peak_tflops\.bfloat16"):
        analytic(replace(COUNTED, autocast="bfloat16"), B)


@given(st.floats(1, 1e15), st.floats(0.1, 1), st.floats(1e-9, 1e-3))
def test_the_efficiency_curve(flops, efficiency, kernel_s):
    """A kernel of w FLOPs reaches e * w / (w + e * peak * kernel_s) of the peak."""
    peak = 1e13
    device = Device("D", 1, {"float32": peak}, 1e12, efficiency, kernel_s)
    (layer,) = analytic(ModelProfile((LayerProfile(flops=flops),)), device).layers
    reached = flops / layer.forward_s / peak
    assert reached == pytest.approx(efficiency * flops / (flops + efficiency * peak * kernel_s))
    assert reached <= efficiency * (1 + 1e-12)


# 2 x 4 x 5 and 3 x 2 x 4 x 7 output elements, each of 25 and of 7 multiplications
PRODUCTS = (Product("l", "linear", 4, 25, 5), Product("s", "attention", 4, 7, 7, heads=3),
            Product("e", "embedding", 4, 1000, 5))  # fmt: skip
WAVES = replace(A, wave_elements=20)


def test_a_product_computes_half_a_wave_more():
    """Ten elements of each, as if it had so many more."""
    flops = sum(one.flops(2) for one in PRODUCTS)
    profile = ModelProfile((LayerProfile("l", flops=flops, kernels=3, products=PRODUCTS),), micro_batch=2)
    assert depth(PRODUCTS) == 25 + 7
    more = 2 * (20 / 2) * 25 + 2 * (20 / 2) * 7
    assert forward_s(analytic(profile, WAVES)) == pytest.approx([3 * 3 + (flops + more) / 100 / 0.5])
    assert forward_s(analytic(profile, A)) == pytest.approx([3 * 3 + flops / 100 / 0.5])
    assert ", of a matmul's output 20 elements at once" in analytic(profile, WAVES).source
    (there,) = forward_s(scaled(analytic(profile, A), A, WAVES))
    assert there == pytest.approx(3 * 3 + (flops + more) / 100 / 0.5)


def test_a_share_has_all_kernels_and_its_own_waves():
    """Half of the work: by columns each element takes as many multiplications as before, by rows half of them."""
    layer = LayerProfile("l", flops=10_000, kernels=3, products=PRODUCTS[:1])
    whole = analytic(ModelProfile((layer,)), WAVES)
    halves = replace(whole, layers=(replace(whole.layers[0], flops=5000, forward_s=1.0, backward_s=2.0),))
    for deep in (25, 12):
        found = price_shares(halves, [deep])
        assert forward_s(found) == pytest.approx([3 * 3 + (5000 + 20 * deep) / 100 / 0.5])
        assert backward_s(found) == pytest.approx([2 * s for s in forward_s(found)])
    for other in (replace(halves, device=A), replace(halves, device=None), replace(halves, times="measured")):
        assert price_shares(other, [25]) == other, "no waves are known, or its times are not computed"


def test_scaling_by_hand():
    on_b = scaled(TIMED, A, B)
    ratios = [b / a for a, b in zip(ON_A[:-1], ON_B[:-1], strict=True)] + [10 / 20]  # the last: bandwidths
    assert forward_s(on_b) == pytest.approx([t * r for t, r in zip(forward_s(TIMED), ratios, strict=True)])
    assert backward_s(on_b) == pytest.approx([t * r for t, r in zip(backward_s(TIMED), ratios, strict=True)])
    assert without_times(on_b) == without_times(TIMED)
    assert (on_b.source, on_b.times, on_b.device) == ("scaled from A to B: measured on A", "scaled", B)


numbers = st.floats(0.1, 100)
devices = st.builds(
    lambda peak, bandwidth, efficiency, kernel_s: Device("D", 1, {"float32": peak}, bandwidth, efficiency, kernel_s),
    numbers, numbers, st.floats(0.01, 1), st.floats(0, 10),
)  # fmt: skip
layers = st.builds(
    lambda flops, product, elementwise, kernels: LayerProfile(
        flops=flops, bytes_moved=product + elementwise, elementwise_bytes=elementwise, kernels=kernels
    ),
    numbers, numbers, numbers, st.integers(0, 9),
)  # fmt: skip
profiles = st.lists(layers, min_size=1, max_size=4).map(lambda made: ModelProfile(tuple(made)))


@given(profiles, devices, devices, devices)
def test_analytic_times_scale_to_analytic_times(profile, a, b, c):
    assert forward_s(scaled(analytic(profile, a), a, b)) == pytest.approx(forward_s(analytic(profile, b)))
    there = scaled(scaled(analytic(profile, a), a, c), c, b)
    assert backward_s(there) == pytest.approx(backward_s(analytic(profile, b)))


@given(profiles, devices)
def test_a_better_device_is_never_slower(profile, device):
    times = forward_s(analytic(profile, device))
    for better in (
        replace(device, peak_flops={"float32": 2 * device.peak_flops["float32"]}),
        replace(device, memory_bandwidth=2 * device.memory_bandwidth),
        replace(device, kernel_s=device.kernel_s / 2),
    ):
        assert all(new <= old for new, old in zip(forward_s(analytic(profile, better)), times, strict=True))
    assert all(t >= 0 for t in times)


UNCOUNTED = tuple(LayerProfile(layer.name, layer.forward_s, layer.backward_s) for layer in TIMED.layers)
# profile, costs, device, described, given: what is taken
CHOICES = [
    (TIMED, "auto", A, False, False, "measured"),
    (TIMED, "auto", B, True, False, "analytic"),
    (TIMED, "auto", BARE, True, False, "measured"),  # cluster=flat without peaks
    (replace(TIMED, dtype="float64"), "auto", B, True, False, "measured"),  # no peak in that format
    (TIMED, "auto", replace(B, memory_bandwidth=0.0), True, False, "measured"),
    (TIMED, "auto", B, True, True, "scaled"),  # of another device
    (TIMED, "auto", B, False, True, "measured"),  # on this machine as the user gave it
    (TIMED, "auto", replace(B, name="A"), True, True, "measured"),  # of this device
    (TIMED, "auto", BARE, True, True, "measured"),
    (TIMED, "auto", replace(B, memory_bandwidth=0.0), True, True, "measured"),
    (replace(TIMED, times="scaled"), "auto", B, True, True, "scaled"),
    (replace(TIMED, times="as given"), "auto", B, True, True, "measured"),
    (replace(TIMED, device=None), "auto", B, True, True, "measured"),
    (TIMED, "none", B, True, True, "none"),
    (COUNTED, "none", BARE, True, False, "none"),
    (replace(TIMED, device=replace(A, memory_bandwidth=0.0)), "auto", B, True, True, "measured"),
    (replace(TIMED, layers=UNCOUNTED), "auto", B, True, True, "measured"),
    (analytic(COUNTED, A), "auto", B, True, True, "analytic"),
    (replace(analytic(COUNTED, A), device=replace(A, peak_flops={})), "auto", B, True, True, "analytic"),
    (analytic(COUNTED, A), "auto", BARE, True, True, "measured"),
    (replace(analytic(COUNTED, A), layers=UNCOUNTED), "auto", B, True, True, "measured"),
    (COUNTED, "auto", B, True, True, "analytic"),
    (COUNTED, "auto", B, True, False, "analytic"),
    (COUNTED, "auto", A, False, True, "analytic"),
    (TIMED, "measured", B, True, False, "measured"),
    (TIMED, "scaled", B, True, True, "scaled"),
    (TIMED, "analytic", B, True, True, "analytic"),
    (COUNTED, "analytic", A, False, False, "analytic"),
]


def without_any(profile: ModelProfile) -> ModelProfile:
    """Layers that take no time, whatever they took."""
    layers = tuple(replace(layer, forward_s=0.0, backward_s=0.0) for layer in profile.layers)
    return replace(profile, layers=layers, source=f"none, {profile.source}", times="none")


@pytest.mark.parametrize(("profile", "costs", "device", "described", "given", "taken"), CHOICES)
def test_what_the_key_costs_takes(profile, costs, device, described, given, taken):
    wanted = {
        "measured": lambda: profile,
        "scaled": lambda: scaled(profile, A, B),
        "analytic": lambda: analytic(profile, device),
        "none": lambda: without_any(profile),
    }
    assert with_layer_times(profile, costs, device, described, given) == wanted[taken]()


BANDWIDTH = "its data sheet's GB/s as cluster.memory_bandwidth_gb_s, with costs=analytic"
PEAKS = f"its data sheet's TFLOP/s as cluster.peak_tflops.float32 and {BANDWIDTH}"
BOTH = [{"costs": "scaled"}, {"costs": "analytic"}]
# profile, device, given: fixes, hint
BORROWED = [
    (TIMED, B, True, BOTH, ""),
    (TIMED, B, False, BOTH, ""),
    (TIMED, BARE, True, [], PEAKS),
    (replace(TIMED, device=None), BARE, False, [], PEAKS),
    (TIMED, replace(B, memory_bandwidth=0.0), True, [], BANDWIDTH),
    (replace(TIMED, device=None), B, True, BOTH[1:], ""),
    (replace(TIMED, device=BARE), B, True, BOTH[1:], ""),
    (replace(TIMED, layers=UNCOUNTED), B, True, [], ""),
    (replace(TIMED, layers=UNCOUNTED), BARE, True, [], ""),
]


@pytest.mark.parametrize(("profile", "device", "given", "fixes", "hint"), BORROWED)
def test_times_of_another_device_are_noted_with_advice(profile, device, given, fixes, hint):
    warning = times_warning(profile, device, given)
    assert (warning.key, warning.value, list(warning.fixes), warning.hint) == ("layer times", None, fixes, hint)
    asked = {word.rstrip(","): "" for word in hint.split() if word.startswith("cluster.")} | {"costs": "analytic"}
    for keys in [*fixes, *([asked] if hint else [])]:
        peaks = B.peak_flops if "cluster.peak_tflops.float32" in keys else device.peak_flops
        bandwidth = 1.0 if "cluster.memory_bandwidth_gb_s" in keys else device.memory_bandwidth
        fixed_device = replace(device, peak_flops=peaks, memory_bandwidth=bandwidth)
        fixed = with_layer_times(profile, keys["costs"], fixed_device, True, given)
        assert times_warning(fixed, fixed_device, given) is None


def test_times_of_the_device_itself_need_no_word():
    assert times_warning(TIMED, replace(BARE, name="A"), user_profile=True) is None


FLOAT32, WIDTH = "cluster.peak_tflops.float32", "cluster.memory_bandwidth_gb_s"
ANALYTIC = ["costs=analytic"]
REFUSED = [
    (COUNTED, "measured", A, [("costs", "measured", ANALYTIC)]),
    (COUNTED, "scaled", A, [("costs", "scaled", ANALYTIC)]),
    (TIMED, "cheap", A, [("costs", "cheap", ["costs=auto"])]),
    (TIMED, "analytic", BARE, [(FLOAT32, None, []), (WIDTH, None, [])]),
    (COUNTED, "auto", BARE, [(FLOAT32, None, []), (WIDTH, None, [])]),
    (replace(COUNTED, dtype="float64"), "analytic", A, [("cluster.peak_tflops.float64", None, [])]),
    (replace(TIMED, device=None), "scaled", B, [("profile", "net", ANALYTIC)]),
    (replace(TIMED, device=replace(A, memory_bandwidth=0.0)), "scaled", B, [("profile", "net", ANALYTIC)]),
    (TIMED, "scaled", BARE, [(FLOAT32, None, []), (WIDTH, None, [])]),
    (replace(TIMED, device=None), "scaled", BARE,
     [("profile", "net", ANALYTIC), (FLOAT32, None, []), (WIDTH, None, [])]),
    (ModelProfile((LayerProfile("a", 1, 2),), "old"), "analytic", BARE,
     [("profile", "old", []), (FLOAT32, None, []), (WIDTH, None, [])]),
    (ModelProfile((LayerProfile("a"),)), "auto", A, [("profile", "without a name", [])]),
]  # fmt: skip


@pytest.mark.parametrize(("profile", "costs", "device", "problems"), REFUSED)
def test_what_cannot_be_priced(profile, costs, device, problems):
    with pytest.raises(CannotRun) as caught:
        with_layer_times(profile, costs, device, simulated=True, user_profile=True)
    assert rows(refused(caught)) == problems


def test_layers_that_take_no_time_leave_communication_alone():
    warning = times_warning(with_layer_times(TIMED, "none", BARE, True, False), BARE, user_profile=False)
    assert (warning.key, warning.value, warning.fixes, warning.hint) == ("layer times", None, (), PEAKS)


def test_times_are_seen_in_either_direction():
    assert has_times(TIMED) and not has_times(COUNTED)
    assert has_times(ModelProfile((LayerProfile(), LayerProfile(backward_s=1.0))))
    assert set(COSTS) == {costs for _, costs, *_ in CHOICES}


def test_the_device_survives_a_file(tmp_path):
    on_b = scaled(replace(TIMED, autocast=None), A, B)
    on_b.save(tmp_path / "profile.json")
    assert ModelProfile.load(tmp_path / "profile.json") == on_b


def test_pricing_works_without_torch():
    program = "import sys; from harness.simulator import layer_times as costs; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)


def test_speeds_are_bounds_where_a_class_of_kernels_is_not_calibrated():
    """A device may be calibrated for the matmuls of a GPT, and not for convolutions."""

    def bounds(kind: str, times: str = "analytic", name: str = "mine", **shares: float) -> bool:
        layer = LayerProfile("l", 1.0, 2.0, 2.0, products=(Product("p", kind),))
        device = Device("d", efficiency=shares.pop("efficiency", 1.0), efficiencies=shares)
        profile = ModelProfile((layer,), "m", 1, times=times)
        return layer_times.are_bounds(profile, Cluster(name, device=device))

    known = {"matmul": 0.8, "attention": 0.5, "elementwise": 0.3}
    assert [bounds(kind, **known) for kind in ("linear", "attention", "conv")] == [False, False, True]
    assert bounds("linear", matmul=0.8), "elementwise kernels are not known"
    assert not bounds("conv", efficiency=0.9) and bounds("conv")
    assert not bounds("conv", times="measured") and not bounds("conv", name="local")


def test_speeds_are_bounds_in_formats_that_are_not_calibrated():
    """With a share of its own for float32 those of the classes are of float16 and bfloat16."""

    def bounds(kind: str, dtype: str, autocast: str | None = None, **shares: float) -> bool:
        layer = LayerProfile("l", 1.0, 2.0, 2.0, products=(Product("p", kind),))
        profile = ModelProfile((layer,), "m", 1, dtype, times="analytic", autocast=autocast)
        efficiencies = {"matmul": 0.8, "attention": 0.5, "elementwise": 0.3} | shares
        return layer_times.are_bounds(profile, Cluster("mine", device=Device("d", efficiencies=efficiencies)))

    assert not bounds("linear", "float32") and not bounds("linear", "float64"), "of every format"
    assert bounds("linear", "float32", float32=1.0), "1 is the share of the data sheet"
    assert not bounds("linear", "float32", float32=0.9) and bounds("attention", "float32", float32=0.9)
    assert not bounds("attention", "bfloat16", float32=1.0) and not bounds("linear", "float32", "bfloat16", float32=1.0)
    assert bounds("linear", "float64", float32=0.9)


def seconds(kind: str, dtype: str = "float16", **shares: float) -> float:
    """Of a layer with one FLOP and one byte by elementwise kernels, on a device where each takes a second."""
    product = Product("p", kind, 1, 72, 4, image=(8, 2, 2)) if kind == "conv" else Product("p", kind, 1, 8, 4)
    layer = LayerProfile("l", flops=1.0, bytes_moved=1, elementwise_bytes=1, products=(product,), kernels=0)
    device = Device("d", 1, {"float16": 1.0, "float32": 1.0, "float64": 1.0}, 1.0, efficiencies=shares)
    return layer_times.analytic(ModelProfile((layer,), "m", 1, dtype), device).layers[0].forward_s


def test_elementwise_kernels_of_convolutional_nets_have_a_share_of_their_own():
    shares = {"matmul": 1.0, "convolution": 1.0, "elementwise": 0.25}
    assert [seconds(kind, **shares, image=0.5) for kind in ("conv", "linear")] == [1 + 2, 1 + 4]
    assert seconds("conv", **shares) == 1 + 4, "else that of all"


def test_a_transformer_that_cuts_images_into_patches_by_a_convolution_is_no_convolutional_net():
    shares = {"matmul": 1.0, "convolution": 1.0, "elementwise": 0.25, "image": 0.5}
    patches, linear = Product("p", "conv", 1, 72, 4, image=(8, 2, 2)), Product("l", "linear", 1, 100, 100)
    layers = (
        LayerProfile("patches", flops=576.0, products=(patches,), kernels=0),
        LayerProfile("linear", flops=20_000.0, products=(linear,), bytes_moved=1, elementwise_bytes=1, kernels=0),
    )
    device = Device("d", 1, {"float32": 1.0}, 1.0, efficiencies=shares)
    priced = layer_times.analytic(ModelProfile(layers, "m", 1), device)
    assert priced.layers[1].forward_s == 20_000 + 4


def test_matmuls_in_float32_have_a_share_of_their_own():
    shares = {"matmul": 0.5, "convolution": 0.25, "elementwise": 1.0}
    for kind, others in (("linear", 2), ("conv", 4)):
        assert seconds(kind, "float32", **shares, float32=0.8) == 1.25 + 1
        assert seconds(kind, "float32", **shares) == seconds(kind, "float16", **shares, float32=0.8) == others + 1


def test_no_format_takes_the_share_of_another_one():
    """Attention has none in float32, nothing has one in float64: what is left is that of the device."""
    shares = {"matmul": 0.5, "attention": 0.25, "elementwise": 1.0, "float32": 0.8}
    assert [seconds("attention", dtype, **shares) for dtype in ("float16", "float32")] == [4 + 1, 1 + 1]
    assert [seconds("linear", dtype, **shares) for dtype in ("float16", "float64")] == [2 + 1, 1 + 1]


def test_waves_of_float32_are_its_own():
    """Each of a wave's elements is three multiplications and additions: half a wave of 20 are 60 FLOPs."""
    layer = LayerProfile("l", flops=36.0, products=(Product("p", "linear", 1, 3, 6),), kernels=0)
    device = Device("d", 1, {"float16": 1.0, "float32": 1.0}, 1.0, wave_elements=20, float32_wave_elements=10)

    def times(dtype: str, of: Device) -> float:
        return layer_times.analytic(ModelProfile((layer,), "m", 1, dtype), of).layers[0].forward_s

    assert (times("float16", device), times("float32", device)) == (36 + 60, 36 + 30)
    assert times("float32", replace(device, float32_wave_elements=0)) == 36 + 60, "else those of all"


@pytest.mark.parametrize(
    ("product", "kernels"),
    [
        (Product("p", "conv", 1, 8, 4, image=(8, 2, 2)), "matmul"),
        (Product("p", "conv", 1, 2, 1, heads=4, image=(8, 2, 2)), "matmul"),
        (Product("p", "conv", 1, 72, 4, image=(8, 2, 2)), "convolution"),
        (Product("p", "conv", 1, 9, 1, heads=8, image=(8, 2, 2)), "convolution"),
        (Product("p", "conv", 1, 8, 4), "convolution"),
        (Product("scores", "attention", 1, 8, 4), "attention"),
        (Product("p", "linear", 1, 8, 4), "matmul"),
    ],
)
def test_a_convolution_of_single_pixels_is_a_matmul(product, kernels):
    """In groups, too; one of which the image is not known is none."""
    shares = {"matmul": 0.5, "convolution": 0.25, "attention": 0.2, "elementwise": 1.0}
    device = Device("d", 1, {"float32": 1.0}, 1.0, efficiencies=shares)
    layer = LayerProfile("l", flops=1.0, products=(product,), kernels=0)
    priced = layer_times.analytic(ModelProfile((layer,), "m", 1), device)
    assert priced.layers[0].forward_s == pytest.approx(1 / shares[kernels])
