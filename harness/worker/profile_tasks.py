"""Tasks of a worker other than training: measure or count the model, compare a profile with it, measure the machine.

Each task reads config.yaml in the run's folder and writes its result there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from harness.config import cluster_config, registry
from harness.core import units
from harness.core.memory_model import DTYPE_BYTES
from harness.core.model_profile import ModelProfile
from harness.core.problem import LEAVE_OUT, CannotRun, Problem
from harness.core.run_files import ENGINE_COSTS, MACHINE, PROFILE, TIMINGS
from harness.host import devices, machine, profile_cache
from harness.host.machine import Machine
from harness.interfaces import Model

if TYPE_CHECKING:
    from torch import nn

QUICK_S = 3.0
"""A profile that takes less time is sooner made than torch is loaded."""
SLACK = 1.7
"""Factor of a process's memory over the counted bytes: AmoebaNet-D (18, 256) and (18, 416) on the CPU take 1.7 and
1.5."""

COPIES = 4
"""Of a model fit into memory, where a second one is profiled next to it: others use the machine, too."""


def profile_model(folder: Path, config: DictConfig, samples: str, *ahead: str) -> None:
    """Measure the model for micro-batches of `samples` on one device; writes `profile.json`. Then `ahead`, see
    `_make_profiles`."""
    say("loading torch")
    from harness.measure import check_layers, profile_model
    from harness.runtime.training_state import choose_kernels

    choose_kernels(config.precision.tf32, config.precision.cudnn_benchmark)
    model = built(config, samples)
    device, precision = torch_devices(config, 1)[0], config.precision
    check_layers.check(model, device, say)
    kind = "cpu" if device == "cpu" else "cuda"
    there, reference_s = devices.detect(kind).memory_bytes, machine.reference_s(kind)

    def make(count: int) -> ModelProfile:
        say(f"profiling {model.name}, micro-batches of {count}")
        needed, by_value = check_size(model, count, precision.dtype, precision.autocast, there)
        room = not by_value and COPIES * needed <= there
        found = profile_model.measure(
            model,
            count,
            precision.dtype,
            device,
            autocast=precision.autocast,
            say=say,
            channels_last=precision.channels_last,
            compiled=precision.compile,
            reference_s=reference_s,
            twice=room and devices.cores() > 1,
            halves=room and not precision.compile,  # which takes long
        )
        return replace(found, by_value=by_value)

    _make_profiles(folder, make, samples, ahead)


def count_model(folder: Path, config: DictConfig, samples: str, *ahead: str) -> None:
    """Count the model's work for micro-batches of `samples`; writes `profile.json`, without times. Then `ahead`, see
    `_make_profiles`."""
    say("loading torch")
    from harness.measure import count_model

    model, precision = built(config, samples), config.precision

    def make(count: int) -> ModelProfile:
        say(f"counting {model.name}, micro-batches of {count}")
        return count_model.count(model, count, precision.dtype, precision.autocast)

    _make_profiles(folder, make, samples, ahead)


def built(config: DictConfig, samples: str | int) -> Model:
    """The model; one of the user's own is tried on a micro-batch of so many samples."""
    from harness.measure import check_model

    model: Model = registry.build("model", config.model)
    if registry.is_user_model("model", config.model):
        precision, whole = config.precision, int(samples) == config.batch.size
        check_model.check(model, int(samples), precision.dtype, precision.autocast, whole)
    return model


def _make_profiles(folder: Path, make: Callable[[int], ModelProfile], samples: str, ahead: Sequence[str]) -> None:
    """The profile that is asked for, and into the cache those `ahead` ("8=FILE") that other runs would load torch for
    again: in order, as long as one takes less time than that, and until one cannot be made here."""
    begun_s = time.monotonic()
    make(int(samples)).save(folder / PROFILE)
    for text in ahead:
        count, _, place = text.partition("=")
        if time.monotonic() - begun_s > QUICK_S:
            return
        begun_s = time.monotonic()
        try:
            profile_cache.store(Path(place), make(int(count)))
        except CannotRun:
            return  # if it is needed, it is asked for, and refused then


def compare_profile(folder: Path, config: DictConfig) -> None:
    """Raise `CannotRun` if `profile.json`, which is the user's, is not one of the model."""
    say("loading torch")
    profile = ModelProfile.load(folder / PROFILE)
    check_profile(built(config, profile.micro_batch), profile, config.profile)


def measure_machine(folder: Path, config: DictConfig, kind: str, parts: str = "all") -> None:
    """Measure the devices of one kind ("cpu"), as the run uses them; writes `machine.json`.

    `parts`: "all", all but what several processes do ("threads"), or that alone ("processes"), next to what is in the
    cache."""
    say("loading torch")
    from harness.measure import benchmark_machine
    from harness.runtime.training_state import choose_kernels

    choose_kernels(config.precision.tf32, config.precision.cudnn_benchmark)
    known = machine.stored(kind, tf32=config.precision.tf32) if parts == "processes" else None
    benchmark_machine.measure(kind, say, parts != "threads", known).save(folder / MACHINE)


def measure_engine(folder: Path, config: DictConfig) -> None:
    """Measure what the run's engine takes beyond kernels and messages on the machine of `machine.json`; writes
    `engine_costs.json`."""
    say("loading torch")
    import torch

    from harness.runtime import collectives
    from harness.worker import measure_engine

    torch.set_num_threads(1)
    collectives.outlast(config.launch.timeout_s)
    measure_engine.measure(config, Machine.load(folder / MACHINE), say).save(folder / ENGINE_COSTS)


def calibrate_links(folder: Path, config: DictConfig, count: str) -> None:
    """Time collectives among up to `count` devices; writes `timings.json`."""
    say("loading torch")
    from harness.measure import time_collectives

    names = torch_devices(config, int(count))
    time_collectives.measure(names, config.steps, config.warmup, say).save(folder / TIMINGS)


def check_size(model: Model, samples: int, dtype: str, autocast: str | None, there_bytes: int) -> tuple[int, str]:
    """Raise `CannotRun` if the whole model does not fit where it is to be profiled.

    That takes its weights, their gradients, and all that autograd saves of `samples` samples. Returns these bytes, and
    where the model chooses by values of tensors what it computes, if it does.
    """
    import torch

    from harness.measure import count_model

    with torch.device("meta"):
        state = 2 * _parameter_bytes(model.layers(), dtype)
    needed, of = state, "for weights and gradients alone"
    by_value = ""
    if state <= there_bytes:
        try:
            counted = count_model.count(model, samples, dtype, autocast)
            needed = round(SLACK * (state + counted.sum("saved_bytes", 0, len(counted.layers) - 1)))
            of = f"for weights, gradients and the activations of {samples} samples with their workspaces"
        except count_model.NotCounted as error:
            by_value = error.where
    if needed > there_bytes:
        here = units.size(there_bytes)
        message = f"needs {units.size(needed)} to be profiled, {of}; {here} are here"
        fix = {"costs": "analytic"}
        raise CannotRun([Problem("model", model.name, message, (fix,), "profile=FILE, measured where it fits")])
    return needed, by_value


def _parameter_bytes(layers: nn.Module, dtype: str) -> int:
    return sum(parameter.numel() for parameter in layers.parameters()) * DTYPE_BYTES[dtype]


def check_profile(model: Model, profile: ModelProfile, file: str) -> None:
    """Raise `CannotRun` if a stored profile is not of this model: another name, other layers, parameters or skips."""
    import torch

    from harness.nn.skip import layer_skips, named_layers

    with torch.device("meta"):
        layers = model.layers()
    size = _parameter_bytes(layers, profile.dtype)
    stored = profile.parameter_bytes()
    skips = layer_skips(named_layers(layers))
    what = f"is of {model.name} with {{}}, it has {{}} now"
    wrong = ""
    if profile.model != model.name:
        wrong = f"is of {profile.model or 'a model without a name'}, the model is {model.name}"
    elif len(profile.layers) != len(layers):
        wrong = what.format(f"{len(profile.layers)} layers", len(layers))
    elif stored != size:
        wrong = what.format(f"{stored} bytes of parameters", size)
    elif {(skip.source, skip.target) for skip in profile.skips} != {(skip.source, skip.target) for skip in skips}:
        known = ", ".join([skip.name for skip in skips[:3]] + ["..."] * (len(skips) > 3))
        wrong = f"has {len(profile.skips) or 'no'} skips, {model.name} has {len(skips)} ({known})"
    if wrong:
        hint = "python run.py mode=profile model=..."
        raise CannotRun([Problem("profile", file, wrong, ({"profile": LEAVE_OUT},), hint)])


def say(text: str) -> None:
    """Print a line into the log; the parent sees by it that the worker makes progress."""
    print(text, flush=True)


def torch_devices(config: DictConfig, count: int) -> tuple[str, ...]:
    """The torch names of `count` devices of this machine, of the kind that the configuration asks for."""
    cluster = cluster_config.from_group(config.cluster)
    there = devices.detect(cluster.device if cluster_config.is_local(cluster) else "auto")
    return devices.torch_names(there.kind, count)
