"""The race of all engines: one model, one batch, two devices, in turns.

Every contestant lives in a process of its own, engines of ranks with a rank for each device; it computes only when it
is its turn.

    bench --"step"--> single             |== step ==|
          --"step"--> gpipe                         |== step ==|
          --"step"--> deepspeed rank 0                         |== step ==|
                                rank 1                         |== step ==|

Who fails takes no further part, which its row says; the others race on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import torch

from analysis.bench.contestant import Contestant, Entry
from analysis.bench.race import Times, race, speedup
from analysis.bench.results import BASE
from harness import check, clusters, devices, machine, planning, ranks, registry
from harness.compose import compose
from harness.interfaces import Batch, Engine, Model, OptimizerSpec, SessionSpec
from harness.machine import Machine
from harness.problem import CannotRun
from harness.profile import ModelProfile
from harness.profiling import measure

T = TypeVar("T")
Row = dict[str, Any]
DEVICES = 2
MODELS = {
    "U-Net": ("model=unet", "batch.size=16", "batch.micro_batches=8"),
    "GPT": ("model=gpt", "model.hidden=256", "model.sequence=128", "batch.size=16", "batch.micro_batches=8"),
    "AmoebaNet-D": ("model=amoebanet", "model.channels=64", "model.size=128", "batch.size=16", "batch.micro_batches=8"),
}
"""Small, but with kernels of a millisecond: below that the interpreter is what is measured."""
ON_GPUS = {
    "U-Net": ("model=unet_5_64", "batch.size=32", "batch.micro_batches=8"),
    "GPT": ("model=gpt_110m", "batch.size=32", "batch.micro_batches=8"),
    "AmoebaNet-D": ("model=amoebanet_18_208", "batch.size=32", "batch.micro_batches=8"),
}
"""The same race on a machine with GPUs."""
CONTESTANTS = {
    BASE: ("engine=single",),
    "single, all threads": ("engine=single", "engine.threads=0"),
    "gpipe": ("engine=gpipe", "engine.checkpoint=never"),
    "torchgpipe": ("engine=torchgpipe", "engine.checkpoint=never"),
    "torch_pipelining, GPipe": ("engine=torch_pipelining", "engine.schedule=gpipe"),
    "torch_pipelining, 1F1B": ("engine=torch_pipelining", "engine.schedule=1f1b"),
    "torch_pipelining, interleaved": ("engine=torch_pipelining", "engine.schedule=interleaved1f1b"),
    "torch_pipelining, ZB-V": ("engine=torch_pipelining", "engine.schedule=zbv"),
    "deepspeed, pipeline": ("engine=deepspeed",),
    "myelin": ("engine=myelin",),
    "sbp": ("engine=sbp", "planner=autoddl", "mesh.tensor=2"),
    "ddp": ("engine=ddp",),
    "fsdp": ("engine=fsdp",),
    "deepspeed, ZeRO 1": ("engine=deepspeed", "engine.zero=1", "mesh.pipeline=1"),
    "deepspeed, ZeRO 2": ("engine=deepspeed", "engine.zero=2"),
    "deepspeed, ZeRO 3": ("engine=deepspeed", "engine.zero=3"),
}
"""By what the table calls them. Those whose engine is not there are left out."""


def all_engines(rounds: int) -> list[Row]:
    """U-Net, GPT and AmoebaNet-D on two devices over all engines that take them, in turns; `single` is one device.

    A device has as many samples of a micro-batch everywhere: engines that share it, or the batch, have fewer of them.
    No checkpointing.
    """
    torch.set_num_threads(1)  # so that the processes that are forked inherit no pool of threads
    found = devices.detect()
    here = machine.stored() or apart(machine.measure, devices.torch_names(found.kind, 1)[0])
    models = MODELS if found.kind == "cpu" else ON_GPUS
    return [row for name, keys in models.items() for row in of_model(name, keys, here, rounds)]


def of_model(name: str, keys: Sequence[str], here: Machine, rounds: int) -> list[Row]:
    """The race of one model: `name` is what the rows call it, `keys` choose model and batch."""
    entries, refused = entered(keys, here)
    config = compose([*keys, f"engine={BASE}"])
    torch.manual_seed(0)
    model: Model = registry.build("model", config.model)
    rows = contest(name, entries, model.sample(config.batch.size), rounds)
    return rows + [{"model": name, "contestant": title, "note": why} for title, why in refused.items()]


def entered(keys: Sequence[str], here: Machine) -> tuple[dict[str, Entry], dict[str, str]]:
    """The contestants whose engines are there: those that can run, and why the others cannot."""
    there = {plugin.name for plugin in registry.scan() if plugin.group == "engine"}
    entries: dict[str, Entry] = {}
    refused: dict[str, str] = {}
    profile = profiled(keys)
    for title, own in CONTESTANTS.items():
        if own[0].partition("=")[2] not in there:
            continue
        try:
            entries[title] = entry([*keys, *own], profile, here)
        except CannotRun as error:
            refused[title] = "; ".join(f"{problem.key} {problem.what}" for problem in error.problems)
    return entries, refused


def contest(model: str, entries: Mapping[str, Entry], batch: Batch, rounds: int) -> list[Row]:
    """One row for each contestant; of those that failed it says when and why."""
    with ExitStack() as stack:
        all_ = {title: stack.enter_context(Contestant(entry, batch)) for title, entry in entries.items()}
        times = race({title: one.step for title, one in all_.items()}, rounds)
        peaks = {title: one.peak_bytes() for title, one in all_.items()}
    finished = {title: taken for title, taken in times.items() if not math.isnan(sum(taken.rounds_s))}
    return [_row(model, title, finished, peaks[title], one.failed) for title, one in all_.items()]


def _row(model: str, title: str, times: Mapping[str, Times], peaks: list[int] | None, failed: str) -> Row:
    row: Row = {"model": model, "contestant": title}
    if title in times:
        row |= {"step": times[title].median_s, "quartiles": list(times[title].spread_s)}
    if title in times and BASE in times:
        row[f"speed / {BASE}"] = speedup(times, title, BASE)
    if peaks:
        row["peak memory"] = max(peaks)
    return row | ({"note": failed} if failed else {})


def profiled(keys: Sequence[str]) -> ModelProfile:
    """The times of the layers with micro-batches as the keys have them, of one thread."""
    config = compose([*keys, "engine=single"])
    device = devices.torch_names(devices.detect().kind, 1)[0]
    model: Model = registry.build("model", config.model)
    samples = config.batch.size // config.batch.micro_batches
    return apart(lambda: measure(model, samples, "float32", device, repeats=9), device)


def apart(work: Callable[[], T], device: str) -> T:
    """In a process of its own: what is forked from this one later finds neither threads nor CUDA in use."""
    return ranks.each(1, work, [device])


def entry(overrides: Sequence[str], profile: ModelProfile, here: Machine, count: int = DEVICES) -> Entry:
    """Planned for `count` devices as the front door plans. Raises CannotRun for what the engine refuses."""
    found = devices.detect()
    config = compose([*overrides, "optimizer.lr=0.01", *([f"cluster.devices={count}"] if found.kind == "cpu" else [])])
    engine: Engine = registry.build("engine", config.engine)
    names = devices.torch_names(found.kind, count)
    cluster = clusters.build(clusters.of(config.cluster), here)
    check.fill(config, engine.capabilities, count)
    tensor = config.mesh.tensor or 1  # a device's share of a micro-batch is as large as the others' micro-batches
    config.batch.micro_batches //= (config.mesh.data or 1) * min(tensor, config.batch.micro_batches)
    profile = profile.of_samples(check.micro_batch(config))
    if problems := check.request(config, engine.capabilities, cluster):
        raise CannotRun(problems)
    draft = planning.draft(config, engine, registry.build("planner", config.planner), profile, cluster)
    spec = SessionSpec(names, OptimizerSpec(**config.optimizer), seed=config.seed)
    return Entry(engine, registry.build("model", config.model), draft.plan, spec, profile)
