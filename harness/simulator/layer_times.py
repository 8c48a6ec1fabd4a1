"""Layer times of a run: measured, measured and scaled to another device, or from counted work.

**The analytic model.** Each kernel costs `kernel_s` of its device, and then as long as its FLOPs or its bytes take,
whichever is longer, at a share e of the device's peaks: `efficiency`, or that of its class of kernels. So a kernel of w
FLOPs reaches this share of peak:

    e |                                 _____..........       e * w / (w + e * peak * kernel_s)
      |                      ___...'''
      |               __.''
    e/2 - - - - - _.'                                         half of it at w = e * peak * kernel_s: 113 MFLOP on a
      |        .'                                             device of 11.76 TFLOP/s, 10 us and e = 0.96
      |    _.'
      |__.'___________________________________________ w (logarithmic)

A layer's kernels with FLOPs are taken together (max of FLOPs and bytes), and so are its elementwise ones (bytes). The
backward pass is twice the forward pass in kernels, FLOPs and bytes, or less where parameters are not trained
(`LayerProfile.backward_matmuls`, `backward_others`). No numbers but these shares are calibrated.

**Waves.** Where it is known how many elements of a matmul's output a device computes at once (`wave_elements`: the
tiles of all its multiprocessors), a matmul computes half a wave more than it has, on average: the last wave is not
full. That is as much work for a small matmul as for a large one, and for a shard as for the whole, if the output is
split.

    |== wave ==|== wave ==|== wave ==|=====.....|      the fourth wave takes as long as the others
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from harness.core.cluster import MATMULS, Cluster, Device
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.problem import CannotRun, Fix, Problem, refuse
from harness.core.products import Product
from harness.core.value_checks import one_of

COSTS = ("auto", "measured", "scaled", "analytic", "none")
KERNELS = {"conv": "convolution", "attention": "attention"}
"""The class of kernels by the kind of a product; all others are matmuls, as are convolutions of single pixels."""


def with_layer_times(
    profile: ModelProfile, costs: str, device: Device, simulated: bool, user_profile: bool
) -> ModelProfile:
    """Returns `profile` with the layer times that the key `costs` asks for, on `device` of the cluster.

    `simulated`: the cluster is not this machine. `user_profile`: the user specified the profile. Raises `CannotRun`
    where the times are not available.
    """
    refuse(one_of("costs", costs, COSTS))
    if costs == "auto":
        costs = _automatic(profile, device, simulated, user_profile)
    if costs == "none":
        return without_times(profile)
    if costs == "analytic":
        return analytic(profile, device)
    if not has_times(profile):
        message = f"needs a profile with times, that of {_name(profile)} has none ({profile.source})"
        hint = "a profile of python run.py mode=profile"
        raise CannotRun([Problem("costs", costs, message, ({"costs": "analytic"},), hint)])
    return scaled(profile, profile.device or Device(), device) if costs == "scaled" else profile


def without_times(profile: ModelProfile) -> ModelProfile:
    """Returns the profile with layers that take no time, so that only communication is left."""
    layers = tuple(replace(layer, forward_s=0.0, backward_s=0.0) for layer in profile.layers)
    return replace(profile, layers=layers, source=f"none, {profile.source}", times="none")


def _automatic(profile: ModelProfile, device: Device, simulated: bool, user_profile: bool) -> str:
    """Returns what auto means: the times of the profile, unless it has none or better ones are available.

    Better ones are available on a simulated device with peaks: analytic times for a profile that was made on this
    machine; for a user's profile of another device times computed again, or scaled if they were measured.
    """
    if not has_times(profile):
        return "analytic"
    if not simulated or _without_peaks(profile, device):
        return "measured"
    if not user_profile:
        return "analytic"
    origin = profile.device
    if origin is None or origin.name == device.name or _without_work(profile):
        return "measured"
    if profile.times == "analytic":
        return "analytic"
    origin_known = profile.times in ("measured", "scaled") and not _without_origin(profile, origin)
    return "scaled" if origin_known else "measured"


def times_warning(profile: ModelProfile, device: Device, user_profile: bool) -> Problem | None:
    """Returns a note about times that are not, or not known to be, those of a simulated `device`, with advice.

    None for its own times. `user_profile`: the user specified the profile.
    """
    if not has_times(profile):
        return _with_advice("are 0, what is predicted is communication alone", profile, device)
    if profile.device and profile.device.name == device.name:
        return None
    whose = "the profile" if user_profile else "this machine"
    doubt = "not" if profile.device or not user_profile else "not known to be"
    return _with_advice(f"are those of {whose} ({profile.source}), {doubt} of {device.name}", profile, device)


def _with_advice(message: str, profile: ModelProfile, device: Device) -> Problem:
    """Returns the note with the keys that give times of `device`; without counted work nothing helps."""
    fixes: list[Fix] = []
    hint = ""
    if not _without_work(profile):
        fixes = [{"costs": "analytic"}]
        if profile.device and not _without_origin(profile, profile.device):
            fixes.insert(0, {"costs": "scaled"})
        lacking = [problem.hint for problem in _without_peaks(profile, device)]
        if lacking:
            fixes, hint = [], f"{' and '.join(lacking)}, with costs=analytic"
    return Problem("layer times", None, message, tuple(fixes), hint)


def analytic(profile: ModelProfile, device: Device) -> ModelProfile:
    """Computes the times of `profile` on `device` from its FLOPs, bytes and kernels, ignoring the times that it has.

    A layer without work takes no time. Raises `CannotRun` where the device lacks a peak, or the profile has no work.
    """
    problems = _without_work(profile) + _without_peaks(profile, device)
    refuse(problems, f"costs=analytic on {device.name}")
    source = f"analytic on {device.name} from counted work: {_numbers(profile, device)}"
    price = _pricing(profile, device)
    seconds = [price(layer, depth(layer.products)) for layer in profile.layers]
    return replace(_timed(profile, seconds), source=source, times="analytic", device=device)


def scaled(profile: ModelProfile, origin: Device, target: Device) -> ModelProfile:
    """Scales the times of `profile`, measured on `origin`, to `target`: each layer's times the ratio of its analytic
    times.

    A layer with times but without counted work is scaled by the ratio of memory bandwidths. Raises `CannotRun` where
    one of the devices lacks a peak.
    """
    problems = _without_origin(profile, origin) + _without_peaks(profile, target)
    refuse(problems, f"costs=scaled to {target.name}")
    layers = []
    priced, priced_there = _pricing(profile, target), _pricing(profile, origin)
    for layer in profile.layers:
        ratio = origin.memory_bandwidth / target.memory_bandwidth
        if _has_work(layer):
            terms = depth(layer.products)
            ratio = priced(layer, terms).whole / priced_there(layer, terms).whole
        forward_s, backward_s = layer.forward_s * ratio, layer.backward_s * ratio
        layers.append(replace(layer, forward_s=forward_s, backward_s=backward_s, backward_bytes=0))
    source = f"scaled from {origin.name} to {target.name}: {profile.source}"
    return replace(profile, layers=tuple(layers), source=source, times="scaled", device=target)


def price_shares(shares: ModelProfile, depths: Sequence[float]) -> ModelProfile:
    """Computes the times of a device's shares of the layers where waves are known; else keeps their even times.

    A share launches as many kernels as the whole layer. `depths[i]` is that of layer i (`depth`) on the device.
    """
    device = shares.device
    if not device or not device.wave_of(_format(shares)) or shares.times != "analytic":
        return shares
    price = _pricing(shares, device)
    return _timed(shares, [price(*of) for of in zip(shares.layers, depths, strict=True)])


def depth(products: Sequence[Product]) -> int:
    """Returns the multiplications for one element of the output, of all matmuls together; a look-up has none."""
    return sum(product.in_ for product in products if product.kind != "embedding")


def are_bounds(profile: ModelProfile, cluster: Cluster) -> bool:
    """Returns whether some layer times are only the least that the data sheet of the device allows, so that speeds are
    upper bounds. The peaks of this machine are measured."""
    if profile.times != "analytic" or cluster.name == "local":
        return False
    device, dtype = cluster.device, _format(profile)
    used = {device.counts_as(_kernels(product), dtype) for layer in profile.layers for product in layer.products}
    return not all(map(device.is_calibrated, used | {"elementwise", _elementwise(profile)}))


def has_times(profile: ModelProfile) -> bool:
    """Returns whether any layer takes time; in a counted profile none does."""
    return any(layer.forward_s or layer.backward_s for layer in profile.layers)


def _timed(profile: ModelProfile, seconds: Sequence[Parts]) -> ModelProfile:
    layers = (
        replace(
            layer,
            forward_s=parts.whole,
            backward_s=_backward_s(layer, parts),
            forward_fixed=0.0,
            backward_fixed=0.0,
            backward_bytes=0,
        )
        for layer, parts in zip(profile.layers, seconds, strict=True)
    )
    return replace(profile, layers=tuple(layers))


def _backward_s(layer: LayerProfile, parts: Parts) -> float:
    if layer.backward_matmuls == layer.backward_others:
        return layer.backward_matmuls * parts.whole
    products = min(1.0, len(layer.products) / layer.kernels) if layer.kernels else 0.0
    kernels = products * layer.backward_matmuls + (1 - products) * layer.backward_others
    return parts.launched * kernels + parts.matmuls * layer.backward_matmuls + parts.others * layer.backward_others


class Parts(NamedTuple):
    """Seconds of a forward pass: to launch kernels, of those with FLOPs, and of all others."""

    launched: float
    matmuls: float
    others: float

    @property
    def whole(self) -> float:
        return self.launched + self.matmuls + self.others


def _pricing(profile: ModelProfile, device: Device) -> Callable[[LayerProfile, float], Parts]:
    """Returns a function of a layer and its depth (`depth`): the seconds of its forward pass."""
    bandwidth = device.memory_bandwidth * device.efficiency_of(_elementwise(profile))
    peak, dtype = _peak(profile, device), _format(profile)
    share = {name: device.efficiency_of(device.counts_as(name, dtype)) for name in MATMULS}
    wave = device.wave_of(dtype)

    def forward_s(layer: LayerProfile, deep: float) -> Parts:
        """Adds half a wave for each matmul: `wave` / 2 elements, two FLOPs for each of its depth."""
        if not _has_work(layer):
            return Parts(0.0, 0.0, 0.0)
        compute_s = wave * deep / share["matmul"]
        for kernels, flops in _flops(layer, profile.micro_batch).items():
            compute_s += flops / share[kernels]
        bytes_s = (layer.bytes_moved - layer.elementwise_bytes) / bandwidth
        launched_s, others_s = layer.kernels * device.kernel_s, layer.elementwise_bytes / bandwidth
        return Parts(launched_s, max(compute_s / peak, bytes_s), others_s)

    return forward_s


def _flops(layer: LayerProfile, samples: int) -> dict[str, float]:
    """FLOPs by class of kernel, in the proportions of the products; those of a layer without products are of
    matmuls."""
    found: dict[str, float] = {}
    for product in layer.products:
        kernels = _kernels(product)
        found[kernels] = found.get(kernels, 0.0) + product.flops(samples)
    if whole := sum(found.values()):
        return {kernels: layer.flops * flops / whole for kernels, flops in found.items()}
    return {"matmul": layer.flops}


def _kernels(product: Product) -> str:
    """The class of a product's kernels. A convolution reads `in_` input channels x kernel for each group."""
    one_pixel = product.kind == "conv" and product.image and product.in_ * product.heads == product.image[0]
    return "matmul" if one_pixel else KERNELS.get(product.kind, "matmul")


def _elementwise(profile: ModelProfile) -> str:
    """The class of a model's elementwise kernels: images, where convolutions are at least half of its FLOPs."""
    flops: dict[bool, float] = {True: 0.0, False: 0.0}
    for layer in profile.layers:
        for product in layer.products:
            flops[product.kind == "conv"] += product.flops(profile.micro_batch)
    return "image" if flops[True] and flops[True] >= flops[False] else "elementwise"


def _has_work(layer: LayerProfile) -> bool:
    return layer.flops > 0 or layer.bytes_moved > 0


def _format(profile: ModelProfile) -> str:
    """Returns the number format in which matmuls compute."""
    return profile.autocast or profile.dtype


def _peak(profile: ModelProfile, device: Device) -> float:
    """Returns FLOP/s in the profile's format; 0 where the device has none."""
    return device.peak_flops.get(_format(profile), 0.0)


def _numbers(profile: ModelProfile, device: Device) -> str:
    dtype = _format(profile)
    wave = device.wave_of(dtype)
    waves = f", of a matmul's output {wave} elements at once" if wave else ""
    return (
        f"{_peak(profile, device) / 1e12:g} TFLOP/s {dtype}, {device.memory_bandwidth / 1e9:g} GB/s, "
        f"{device.kernel_s * 1e6:g} us a kernel, efficiency {_efficiency(device, dtype)}{waves}"
    )


def _efficiency(device: Device, dtype: str) -> str:
    """Those that count in a number format."""
    if not device.efficiencies:
        return f"{device.efficiency:g}"
    named = {name: device.counts_as(name, dtype) for name in MATMULS} | {"elementwise": "elementwise"}
    named |= {"image": "image"} if "image" in device.efficiencies else {}
    return ", ".join(f"{device.efficiency_of(kernels):g} ({name})" for name, kernels in named.items())


def _without_work(profile: ModelProfile) -> list[Problem]:
    if any(_has_work(layer) for layer in profile.layers):
        return []
    message = f"has neither FLOPs nor bytes in any of its {len(profile.layers)} layers, so that nothing can be priced"
    hint = "python run.py mode=profile costs=analytic model=NAME"
    return [Problem("profile", _name(profile), message, hint=hint)]


def _without_peaks(profile: ModelProfile, device: Device) -> list[Problem]:
    """Lists what the cluster's device lacks for analytic times."""
    problems = without_peak(_format(profile), device)
    if not device.memory_bandwidth:
        key = "cluster.memory_bandwidth_gb_s"
        message = f"is needed to price layers, {device.name} has none"
        problems.append(Problem(key, None, message, hint=f"its data sheet's GB/s as {key}"))
    return problems


def without_peak(name: str, device: Device) -> list[Problem]:
    """Lists the number format in which a model computes, if the device has no peak in it."""
    if device.peak_flops.get(name):
        return []
    key = f"cluster.peak_tflops.{name}"
    known = ", ".join(sorted(name for name, peak in device.peak_flops.items() if peak)) or "no format"
    message = f"is needed to price layers, {device.name} has it for {known}"
    return [Problem(key, None, message, hint=f"its data sheet's TFLOP/s as {key}")]


def _without_origin(profile: ModelProfile, origin: Device) -> list[Problem]:
    """Lists what is unknown of the device that a profile was measured on."""
    if _peak(profile, origin) and origin.memory_bandwidth:
        return []
    device = f"what it was measured on ({profile.source})"
    message = f"does not know the {_format(profile)} peak and the memory bandwidth of {device}"
    hint = "measure it again with python run.py mode=profile"
    return [Problem("profile", _name(profile), message, ({"costs": "analytic"},), hint)]


def _name(profile: ModelProfile) -> str:
    return profile.model or "without a name"
